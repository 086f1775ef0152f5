// Items: where a ticket points to, what an item waits for, and what it does.
#pragma once

#include "kernels/body/args.h"

namespace fastkern {

// What a block knows of its call.
template <class TargetType, class TransportType>
struct Call {
    using Target = TargetType;
    using Transport = TransportType;

    const Target& target;
    const Transport& transport;
    mutable const KernelArgs* arguments;

    FASTKERN_DEVICE const KernelArgs& args() const { return *arguments; }

    // What follows from the arguments: kept by the target, or found anew where that is cheaper.
    FASTKERN_DEVICE decltype(auto) table() const {
        return target.template kept<TableView>([this] { return find_table(); });
    }
    FASTKERN_DEVICE decltype(auto) layout() const {
        return target.template kept<DataLayout>([this] { return data_layout(header()); });
    }
    FASTKERN_DEVICE void keep_views() const {
        target.keep(find_table());
        target.keep(data_layout(header()));
    }

    // What has been read of the arguments until here does not stay in registers.
    FASTKERN_DEVICE void forget() const { Target::forget(&arguments); }

    FASTKERN_DEVICE const Header& header() const {
        return *reinterpret_cast<const Header*>(Target::constant(arguments->table));
    }
    FASTKERN_DEVICE TableView find_table() const {
        return view_table(Target::constant(arguments->table));
    }
    // Among those of this rank.
    FASTKERN_DEVICE u32 block() const { return target.block() % arguments->num_blocks; }
    FASTKERN_DEVICE u8* own_data() const { return arguments->data[arguments->rank]; }
    FASTKERN_DEVICE Control& control() const { return *arguments->controls[arguments->rank]; }
};

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

// The item that a ticket stands for, in a stage of the queue.
FASTKERN_DEVICE inline void make_item(const TableView& table, u32 queue, u32 stage_index,
                                      u64 ticket, Item* item) {
    const Stage& stage = table.stages[table.queues[queue].first_stage + stage_index];
    const u32 k = static_cast<u32>(ticket - stage.first_item);
    item->ticket = ticket;
    item->num_rows = 0;
    item->queue = queue;
    item->stage = stage_index;
    item->chunk = k / stage.num_streams;
    item->stream = stage.first_stream + k % stage.num_streams;
    const Stream& s = table.streams[item->stream];
    const u64 first_row = item->chunk * s.chunk_rows;
    item->first_row = first_row;
    if (first_row >= s.num_rows) return;
    const u64 rest = s.num_rows - first_row;
    const u64 num_rows = rest < s.chunk_rows ? rest : s.chunk_rows;
    // First segment that ends after the chunk begins.
    u32 low = s.first_segment, high = s.first_segment + s.num_segments;
    while (low < high) {
        const u32 mid = (low + high) / 2;
        if (table.segments[mid].stream_row + table.segments[mid].num_rows <= first_row)
            low = mid + 1;
        else
            high = mid;
    }
    item->first_segment = low;
    const bool touched = low < s.first_segment + s.num_segments &&
                         table.segments[low].stream_row < first_row + num_rows;
    if (touched) item->num_rows = num_rows;
}

// The item that a block runs, read where the target keeps it, each time anew: it takes no
// registers.
template <class CallType>
struct RunningItem {
    using Target = typename CallType::Target;

    const Item& item;

    FASTKERN_DEVICE u64 first_row() const { return Target::uniform(item.first_row); }
    FASTKERN_DEVICE u64 num_rows() const { return Target::uniform(item.num_rows); }
    FASTKERN_DEVICE u32 queue() const { return Target::uniform(item.queue); }
    FASTKERN_DEVICE u32 stage() const { return Target::uniform(item.stage); }
    FASTKERN_DEVICE u32 stream() const { return Target::uniform(item.stream); }
    FASTKERN_DEVICE u32 chunk() const { return Target::uniform(item.chunk); }
    FASTKERN_DEVICE u32 first_segment() const { return Target::uniform(item.first_segment); }
};

// The part of a segment inside an item's chunk.
struct Part {
    u64 stream_row;
    u64 row;
    u64 num_rows;  // 0: the segment begins after the chunk
};

template <class Running>
FASTKERN_DEVICE Part part_of(const Segment& g, const Running& item) {
    const u64 end = item.first_row() + item.num_rows();
    if (g.stream_row >= end) return Part{0, 0, 0};
    const u64 first = g.stream_row > item.first_row() ? g.stream_row : item.first_row();
    const u64 last = g.stream_row + g.num_rows < end ? g.stream_row + g.num_rows : end;
    return Part{first, g.row + (first - g.stream_row), last - first};
}

template <class Running>
FASTKERN_DEVICE bool chunk_touches(const TableView& table, const Running& item, u32 peer) {
    const Stream& s = table.streams[item.stream()];
    for (u32 k = item.first_segment(); k < s.first_segment + s.num_segments; ++k) {
        if (part_of(table.segments[k], item).num_rows == 0) return false;
        if (table.segments[k].peer == peer) return true;
    }
    return false;
}

// Claims of some ranks in this call: changes while any of them gets on. Reads the peers' words, and
// only when a deadline is near.
template <class Target>
FASTKERN_DEVICE u64 claims_of(const Target& target, const KernelArgs& args, u32 first_rank,
                              u32 num_ranks) {
    u64 sum = 0;
    for (u32 r = first_rank; r < first_rank + num_ranks; ++r)
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
template <class Call>
FASTKERN_DEVICE bool exhausted(const Call& call, u32 queue) {
    return call.target.load_acquire(&call.control().tickets[queue]) >=
           call.table().queues[queue].num_items;
}

// Are all waits of the item over? Never blocks. Fills `record` (if given) with the first one that
// is not.
template <class Call>
FASTKERN_DEVICE bool can_run(const Call& call, const Item& item, ErrorRecord* record) {
    const auto& transport = call.transport;
    const Stream& s = call.table().streams[item.stream];
    if (s.gate_slot != kNoSlot && !check(transport, s.gate_slot, s.gate_value, s.peer, record))
        return false;
    switch (item.queue) {
        case kPack:
        case kPush:
            return transport.can_send(kScaleUp);
        case kPut:
            for (u32 k = item.first_segment; k < s.first_segment + s.num_segments; ++k) {
                const Segment& g = call.table().segments[k];
                if (g.stream_row >= item.first_row + item.num_rows) break;
                if (!check(transport, g.slot + item.chunk, 1, g.peer, record)) return false;
            }
            return transport.can_send(kScaleOut);
        case kReceive:
        case kSum:
            if (item.queue == kReceive && !check(transport, s.slot + item.chunk, 1, s.peer, record))
                return false;
            for (u32 k = 0; k < s.num_links; ++k) {
                const Link& link = call.table().links[s.first_link + k];
                const u32 slot = item.queue == kSum ? link.slot + item.chunk : link.gate_slot;
                if (slot != kNoSlot && !check(transport, slot, 1, link.rank, record)) return false;
            }
            return item.queue == kSum || s.num_links == 0 || transport.can_send(kScaleUp);
        case kReduce:  // a stall shows at the head of the queue that is not exhausted
            return exhausted(call, kLand) && exhausted(call, kTake);
        default:  // land, take
            return check(transport, s.slot + item.chunk, 1, s.peer, record);
    }
}

// Makes the block's writes visible, then lets one lane raise the flag.
template <class Call>
FASTKERN_DEVICE void signal_after_writes(const Call& call, u32 rank, u32 slot, Tier tier,
                                         u64 bytes) {
    call.target.drain();
    call.target.barrier();
    if (call.target.lane() == 0) call.transport.signal(rank, slot, 1, tier, bytes);
}

// A chunk from send staging to the peer's receive staging.
template <class Call>
FASTKERN_DEVICE void run_put(const Call& call, const RunningItem<Call>& item) {
    const Stream& s = call.table().streams[item.stream()];
    const u64 row_bytes = call.header().row_bytes;
    call.transport.put(call.layout().receive + (s.target_row + item.first_row()) * row_bytes,
                       call.layout().send + (s.source_row + item.first_row()) * row_bytes,
                       item.num_rows() * row_bytes, s.peer, s.slot + item.chunk());
}

// A receive lets the next sender start, before it copies anything onward.
template <class Call>
FASTKERN_DEVICE void give_credit(const Call& call, const RunningItem<Call>& item) {
    const Stream& s = call.table().streams[item.stream()];
    if (s.credit_slot != kNoSlot && s.credit_chunk == item.chunk() && call.target.lane() == 0)
        call.transport.signal(s.credit_rank, s.credit_slot, s.credit_value, kScaleOut, 0);
}

// A receive tells the destinations that its chunk has rows for.
template <class Call>
FASTKERN_DEVICE void signal_destinations(const Call& call, const RunningItem<Call>& item) {
    const auto& table = call.table();
    const Stream& s = table.streams[item.stream()];
    call.target.drain();
    call.target.barrier();
    for (u32 k = call.target.lane(); k < s.num_links; k += call.target.num_lanes()) {
        const Link& link = table.links[s.first_link + k];
        if (!chunk_touches(table, item, link.rank)) continue;
        u64 bytes = 0;
        if (link.gate_slot != kNoSlot)  // to another rank
            for (u32 j = item.first_segment(); j < s.first_segment + s.num_segments; ++j)
                if (table.segments[j].peer == link.rank)
                    bytes += part_of(table.segments[j], item).num_rows * call.header().row_bytes;
        call.transport.signal(link.rank, link.slot + item.chunk(), 1, kScaleUp, bytes);
    }
}

}  // namespace fastkern
