#include <algorithm>
#include <cstring>

#include "planner/core/lower.h"

namespace fastkern {

TableBuilder::TableBuilder(const Plan& plan_, u32 rank_)
    : plan(plan_),
      traffic(plan_.traffic),
      rank(rank_),
      server(rank_ / plan_.traffic.gpus_per_server),
      local(rank_ % plan_.traffic.gpus_per_server),
      num_local(plan_.traffic.gpus_per_server),
      flags{plan_.traffic.num_ranks, plan_.traffic.servers, plan_.traffic.gpus_per_server,
            plan_.options.chunk_slots} {
    const u32 r = traffic.num_ranks;
    input_row.resize(r);
    u64 row = 0;
    for (u32 d = 0; d < r; ++d) {
        input_row[d] = row;
        row += traffic.at(rank, d);
    }
    output_row.resize(static_cast<std::size_t>(num_local) * r);
    for (u32 j = 0; j < num_local; ++j) {
        row = 0;
        for (u32 s = 0; s < r; ++s) {
            output_row[static_cast<std::size_t>(j) * r + s] = row;
            row += rows_to(s, j);
        }
    }
}

void TableBuilder::reserve(const RecordCounts& counts) {
    posts_.reserve(counts.posts);
    stages_.reserve(counts.stages);
    streams_.reserve(counts.streams);
    segments_.reserve(counts.segments);
    links_.reserve(counts.links);
}

void TableBuilder::begin_stage(QueueKind queue, u64 ticks_begin, u64 ticks_end, u32 num_chunks) {
    if (queues_[queue].num_stages == 0)
        queues_[queue].first_stage = static_cast<u32>(stages_.size());
    queue_ = queue;
    stages_.push_back({ticks_begin, ticks_end, queues_[queue].num_items, num_chunks,
                       static_cast<u32>(streams_.size()), 0, 0});
}

Stream& TableBuilder::add_stream(u64 num_rows, u64 chunk_rows, u32 peer, u32 slot) {
    Stream s{};
    s.num_rows = num_rows;
    s.chunk_rows = chunk_rows;
    s.peer = peer;
    s.slot = slot;
    s.gate_slot = s.credit_slot = kNoSlot;
    s.first_segment = static_cast<u32>(segments_.size());
    s.first_link = static_cast<u32>(links_.size());
    streams_.push_back(s);
    ++stages_.back().num_streams;
    return streams_.back();
}

void TableBuilder::add_segment(u64 stream_row, u64 row, u64 num_rows, u32 peer, u32 slot) {
    segments_.push_back({stream_row, row, num_rows, peer, slot});
    ++streams_.back().num_segments;
}

void TableBuilder::add_link(u32 link_rank, u32 slot, u32 gate_slot) {
    links_.push_back({link_rank, slot, gate_slot, 0});
    ++streams_.back().num_links;
}

void TableBuilder::add_credit(u32 stream, u32 next_sender, u32 value) {
    Stream& s = streams_[stream];
    s.credit_rank = next_sender;
    s.credit_slot = flags.credit(rank);
    s.credit_value = value;
    const u64 chunks = ceil_div(s.num_rows, s.chunk_rows);
    s.credit_chunk =
        static_cast<u32>(chunks - 1 - std::min<u64>(plan.options.credit_lead, chunks - 1));
}

void TableBuilder::end_stage() {
    const Stage& stage = stages_.back();
    if (stage.num_streams == 0) {
        stages_.pop_back();
        return;
    }
    ++queues_[queue_].num_stages;
    queues_[queue_].num_items += u64{stage.num_chunks} * stage.num_streams;
}

void TableBuilder::add_post(u32 post_rank, u32 slot, u32 value) {
    posts_.push_back({post_rank, slot, value, 0});
}

u64 TableBuilder::chunk_rows(u64 num_rows, u64 parts) const {
    const u64 rows = std::max<u64>(1, ceil_div(plan.options.chunk_bytes, plan.row_bytes));
    // The longest rail of each part may have one row more than its share, and each part's last
    // chunk may be short: at most (num_rows + parts) / rows + parts chunks.
    const u64 least = ceil_div(num_rows + parts, plan.options.chunk_slots - parts);
    return std::max(rows, least);
}

u64 TableBuilder::scaled(u64 rows, u64 total, u64 least) const {
    u32 shift = 0;
    while ((total >> shift) > (u64{1} << 48)) ++shift;
    return std::max(rows >> shift, std::min(rows, least));
}

Header TableBuilder::make_header(u64 send_rows, u64 receive_rows) const {
    Header h{};
    h.plan_hash = plan.hash;
    h.row_bytes = plan.row_bytes;
    h.input_rows = input_row.back() + traffic.at(rank, traffic.num_ranks - 1);
    h.output_rows =
        output_row_of(local, traffic.num_ranks - 1) + rows_to(traffic.num_ranks - 1, local);
    h.send_rows = send_rows;
    h.receive_rows = receive_rows;
    h.window_rows = num_local > 1 ? traffic.max_output_rows : 0;
    h.bound_rows = plan.bound_rows();
    h.magic = kTableMagic;
    h.version = kTableVersion;
    h.rank = rank;
    h.num_ranks = traffic.num_ranks;
    h.servers = traffic.servers;
    h.gpus_per_server = num_local;
    h.server = server;
    h.local_rank = local;
    h.chunk_slots = plan.options.chunk_slots;
    h.policy = plan.policy;
    h.num_posts = static_cast<u32>(posts_.size());
    h.num_stages = static_cast<u32>(stages_.size());
    h.num_streams = static_cast<u32>(streams_.size());
    h.num_segments = static_cast<u32>(segments_.size());
    h.num_links = static_cast<u32>(links_.size());
    h.op = kAllToAll;
    h.table_bytes = table_bytes(h);
    return h;
}

Vector<u8> TableBuilder::finish(u64 send_rows, u64 receive_rows) {
    Header h = make_header(send_rows, receive_rows);
    if (plan.moe()) {
        h.op = kDispatch;
        h.scratch_row_bytes = sizeof(Arrival) * num_local;
        h.scratch_rows = num_local > 1 && traffic.servers > 1 ? flags.num_arrivals() : 0;
    }
    return pack(h);
}

Vector<u8> TableBuilder::finish_combine(u64 send_rows, u64 receive_rows,
                                        const CombineShape& shape) {
    Header h = make_header(send_rows, receive_rows);
    h.op = kCombine;
    h.row_bytes = shape.row_bytes;
    h.input_rows = 0;
    h.output_rows = shape.num_tokens;
    h.window_rows = h.scratch_base = 0;
    const u32 r = traffic.num_ranks, n = traffic.servers;
    for (u32 owner = 0; owner < r; ++owner) {
        u64 window = 0, partials = 0;
        for (u32 other = 0; other < n; ++other)
            if (other != owner / num_local)
                window += traffic.at(owner, other * num_local + owner % num_local);
        for (u32 j = 0; j < num_local; ++j)
            if (j != owner % num_local)
                partials += traffic.at(owner, owner / num_local * num_local + j);
        h.window_rows = std::max(h.window_rows, window);
        h.scratch_base = std::max(h.scratch_base, partials);
    }
    h.scratch_rows = h.scratch_base + shape.num_partials;
    h.scratch_row_bytes = shape.partial_row_bytes;
    return pack(h);
}

Vector<u8> TableBuilder::pack(Header h) const {
    Vector<u8> block(h.table_bytes);
    u8* at = block.data();
    const auto put = [&at](const void* from, std::size_t bytes) {
        if (bytes) std::memcpy(at, from, bytes);
        at += bytes;
    };
    put(&h, sizeof h);
    put(queues_, sizeof queues_);
    put(posts_.data(), posts_.size() * sizeof(Post));
    put(stages_.data(), stages_.size() * sizeof(Stage));
    put(streams_.data(), streams_.size() * sizeof(Stream));
    put(segments_.data(), segments_.size() * sizeof(Segment));
    put(links_.data(), links_.size() * sizeof(Link));
    return block;
}

LocalStage local_stage(const TableBuilder& t) {
    u64 longest = 0;
    for (u32 i = 0; i < t.num_local; ++i)
        for (u32 j = 0; j < t.num_local; ++j)
            longest = std::max(
                longest, t.traffic.at(t.server * t.num_local + i, t.server * t.num_local + j));
    LocalStage s;
    if (!longest) return s;
    s.chunk_rows = t.chunk_rows(longest, 1);
    s.num_chunks = static_cast<u32>(ceil_div(longest, s.chunk_rows));
    s.ticks = t.scaled(longest, longest, s.num_chunks);
    return s;
}

void lower_push(TableBuilder* t) {
    const LocalStage s = local_stage(*t);
    if (!s.num_chunks) return;
    t->begin_stage(kPush, 0, s.ticks, s.num_chunks);
    for (u32 k = 1; k <= t->num_local; ++k) {  // targets rotate; own rows last
        const u32 j = (t->local + k) % t->num_local;
        const u32 peer = t->server * t->num_local + j;
        const u64 rows = t->traffic.at(t->rank, peer);
        if (!rows) continue;
        Stream& stream = t->add_stream(rows, s.chunk_rows, peer, kNoSlot);
        stream.target_row = t->output_row_of(j, t->rank);
        if (peer != t->rank) {
            stream.slot = t->flags.push(t->local);
            stream.gate_slot = t->flags.ready(peer);
            stream.gate_value = 1;
        }
        t->add_segment(0, t->input_row[peer], rows);
    }
    t->end_stage();
}

void lower_take(TableBuilder* t) {
    const LocalStage s = local_stage(*t);
    if (!s.num_chunks) return;
    t->begin_stage(kTake, 0, s.ticks, s.num_chunks);
    for (u32 k = 1; k < t->num_local; ++k) {  // in the order in which the sources turn to us
        const u32 i = (t->local + t->num_local - k) % t->num_local;
        const u32 source = t->server * t->num_local + i;
        const u64 rows = t->traffic.at(source, t->rank);
        if (!rows) continue;
        t->add_stream(rows, s.chunk_rows, source, t->flags.push(i));
        t->add_segment(0, t->output_row_of(t->local, source), rows);
    }
    t->end_stage();
}

void post_ready_to_local_peers(TableBuilder* t) {
    for (u32 k = 1; k < t->num_local; ++k)
        t->add_post(t->server * t->num_local + (t->local + k) % t->num_local,
                    t->flags.ready(t->rank), 1);
}

Vector<u8> lower(const Plan& plan, u32 rank) {
    return plan.shifted() ? lower_shifted(plan, rank) : lower_planned(plan, rank);
}

}  // namespace fastkern
