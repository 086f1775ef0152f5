// All-to-all: what each item moves.
#pragma once

#include "kernels/body/items.h"

namespace fastkern {

template <class Call>
FASTKERN_DEVICE void move_rows(const Call& call, const RunningItem<Call>& item) {
    if (item.queue() == kPut) return run_put(call, item);
    if (item.queue() == kReceive) give_credit(call, item);
    const Stream& s = call.table().streams[item.stream()];
    const KernelArgs& args = call.args();
    const u32 queue = item.queue();
    u64 sent_rows = 0;
    for (u32 k = item.first_segment(); k < s.first_segment + s.num_segments; ++k) {
        const Segment& g = call.table().segments[k];
        const Part part = part_of(g, item);
        if (part.num_rows == 0) break;
        // Rows of this rank's input or staging, to a row of what `rank` has.
        u64 from_row = part.row, to_row = part.row;
        u32 rank = s.peer;
        if (queue <= kPush) {
            to_row = s.target_row + part.stream_row;
        } else if (queue == kReceive) {
            from_row = s.source_row + part.stream_row;
            rank = g.peer;
        } else {  // land, take
            rank = args.rank;
        }
        const u8* const from = queue <= kPush
                                   ? args.input
                                   : call.own_data() + (queue == kReceive ? call.layout().receive
                                                                          : call.layout().window);
        u8* const to = queue == kPack      ? args.data[rank] + call.layout().send
                       : rank == args.rank ? args.output
                                           : args.data[rank] + call.layout().window;
        const u64 row_bytes = call.header().row_bytes;
        call.target.copy(to + to_row * row_bytes, from + from_row * row_bytes,
                         part.num_rows * row_bytes);
        sent_rows += part.num_rows;
    }
    if (queue <= kPush) {
        if (s.slot != kNoSlot)
            signal_after_writes(call, s.peer, s.slot + item.chunk(), kScaleUp,
                                s.peer == args.rank ? 0 : sent_rows * call.header().row_bytes);
    } else if (queue == kReceive && s.num_links != 0) {
        signal_destinations(call, item);
    }
}

}  // namespace fastkern
