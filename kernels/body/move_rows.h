// All-to-all: what each item moves.
#pragma once

#include "kernels/body/items.h"

namespace fastkern {

template <class Target, class Transport>
FASTKERN_DEVICE void move_rows(const Target& target, const Transport& transport,
                               const TableView& table, const KernelArgs& args, const Item& item) {
    const Stream& s = table.streams[item.stream];
    const DataLayout layout = data_layout(*table.header);
    const u64 row_bytes = table.header->row_bytes;
    u8* const own = args.data[args.rank];
    const u32 end_segment = s.first_segment + s.num_segments;

    if (item.queue == kPut) return run_put(transport, table, args, item);
    if (item.queue == kReceive) give_credit(target, transport, table, item);
    u64 sent_bytes = 0;
    for (u32 k = item.first_segment; k < end_segment; ++k) {
        const Segment& g = table.segments[k];
        const Part part = part_of(g, item);
        if (part.num_rows == 0) break;
        const u64 bytes = part.num_rows * row_bytes;
        const u8* from;
        u8* to;
        switch (item.queue) {
            case kPack:
                from = args.input + part.row * row_bytes;
                to = args.data[s.peer] + layout.send + (s.target_row + part.stream_row) * row_bytes;
                break;
            case kPush:
                from = args.input + part.row * row_bytes;
                to = (s.peer == args.rank ? args.output : args.data[s.peer] + layout.window) +
                     (s.target_row + part.stream_row) * row_bytes;
                break;
            case kReceive:
                from = own + layout.receive + (s.source_row + part.stream_row) * row_bytes;
                to = (g.peer == args.rank ? args.output : args.data[g.peer] + layout.window) +
                     part.row * row_bytes;
                break;
            default:  // land, take
                from = own + layout.window + part.row * row_bytes;
                to = args.output + part.row * row_bytes;
                break;
        }
        target.copy(to, from, bytes);
        sent_bytes += bytes;
    }
    if (item.queue <= kPush) {
        if (s.slot != kNoSlot)
            signal_after_writes(target, transport, s.peer, s.slot + item.chunk, kScaleUp,
                                s.peer == args.rank ? 0 : sent_bytes);
    } else if (item.queue == kReceive && s.num_links != 0) {
        signal_destinations(target, transport, table, item);
    }
}

}  // namespace fastkern
