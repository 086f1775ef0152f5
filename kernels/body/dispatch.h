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

// What a dispatch or combine knows besides.
template <class TargetType, class TransportType>
struct MoeCall : Call<TargetType, TransportType> {
    using Target = TargetType;

    mutable const MoeArgs* moe_arguments;

    FASTKERN_DEVICE const MoeArgs& moe() const { return *moe_arguments; }
    FASTKERN_DEVICE decltype(auto) handle() const {
        return this->target.template kept<HandleView>([this] { return find_handle(); });
    }
    FASTKERN_DEVICE void keep_views() const {
        Call<TargetType, TransportType>::keep_views();
        this->target.keep(find_handle());
    }
    FASTKERN_DEVICE void forget() const {
        Call<TargetType, TransportType>::forget();
        Target::forget(&moe_arguments);
    }

    FASTKERN_DEVICE HandleView find_handle() const {
        return view_handle(Target::global(moe_arguments->handle), handle_header());
    }
    // What nobody writes while the kernel runs: all of it but num_partials.
    FASTKERN_DEVICE const HandleHeader& handle_header() const {
        return *Target::constant(reinterpret_cast<const HandleHeader*>(moe_arguments->handle));
    }
    FASTKERN_DEVICE u32 ranks_here() const { return this->header().gpus_per_server; }
    FASTKERN_DEVICE u32 own_local() const { return this->header().local_rank; }
    // Arrival records of a landing flag, one of each source; in scratch and in a handle alike.
    FASTKERN_DEVICE u64 first_arrival(u32 land_slot) const {
        const Header& h = this->header();
        const FlagLayout flags{h.num_ranks, h.servers, h.gpus_per_server, h.chunk_slots};
        return u64{flags.arrival(land_slot)} * ranks_here();
    }
};

// Where a row of a dispatch is read from: a row that moved, or (wire null) the caller's tensors.
struct RowSource {
    const u8* wire;
    const RowEntry* entries;
    u32 token;
};

FASTKERN_DEVICE inline void copy_weight(u8* to, const u8* from, u32 bytes) {
    if (bytes == 8)
        *reinterpret_cast<u64*>(to) = from ? *reinterpret_cast<const u64*>(from) : 0;
    else
        *reinterpret_cast<u32*>(to) = from ? *reinterpret_cast<const u32*>(from) : 0;
}

// The first choice of a row for a rank, among the first `end`; `end` without any.
FASTKERN_DEVICE inline u32 first_choice(const RowEntry* entries, u32 end, u32 local_rank) {
    u32 k = 0;
    while (k < end && entries[k].local_rank != local_rank) ++k;
    return k;
}

// One team, for one local rank `d`: how many rows of the chunk are for it; writes what it and a
// combine need to know. arrivals: its records, [sources]; null for this rank itself.
template <class Call>
FASTKERN_DEVICE void tell_arrivals(const Call& call, const RunningItem<Call>& item, u32 d,
                                   Arrival* arrivals) {
    const auto& target = call.target;
    const Stream& s = call.table().streams[item.stream()];
    const u32 topk = call.handle_header().topk, m = call.ranks_here();
    const u32 lane = target.team_lane(), lanes = target.team_lanes();
    // The first choice for `d` of a row of the chunk; null without any, or past the end.
    const auto choice = [&](u32 row, u32 end) -> const RowEntry* {
        if (row >= end) return nullptr;
        const u8* const wire = call.own_data() + call.layout().receive +
                               (s.source_row + item.first_row() + row) * call.header().row_bytes;
        const auto* entries = reinterpret_cast<const RowEntry*>(
            Call::Target::global(wire + call.moe().header_offset));
        const u32 k = first_choice(entries, topk, d);
        return k < topk ? entries + k : nullptr;
    };
    const u32 num_rows = static_cast<u32>(item.num_rows());
    u32 next = 0, found = 0;
    if (arrivals) {
        u32 total = 0;
        FASTKERN_ROLLED
        for (u32 row = 0; row < num_rows; row += lanes) {
            target.team_rank(choice(row + lane, num_rows) != nullptr, &found);
            total += found;
        }
        if (lane == 0 && call.moe().record && total)
            next = static_cast<u32>(target.fetch_add(&call.handle().header->num_partials, total));
        next = target.team_pick(next, lane == 0);
        if (lane == 0)  // sources without rows are told of too
            for (u32 source = 0; source < m; ++source) arrivals[source] = Arrival{0, 0, next, 0};
    }
    FASTKERN_ROLLED
    for (u32 k = item.first_segment(); k < s.first_segment + s.num_segments; ++k) {
        const Part part = part_of(call.table().segments[k], item);
        if (part.num_rows == 0) break;
        const u32 first = next, begin = static_cast<u32>(part.stream_row - item.first_row());
        const u32 end = begin + static_cast<u32>(part.num_rows);
        u32 first_window_row = 0;
        FASTKERN_ROLLED
        for (u32 row = begin; row < end; row += lanes) {
            const RowEntry* const entry = choice(row + lane, end);
            const u32 window_row = entry ? entry->window_row : kNone;
            const u32 place = next + target.team_rank(entry != nullptr, &found);
            if (call.moe().record && row + lane < end)
                call.handle().touched[(s.source_row + item.first_row() + row + lane) * m + d] =
                    arrivals && entry ? place : window_row;
            if (next == first) first_window_row = target.team_pick(window_row, entry != nullptr);
            next += found;
        }
        if (arrivals && lane == 0)
            arrivals[call.table().segments[k].peer % m] =
                Arrival{first_window_row, next - first, first, 0};
    }
}

// One team. What a landed row leaves besides its payload, for each choice: slots and weights.
template <class Call>
FASTKERN_DEVICE void record_choices(const Call& call, const RowSource& row, u64 window_row) {
    const auto& target = call.target;
    const MoeArgs& moe = call.moe();
    const u32 topk = call.handle_header().topk, own_local = call.own_local();
    const bool expert_layout = call.handle_header().layout == kExpertLayout;
    for (u32 k = target.team_lane(); k < topk; k += target.team_lanes()) {
        const u32 slot = row.entries[k].slot;
        const bool here = row.entries[k].local_rank == own_local;
        const u64 at = window_row * topk + k;
        if (moe.record) call.handle().window_slots[at] = here ? slot : kNone;
        if (!expert_layout && moe.index_output) moe.index_output[at] = here ? slot : ~u64{0};
        if (moe.weight_bytes && (here || !expert_layout)) {
            const u8* const weights =
                row.wire ? row.wire + moe.weights_offset
                         : moe.weights_input + u64{row.token} * topk * moe.weight_bytes;
            copy_weight(moe.weights_output + (expert_layout ? slot : at) * moe.weight_bytes,
                        here ? weights + k * moe.weight_bytes : nullptr, moe.weight_bytes);
        }
    }
}

// What one choice of a row asks of its reader.
enum ChoiceKind : u32 { kNothing, kLandRow, kForwardRow };

// Land: here; in the rank layout one row stands for all choices. Forward: to another rank here,
// once.
template <class Call>
FASTKERN_DEVICE u32 choice_kind(const Call& call, const RowSource& row, u32 k, bool forward) {
    const u32 local_rank = call.target.uniform(row.entries[k].local_rank);
    const bool here = local_rank == call.own_local();
    if (local_rank == kNone || (!here && !forward)) return kNothing;
    if (here && call.handle_header().layout == kExpertLayout) return kLandRow;
    for (u32 j = 0; j < k; ++j)  // sent already
        if (call.target.uniform(row.entries[j].local_rank) == local_rank) return kNothing;
    return here ? kLandRow : kForwardRow;
}

// One team. Gathers a row at `to`: payloads, weights, header; or (to null) takes it to where its
// choices want it, those of other ranks too where `forward` says so.
template <class Call>
FASTKERN_DEVICE void move_row(const Call& call, const RowSource& row, u8* to, bool forward) {
    const auto& target = call.target;
    const MoeArgs& moe = call.moe();
    const u32 topk = call.handle_header().topk;
    u32 landed = kNone;  // window row
    FASTKERN_ROLLED
    for (u32 k = 0; k < (to ? 1 : topk); ++k) {
        u32 at = 0, kind = kLandRow;
        u8* whole = nullptr;
        if (!to) {
            kind = target.uniform(choice_kind(call, row, k, forward));
            if (kind == kNothing) continue;
            at = target.uniform(row.entries[k].window_row);
            if (kind == kForwardRow) {
                const u32 rank =
                    call.args().rank - call.own_local() + target.uniform(row.entries[k].local_rank);
                whole =
                    call.args().data[rank] + call.layout().window + at * call.header().row_bytes;
            } else {
                landed = at;
                if (call.handle_header().layout == kExpertLayout)
                    at = target.uniform(row.entries[k].slot);
            }
        }
        const u32 num_pieces = kind == kForwardRow ? 1 : moe.num_parts + (to ? 2 : 0);
        FASTKERN_ROLLED
        for (u32 p = 0; p < num_pieces; ++p) {
            const u8* from = row.wire;
            u8* into = whole;
            u32 bytes = static_cast<u32>(call.header().row_bytes);
            if (kind == kForwardRow) {
            } else if (p < moe.num_parts) {
                const PayloadPart& part = moe.parts[p];
                bytes = static_cast<u32>(part.row_bytes);
                from = row.wire ? row.wire + part.offset : part.input + row.token * part.row_bytes;
                into = to ? to + part.offset : part.output + at * part.row_bytes;
            } else if (p == moe.num_parts) {
                bytes = topk * moe.weight_bytes;
                from = moe.weights_input + row.token * u64{bytes};
                into = to + moe.weights_offset;
            } else {
                bytes = topk * sizeof(RowEntry);
                from = reinterpret_cast<const u8*>(row.entries);
                into = to + moe.header_offset;
            }
            target.team_copy(into, from, bytes);
        }
    }
    if (landed != kNone) record_choices(call, row, landed);
}

// What a proxy tells the ranks of its server of a chunk, itself included; a team for each.
template <class Call>
FASTKERN_DEVICE void tell_all_arrivals(const Call& call, const RunningItem<Call>& item) {
    const Stream& s = call.table().streams[item.stream()];
    for (u32 k = call.target.team(); k <= s.num_links; k += call.target.num_teams()) {
        u32 rank = call.args().rank;
        Arrival* arrivals = nullptr;
        if (k < s.num_links) {
            const Link& link = call.table().links[s.first_link + k];
            rank = link.rank;
            arrivals = reinterpret_cast<Arrival*>(call.args().data[rank] + call.layout().scratch) +
                       call.first_arrival(link.slot + item.chunk());
        } else if (!call.moe().record) {
            break;
        }
        tell_arrivals(call, item, rank % call.ranks_here(), arrivals);
    }
}

// Tells every local rank that its part of a chunk is there, if it has one or not.
template <class Call>
FASTKERN_DEVICE void signal_all(const Call& call, const RunningItem<Call>& item) {
    const auto& target = call.target;
    const Stream& s = call.table().streams[item.stream()];
    const u64 row_bytes = call.header().row_bytes;
    const u8* const staged =
        call.own_data() + call.layout().receive + (s.source_row + item.first_row()) * row_bytes;
    target.drain();
    target.barrier();
    for (u32 k = target.lane(); k < s.num_links; k += target.num_lanes()) {
        const Link& link = call.table().links[s.first_link + k];
        const u32 topk = call.handle_header().topk, d = link.rank % call.ranks_here();
        u64 bytes = 0;
        for (u64 row = 0; row < item.num_rows(); ++row) {
            const auto* entries = reinterpret_cast<const RowEntry*>(staged + row * row_bytes +
                                                                    call.moe().header_offset);
            if (first_choice(entries, topk, d) < topk) bytes += row_bytes;
        }
        call.transport.signal(link.rank, link.slot + item.chunk(), 1, kScaleUp, bytes);
    }
}

// A run of rows of an item, done by all teams; dispatches number rows in 32 bits, and a row has
// less than 4 GiB. Those from `first` on of the list that route made (pack, push), of the window
// (land, take) or of what has been received.
struct RowRun {
    u32 first;
    u32 target_row;  // pack, push: where the first one goes
    u32 num_rows;
};

template <class Call>
FASTKERN_DEVICE void move_run(const Call& call, const RunningItem<Call>& item, const RowRun& run) {
    const auto& target = call.target;
    const u32 queue = item.queue(), peer = call.table().streams[item.stream()].peer;
    const u64 row_bytes = call.header().row_bytes;
    FASTKERN_ROLLED
    for (u32 k = target.team(); k < run.num_rows; k += target.num_teams()) {
        RowSource row;
        u8* to = nullptr;
        if (queue <= kPush) {
            row.wire = nullptr;
            row.entries = call.handle().entries + u64{run.first + k} * call.handle_header().topk;
            row.token = target.uniform(call.handle().pack_list[run.first + k]);
            const u64 place = queue == kPack ? call.layout().send : call.layout().window;
            if (queue == kPack || peer != call.args().rank)
                to = call.args().data[peer] + place + u64{run.target_row + k} * row_bytes;
        } else {
            const u64 place = queue == kReceive ? call.layout().receive : call.layout().window;
            row.wire =
                Call::Target::global(call.own_data() + place + u64{run.first + k} * row_bytes);
            row.entries = reinterpret_cast<const RowEntry*>(row.wire + call.moe().header_offset);
            row.token = 0;
        }
        call.forget();
        move_row(call, row, to, queue == kReceive);
    }
}

template <class Call>
FASTKERN_DEVICE void dispatch_rows(const Call& call, const RunningItem<Call>& item) {
    if (item.queue() == kPut) return run_put(call, item);
    const u32 queue = item.queue();
    if (queue == kReceive) {
        give_credit(call, item);
        tell_all_arrivals(call, item);
        call.forget();
    }
    u32 num_runs = queue == kReceive ? 1 : call.ranks_here();
    if (queue != kReceive && queue != kLand) {
        const Stream& s = call.table().streams[item.stream()];
        num_runs = s.first_segment + s.num_segments - item.first_segment();
    }
    u32 sent_rows = 0;
    FASTKERN_ROLLED
    for (u32 k = 0; k < num_runs; ++k) {
        const Stream& s = call.table().streams[item.stream()];
        RowRun run{static_cast<u32>(s.source_row + item.first_row()), 0,
                   static_cast<u32>(item.num_rows())};
        if (item.queue() == kLand) {
            const u64 at = call.first_arrival(s.slot + item.chunk()) + k;
            const Arrival told = reinterpret_cast<const Arrival*>(
                Call::Target::global(call.own_data() + call.layout().scratch))[at];
            run.first = told.window_row;
            run.num_rows = told.num_rows;
            if (call.moe().record && call.target.lane() == 0) call.handle().arrivals[at] = told;
        } else if (item.queue() != kReceive) {
            const Part part = part_of(call.table().segments[item.first_segment() + k], item);
            if (part.num_rows == 0) break;
            run = {static_cast<u32>(part.row), static_cast<u32>(s.target_row + part.stream_row),
                   static_cast<u32>(part.num_rows)};
        }
        move_run(call, item, run);
        sent_rows += run.num_rows;
    }
    call.forget();
    const Stream& stream = call.table().streams[item.stream()];
    if (item.queue() == kReceive && stream.num_links != 0)
        signal_all(call, item);
    else if (item.queue() <= kPush && stream.slot != kNoSlot)
        signal_after_writes(
            call, stream.peer, stream.slot + item.chunk(), kScaleUp,
            stream.peer == call.args().rank ? 0 : sent_rows * call.header().row_bytes);
}

}  // namespace fastkern
