// Items: where a ticket points to, what an item waits for, and what it does.
#pragma once

#include "kernels/body/args.h"

namespace fastkern {

struct Item {
    u64 ticket;
    u64 first_row;  // of the chunk, in the stream
    u64 num_rows;   // 0: nothing of this rank in the chunk
    u32 queue;
    u32 stage;  // within the queue
    u32 stream;
    u32 chunk;
    u32 first_segment;  // first one that reaches into the chunk
};

FASTKERN_DEVICE inline u64 item_time(const TableView& table, const Item& item) {
    return plan_time(item.queue, table.stages[table.queues[item.queue].first_stage + item.stage],
                     item.chunk);
}

FASTKERN_DEVICE inline Item make_item(const TableView& table, u32 queue, u32 stage_index,
                                      u64 ticket) {
    const Stage& stage = table.stages[table.queues[queue].first_stage + stage_index];
    const u64 k = ticket - stage.first_item;
    Item item{};
    item.ticket = ticket;
    item.queue = queue;
    item.stage = stage_index;
    item.chunk = static_cast<u32>(k / stage.num_streams);
    item.stream = stage.first_stream + static_cast<u32>(k % stage.num_streams);
    const Stream& s = table.streams[item.stream];
    item.first_row = item.chunk * s.chunk_rows;
    if (item.first_row >= s.num_rows) return item;
    const u64 rest = s.num_rows - item.first_row;
    const u64 num_rows = rest < s.chunk_rows ? rest : s.chunk_rows;
    // First segment that ends after the chunk begins.
    u32 low = s.first_segment, high = s.first_segment + s.num_segments;
    while (low < high) {
        const u32 mid = (low + high) / 2;
        if (table.segments[mid].stream_row + table.segments[mid].num_rows <= item.first_row)
            low = mid + 1;
        else
            high = mid;
    }
    item.first_segment = low;
    const bool touched = low < s.first_segment + s.num_segments &&
                         table.segments[low].stream_row < item.first_row + num_rows;
    item.num_rows = touched ? num_rows : 0;
    return item;
}

// The part of a segment inside an item's chunk.
struct Part {
    u64 stream_row;
    u64 row;
    u64 num_rows;  // 0: the segment begins after the chunk
};

FASTKERN_DEVICE inline Part part_of(const Segment& g, const Item& item) {
    const u64 end = item.first_row + item.num_rows;
    if (g.stream_row >= end) return Part{0, 0, 0};
    const u64 first = g.stream_row > item.first_row ? g.stream_row : item.first_row;
    const u64 last = g.stream_row + g.num_rows < end ? g.stream_row + g.num_rows : end;
    return Part{first, g.row + (first - g.stream_row), last - first};
}

FASTKERN_DEVICE inline bool chunk_touches(const TableView& table, const Item& item, u32 peer) {
    const Stream& s = table.streams[item.stream];
    for (u32 k = item.first_segment; k < s.first_segment + s.num_segments; ++k) {
        if (part_of(table.segments[k], item).num_rows == 0) return false;
        if (table.segments[k].peer == peer) return true;
    }
    return false;
}

// Claims of all ranks in this call: changes while any of them gets on. Reads the peers' words, and
// only when a deadline is near.
template <class Target>
FASTKERN_DEVICE u64 claims_of_all(const Target& target, const KernelArgs& args, u32 num_ranks) {
    u64 sum = 0;
    for (u32 r = 0; r < num_ranks; ++r)
        for (u32 q = 0; q < kNumQueues; ++q)
            sum += target.load_relaxed(&args.controls[r]->tickets[q]);
    return sum;
}

template <class Transport>
FASTKERN_DEVICE bool check(const Transport& transport, u32 slot, u32 value, u32 writer,
                           ErrorRecord* record) {
    if (transport.seen(slot, value)) return true;
    if (record) {
        record->expected = transport.stamp(value);
        record->seen = transport.peek(slot);
        record->peer = writer;
        record->slot = slot;
    }
    return false;
}

// Has every item of the queue been claimed, and so every flag that they wait for been seen?
template <class Target>
FASTKERN_DEVICE bool exhausted(const Target& target, const TableView& table, const KernelArgs& args,
                               u32 queue) {
    return target.load_acquire(&args.controls[args.rank]->tickets[queue]) >=
           table.queues[queue].num_items;
}

// Are all waits of the item over? Never blocks. Fills `record` (if given) with the first one that
// is not.
template <class Target, class Transport>
FASTKERN_DEVICE bool can_run(const Target& target, const Transport& transport,
                             const TableView& table, const KernelArgs& args, const Item& item,
                             ErrorRecord* record) {
    const Stream& s = table.streams[item.stream];
    if (s.gate_slot != kNoSlot && !check(transport, s.gate_slot, s.gate_value, s.peer, record))
        return false;
    switch (item.queue) {
        case kPack:
        case kPush:
            return transport.can_send(kScaleUp);
        case kPut:
            for (u32 k = item.first_segment; k < s.first_segment + s.num_segments; ++k) {
                const Segment& g = table.segments[k];
                if (part_of(g, item).num_rows == 0) break;
                if (!check(transport, g.slot + item.chunk, 1, g.peer, record)) return false;
            }
            return transport.can_send(kScaleOut);
        case kReceive:
            if (!check(transport, s.slot + item.chunk, 1, s.peer, record)) return false;
            for (u32 k = 0; k < s.num_links; ++k) {
                const Link& link = table.links[s.first_link + k];
                if (link.gate_slot == kNoSlot) continue;
                if (!check(transport, link.gate_slot, 1, link.rank, record)) return false;
            }
            return s.num_links == 0 || transport.can_send(kScaleUp);
        case kSum:
            for (u32 k = 0; k < s.num_links; ++k) {
                const Link& link = table.links[s.first_link + k];
                if (!check(transport, link.slot + item.chunk, 1, link.rank, record)) return false;
            }
            return true;
        case kReduce:  // a stall shows at the head of the queue that is not exhausted
            return exhausted(target, table, args, kLand) && exhausted(target, table, args, kTake);
        default:  // land, take
            return check(transport, s.slot + item.chunk, 1, s.peer, record);
    }
}

// Makes the block's writes visible, then lets one lane raise the flag.
template <class Target, class Transport>
FASTKERN_DEVICE void signal_after_writes(const Target& target, const Transport& transport, u32 rank,
                                         u32 slot, Tier tier, u64 bytes) {
    target.drain();
    target.barrier();
    if (target.lane() == 0) transport.signal(rank, slot, 1, tier, bytes);
}

// A chunk from send staging to the peer's receive staging.
template <class Transport>
FASTKERN_DEVICE void run_put(const Transport& transport, const TableView& table,
                             const KernelArgs& args, const Item& item) {
    const Stream& s = table.streams[item.stream];
    const DataLayout layout = data_layout(*table.header);
    const u64 row_bytes = table.header->row_bytes;
    u8* to = args.data[s.peer] + layout.receive + (s.target_row + item.first_row) * row_bytes;
    const u8* from =
        args.data[args.rank] + layout.send + (s.source_row + item.first_row) * row_bytes;
    transport.put(to, from, item.num_rows * row_bytes, s.peer, s.slot + item.chunk);
}

// A receive lets the next sender start, before it copies anything onward.
template <class Target, class Transport>
FASTKERN_DEVICE void give_credit(const Target& target, const Transport& transport,
                                 const TableView& table, const Item& item) {
    const Stream& s = table.streams[item.stream];
    if (s.credit_slot != kNoSlot && s.credit_chunk == item.chunk && target.lane() == 0)
        transport.signal(s.credit_rank, s.credit_slot, s.credit_value, kScaleOut, 0);
}

// A receive tells the destinations that its chunk has rows for.
template <class Target, class Transport>
FASTKERN_DEVICE void signal_destinations(const Target& target, const Transport& transport,
                                         const TableView& table, const Item& item) {
    const Stream& s = table.streams[item.stream];
    target.drain();
    target.barrier();
    for (u32 k = target.lane(); k < s.num_links; k += target.num_lanes()) {
        const Link& link = table.links[s.first_link + k];
        if (!chunk_touches(table, item, link.rank)) continue;
        u64 bytes = 0;
        if (link.gate_slot != kNoSlot)  // to another rank
            for (u32 j = item.first_segment; j < s.first_segment + s.num_segments; ++j)
                if (table.segments[j].peer == link.rank)
                    bytes += part_of(table.segments[j], item).num_rows * table.header->row_bytes;
        transport.signal(link.rank, link.slot + item.chunk, 1, kScaleUp, bytes);
    }
}

}  // namespace fastkern
