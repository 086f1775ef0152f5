// Lowering of direct and spreadout: unbalanced puts straight to the true destination, rank r to r +
// k at shift k. Direct gates each put by the receiver's ready flag alone; spreadout gives one
// credit at a time.
#include <algorithm>

#include "planner/core/lower.h"

namespace fastkern {

namespace {

struct Shift {
    u64 ticks_begin;
    u64 ticks_end;
};

u64 scale_out_rows(const TableBuilder& t, u32 src, u32 dst) {
    return t.plan.topology.same_server(src, dst) ? 0 : t.traffic.at(src, dst);
}

}  // namespace

Vector<u8> lower_shifted(const Plan& plan, u32 rank) {
    TableBuilder table(plan, rank);
    TableBuilder* t = &table;
    t->reserve(usual_records(plan.traffic.servers, plan.traffic.gpus_per_server));
    const u32 r = plan.traffic.num_ranks;
    const bool credits = plan.policy == kSpreadout;
    Vector<Shift> shifts(r, Shift{0, 0});
    u64 total = 0, now = 0;
    for (const u64 rows : plan.stage_rows) total += std::min(rows, (u64{1} << 62) - total);
    for (u32 k = 1; k < r; ++k) {
        shifts[k].ticks_begin = now;
        now += t->scaled(plan.stage_rows[k], total, plan.options.chunk_slots);
        shifts[k].ticks_end = now;
    }
    u64 most_out = 0, most_in = 0;
    for (u32 i = 0; i < r; ++i) {
        u64 out = 0, in = 0;
        for (u32 j = 0; j < r; ++j) {
            out += scale_out_rows(*t, i, j);
            in += scale_out_rows(*t, j, i);
        }
        most_out = std::max(most_out, out);
        most_in = std::max(most_in, in);
    }
    const auto chunks_of = [&](u64 rows) {
        const u64 chunk_rows = t->chunk_rows(rows, 1);
        return std::pair<u64, u32>(chunk_rows, static_cast<u32>(ceil_div(rows, chunk_rows)));
    };

    post_ready_to_local_peers(t);
    u32 first_sender = kNoSlot;
    for (u32 k = 1; k < r; ++k) {
        const u32 src = (rank + r - k) % r;
        if (!scale_out_rows(*t, src, rank)) continue;
        if (!credits) t->add_post(src, t->flags.ready(rank), 1);
        if (first_sender == kNoSlot) first_sender = src;
    }
    if (credits && first_sender != kNoSlot) t->add_post(first_sender, t->flags.credit(rank), 1);

    u64 staged = 0;
    for (u32 k = 1; k < r; ++k) {
        const u32 dst = (rank + k) % r;
        const u64 rows = scale_out_rows(*t, rank, dst);
        if (!rows) continue;
        const auto [chunk_rows, num_chunks] = chunks_of(rows);
        t->begin_stage(kPack, shifts[k].ticks_begin, shifts[k].ticks_end, num_chunks);
        t->add_stream(rows, chunk_rows, rank, t->flags.pack_direct(dst)).target_row = staged;
        t->add_segment(0, t->input_row[dst], rows);
        t->end_stage();
        staged += rows;
    }
    lower_push(t);
    staged = 0;
    for (u32 k = 1; k < r; ++k) {
        const u32 dst = (rank + k) % r;
        const u64 rows = scale_out_rows(*t, rank, dst);
        if (!rows) continue;
        u64 received = 0;  // rows that reach dst at smaller shifts
        for (u32 j = 1; j < k; ++j) received += scale_out_rows(*t, (dst + r - j) % r, dst);
        const auto [chunk_rows, num_chunks] = chunks_of(rows);
        t->begin_stage(kPut, shifts[k].ticks_begin, shifts[k].ticks_end, num_chunks);
        Stream& stream = t->add_stream(rows, chunk_rows, dst, t->flags.arrive(rank));
        stream.source_row = staged;
        stream.target_row = received;
        stream.gate_slot = credits ? t->flags.credit(dst) : t->flags.ready(dst);
        stream.gate_value = 1;
        t->add_segment(0, 0, rows, rank, t->flags.pack_direct(dst));
        t->end_stage();
        staged += rows;
    }
    u64 received = 0;
    u32 previous = kNoSlot;
    for (u32 k = 1; k < r; ++k) {
        const u32 src = (rank + r - k) % r;
        const u64 rows = scale_out_rows(*t, src, rank);
        if (!rows) continue;
        const auto [chunk_rows, num_chunks] = chunks_of(rows);
        t->begin_stage(kReceive, shifts[k].ticks_begin, shifts[k].ticks_end, num_chunks);
        Stream& stream = t->add_stream(rows, chunk_rows, src, t->flags.arrive(src));
        stream.source_row = received;
        t->add_segment(0, t->output_row_of(t->local, src), rows, rank);
        t->end_stage();
        if (credits && previous != kNoSlot) t->add_credit(previous, src, 1);
        previous = t->last_stream();
        received += rows;
    }
    lower_take(t);
    return t->finish(most_out, most_in);
}

}  // namespace fastkern
