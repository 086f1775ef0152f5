// Dispatch: a token's row goes once to each server that it has experts on, with a header that says
// where each choice belongs; inside a server it is handed once to each rank, and lands in the
// slots.
//
// The row that moves: the parts of all payload tensors, the weights [K] if any, the header
// (RowEntry[K]), each at a multiple of 16 bytes. What is sent is listed by route (pack_list and
// entries: by destination, then token); the table counts rows in that list.
//
// Who writes what, beside the rows: a proxy, for each chunk and local rank, the Arrival records
// [source] in that rank's scratch before it signals land (always, for the table cannot know whom a
// chunk touches); and its own handle's `touched`. Rows of one source in a chunk are a run of that
// source's tokens, so those for one rank are a run of its window.
//
// Example, 2 servers x 2 ranks, K = 2, two experts per rank: token 5 of rank 0 chooses experts 5
// and 6, on ranks 2 and 3. Its row crosses once, 0 -> 2. Rank 2 finds choice 0 is its own and
// scatters the row into its slot; for choice 1 it copies the row to the window of rank 3, at the
// row that the header names, and tells rank 3 {window_row, 1, partial_row}. Rank 3 lands it. In the
// combine rank 3 will send its sum for that window row to partial_row of rank 2.
#pragma once

#include "kernels/body/items.h"

namespace fastkern {

// Where a row of a dispatch is read from: a row that moved, or (wire null) the caller's tensors.
struct RowSource {
    const u8* wire;
    const RowEntry* entries;
    u64 token;

    FASTKERN_DEVICE const u8* part(const MoeArgs& moe, u32 p) const {
        return wire ? wire + moe.parts[p].offset
                    : moe.parts[p].input + token * moe.parts[p].row_bytes;
    }
    FASTKERN_DEVICE const u8* weight(const MoeArgs& moe, u32 topk, u32 k) const {
        return (wire ? wire + moe.weights_offset
                     : moe.weights_input + token * topk * moe.weight_bytes) +
               k * u64{moe.weight_bytes};
    }
};

FASTKERN_DEVICE inline RowSource wire_row(const MoeArgs& moe, const u8* wire) {
    return RowSource{wire, reinterpret_cast<const RowEntry*>(wire + moe.header_offset), 0};
}

FASTKERN_DEVICE inline void copy_weight(u8* to, const u8* from, u32 bytes) {
    if (bytes == 8)
        *reinterpret_cast<u64*>(to) = from ? *reinterpret_cast<const u64*>(from) : 0;
    else
        *reinterpret_cast<u32*>(to) = from ? *reinterpret_cast<const u32*>(from) : 0;
}

// Lands a row: into the slot of every choice that is here (expert layout), or into one row.
template <class Target>
FASTKERN_DEVICE void scatter_row(const Target& target, const MoeArgs& moe, const HandleView& handle,
                                 u32 own_local, const RowSource& row, u64 window_row) {
    const u32 topk = handle.header->topk;
    const bool expert_layout = handle.header->layout == kExpertLayout;
    for (u32 k = 0; k < topk; ++k) {
        if (!expert_layout || row.entries[k].local_rank != own_local) continue;
        for (u32 p = 0; p < moe.num_parts; ++p)
            target.copy(moe.parts[p].output + row.entries[k].slot * moe.parts[p].row_bytes,
                        row.part(moe, p), moe.parts[p].row_bytes);
    }
    if (!expert_layout)
        for (u32 p = 0; p < moe.num_parts; ++p)
            target.copy(moe.parts[p].output + window_row * moe.parts[p].row_bytes, row.part(moe, p),
                        moe.parts[p].row_bytes);
    for (u32 k = target.lane(); k < topk; k += target.num_lanes()) {
        const RowEntry& e = row.entries[k];
        const bool here = e.local_rank == own_local;
        const u64 at = window_row * topk + k;
        if (moe.record) handle.window_slots[at] = here ? e.slot : kNone;
        if (expert_layout) {
            if (here && moe.weight_bytes)
                copy_weight(moe.weights_output + e.slot * u64{moe.weight_bytes},
                            row.weight(moe, topk, k), moe.weight_bytes);
        } else {
            if (moe.index_output) moe.index_output[at] = here ? e.slot : ~u64{0};
            if (moe.weight_bytes)
                copy_weight(moe.weights_output + at * moe.weight_bytes,
                            here ? row.weight(moe, topk, k) : nullptr, moe.weight_bytes);
        }
    }
}

// Puts a row together at `to` from the caller's tensors and the list that route made.
template <class Target>
FASTKERN_DEVICE void gather_row(const Target& target, const MoeArgs& moe, const HandleView& handle,
                                u64 list_row, u8* to) {
    const u32 topk = handle.header->topk;
    const u64 token = handle.pack_list[list_row];
    for (u32 p = 0; p < moe.num_parts; ++p)
        target.copy(to + moe.parts[p].offset, moe.parts[p].input + token * moe.parts[p].row_bytes,
                    moe.parts[p].row_bytes);
    if (moe.weight_bytes)
        target.copy(to + moe.weights_offset, moe.weights_input + token * topk * moe.weight_bytes,
                    u64{topk} * moe.weight_bytes);
    target.copy(to + moe.header_offset,
                reinterpret_cast<const u8*>(handle.entries + list_row * topk),
                topk * sizeof(RowEntry));
}

FASTKERN_DEVICE inline const RowEntry* first_entry_of(const RowEntry* entries, u32 topk,
                                                      u32 local_rank) {
    for (u32 k = 0; k < topk; ++k)
        if (entries[k].local_rank == local_rank) return entries + k;
    return nullptr;
}

// One lane, for one local rank `d`: how many rows of the chunk are for it; writes what it and a
// combine need to know.
template <class Target>
FASTKERN_DEVICE void tell_arrivals(const Target& target, const TableView& table,
                                   const KernelArgs& args, const HandleView& handle,
                                   const Item& item, u32 d, Arrival* arrivals) {
    const MoeArgs& moe = *args.moe;
    const Stream& s = table.streams[item.stream];
    const u32 topk = handle.header->topk, m = table.header->gpus_per_server;
    const u64 row_bytes = table.header->row_bytes;
    const u8* const rows = args.data[args.rank] + data_layout(*table.header).receive +
                           s.source_row * row_bytes + moe.header_offset;
    const auto entry = [&](u64 row) {
        return first_entry_of(reinterpret_cast<const RowEntry*>(rows + row * row_bytes), topk, d);
    };
    u32 total = 0, next = 0;
    const bool others = arrivals != nullptr;
    if (others)
        for (u64 row = item.first_row; row < item.first_row + item.num_rows; ++row)
            total += entry(row) != nullptr;
    if (others && moe.record && total)
        next = static_cast<u32>(target.fetch_add(&handle.header->num_partials, total));
    if (others)
        for (u32 source = 0; source < m; ++source) arrivals[source] = Arrival{0, 0, 0, 0};
    for (u32 k = item.first_segment; k < s.first_segment + s.num_segments; ++k) {
        const Part part = part_of(table.segments[k], item);
        if (part.num_rows == 0) break;
        Arrival told{0, 0, next, 0};
        for (u64 row = part.stream_row; row < part.stream_row + part.num_rows; ++row) {
            const RowEntry* e = entry(row);
            if (moe.record)
                handle.touched[(s.source_row + row) * m + d] = !e       ? kNone
                                                               : others ? next
                                                                        : e->window_row;
            if (!e) continue;
            if (told.num_rows++ == 0) told.window_row = e->window_row;
            ++next;
        }
        if (others) arrivals[table.segments[k].peer % m] = told;
    }
}

template <class Target, class Transport>
FASTKERN_DEVICE void receive_rows(const Target& target, const Transport& transport,
                                  const TableView& table, const KernelArgs& args,
                                  const HandleView& handle, const Item& item) {
    const MoeArgs& moe = *args.moe;
    const Stream& s = table.streams[item.stream];
    const DataLayout layout = data_layout(*table.header);
    const u64 row_bytes = table.header->row_bytes;
    const u32 topk = handle.header->topk, m = table.header->gpus_per_server;
    const u32 own_local = args.rank % m, own_server = args.rank / m;
    const FlagLayout flags{table.header->num_ranks, table.header->servers, m,
                           table.header->chunk_slots};
    give_credit(target, transport, table, item);
    for (u32 k = target.lane(); k <= s.num_links; k += target.num_lanes()) {
        if (k == s.num_links) {  // this rank itself
            if (moe.record) tell_arrivals(target, table, args, handle, item, own_local, nullptr);
            continue;
        }
        const Link& link = table.links[s.first_link + k];
        Arrival* const scratch = reinterpret_cast<Arrival*>(args.data[link.rank] + layout.scratch);
        tell_arrivals(target, table, args, handle, item, link.rank % m,
                      scratch + u64{flags.arrival(link.slot + item.chunk)} * m);
    }
    const u8* const staged = args.data[args.rank] + layout.receive + s.source_row * row_bytes;
    for (u64 row = item.first_row; row < item.first_row + item.num_rows; ++row) {
        const RowSource source = wire_row(moe, staged + row * row_bytes);
        for (u32 k = 0; k < topk; ++k) {
            const RowEntry e = source.entries[k];
            if (e.local_rank == kNone) continue;
            if (first_entry_of(source.entries, k, e.local_rank)) continue;  // sent already
            if (e.local_rank == own_local)
                scatter_row(target, moe, handle, own_local, source, e.window_row);
            else
                target.copy(args.data[own_server * m + e.local_rank] + layout.window +
                                e.window_row * row_bytes,
                            source.wire, row_bytes);
        }
    }
    if (s.num_links == 0) return;
    target.drain();
    target.barrier();
    for (u32 k = target.lane(); k < s.num_links; k += target.num_lanes()) {
        const Link& link = table.links[s.first_link + k];
        u64 bytes = 0;
        for (u64 row = item.first_row; row < item.first_row + item.num_rows; ++row)
            if (first_entry_of(wire_row(moe, staged + row * row_bytes).entries, topk,
                               link.rank % m))
                bytes += row_bytes;
        transport.signal(link.rank, link.slot + item.chunk, 1, kScaleUp, bytes);
    }
}

// Rows that a proxy has put into this rank's window, as its Arrival records tell.
template <class Target>
FASTKERN_DEVICE void land_rows(const Target& target, const TableView& table, const KernelArgs& args,
                               const HandleView& handle, const Item& item) {
    const MoeArgs& moe = *args.moe;
    const Stream& s = table.streams[item.stream];
    const DataLayout layout = data_layout(*table.header);
    const u32 m = table.header->gpus_per_server;
    const FlagLayout flags{table.header->num_ranks, table.header->servers, m,
                           table.header->chunk_slots};
    const u8* const own = args.data[args.rank];
    const u64 first = u64{flags.arrival(s.slot + item.chunk)} * m;
    const Arrival* const arrivals = reinterpret_cast<const Arrival*>(own + layout.scratch) + first;
    for (u32 source = 0; source < m; ++source) {
        const Arrival a = arrivals[source];
        for (u64 row = a.window_row; row < u64{a.window_row} + a.num_rows; ++row)
            scatter_row(target, moe, handle, args.rank % m,
                        wire_row(moe, own + layout.window + row * table.header->row_bytes), row);
        if (moe.record && target.lane() == 0) handle.arrivals[first + source] = a;
    }
}

template <class Target, class Transport>
FASTKERN_DEVICE void dispatch_rows(const Target& target, const Transport& transport,
                                   const TableView& table, const KernelArgs& args,
                                   const Item& item) {
    const MoeArgs& moe = *args.moe;
    const HandleView handle = view_handle(moe.handle);
    if (item.queue == kPut) return run_put(transport, table, args, item);
    if (item.queue == kReceive) return receive_rows(target, transport, table, args, handle, item);
    if (item.queue == kLand) return land_rows(target, table, args, handle, item);

    const Stream& s = table.streams[item.stream];
    const DataLayout layout = data_layout(*table.header);
    const u64 row_bytes = table.header->row_bytes;
    const u32 own_local = args.rank % table.header->gpus_per_server;
    u64 sent_bytes = 0;
    for (u32 k = item.first_segment; k < s.first_segment + s.num_segments; ++k) {
        const Part part = part_of(table.segments[k], item);
        if (part.num_rows == 0) break;
        for (u64 row = 0; row < part.num_rows; ++row) {
            const u64 target_row = s.target_row + part.stream_row + row;
            if (item.queue == kPack) {
                gather_row(target, moe, handle, part.row + row,
                           args.data[s.peer] + layout.send + target_row * row_bytes);
            } else if (item.queue == kTake) {
                const u8* wire = args.data[args.rank] + layout.window;
                scatter_row(target, moe, handle, own_local,
                            wire_row(moe, wire + (part.row + row) * row_bytes), part.row + row);
            } else if (s.peer != args.rank) {  // push
                gather_row(target, moe, handle, part.row + row,
                           args.data[s.peer] + layout.window + target_row * row_bytes);
            } else {
                const u64 list_row = part.row + row;
                const RowSource source{nullptr, handle.entries + list_row * handle.header->topk,
                                       handle.pack_list[list_row]};
                scatter_row(target, moe, handle, own_local, source, target_row);
            }
        }
        sent_bytes += part.num_rows * row_bytes;
    }
    if (item.queue <= kPush && s.slot != kNoSlot)
        signal_after_writes(target, transport, s.peer, s.slot + item.chunk, kScaleUp,
                            s.peer == args.rank ? 0 : sent_bytes);
}

}  // namespace fastkern
