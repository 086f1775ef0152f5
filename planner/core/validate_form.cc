// The validator's first part: sizes and indices, before anything follows them.
#include <cstring>

#include "planner/core/table_walk.h"

namespace fastkern {

namespace {

constexpr u64 kMostRows = ~u64{0} >> 1;
constexpr u64 kMostTicks = u64{1} << 60;

// Why the block cannot be read as a table, or nothing.
const char* misfit(const Vector<u8>& block) {
    if (block.size() < sizeof(Header)) return "the table is shorter than a header";
    Header h;
    std::memcpy(&h, block.data(), sizeof h);
    if (h.magic != kTableMagic || h.version != kTableVersion)
        return "not a stage table of this version";
    if (h.table_bytes != block.size() || table_bytes(h) != block.size())
        return "the size of the table is not that of its records";
    return nullptr;
}

class FormCheck : public TableWalk {
  public:
    using TableWalk::TableWalk;

    void run() {
        for (u32 r = 0; r < num_ranks(); ++r) {
            header(r);
            posts(r);
            records(r);
        }
    }

  private:
    // Records of each kind lie one after the other: the next ones begin where the last ones ended,
    // and all are there. False: do not follow them.
    bool next(u32 rank, u32 queue, u64 first, u64 count, u64 most, u64* total) {
        if (first == *total && count <= most - first) {
            *total += count;
            return true;
        }
        fault(rank, kNames[queue], "its records do not lie in order, or are not there");
        return false;
    }

    void header(u32 r) {
        const Header &h = *views_[r].header, &h0 = *views_[0].header;
        if (h.rank != r || h.server != r / traffic_.gpus_per_server ||
            h.local_rank != r % traffic_.gpus_per_server)
            fault(r, "header", "the table is another rank's");
        if (h.num_ranks != traffic_.num_ranks || h.servers != traffic_.servers ||
            h.gpus_per_server != traffic_.gpus_per_server ||
            h.chunk_slots != plan_.options.chunk_slots || h.policy != plan_.policy ||
            h.plan_hash != plan_.hash || h.bound_rows != plan_.bound_rows())
            fault(r, "header", "is not of this plan");
        if (h.op >= kNumOps || h.op != h0.op || (h.op == kAllToAll) == plan_.moe())
            fault(r, "header", "the operation is not the plan's or not that of rank 0");
        if (h.op != kCombine && h.row_bytes != plan_.row_bytes)
            fault(r, "header", "the size of a row is not the plan's");
        const bool scratch = h.op != kAllToAll;
        if (!scratch && (h.scratch_rows || h.scratch_row_bytes || h.scratch_base))
            fault(r, "header", "scratch that nothing uses");
        for (const auto field :
             {&Header::row_bytes, &Header::send_rows, &Header::receive_rows, &Header::window_rows,
              &Header::scratch_rows, &Header::scratch_row_bytes, &Header::scratch_base})
            if (h.*field != h0.*field)
                fault(r, "header", "a size that all ranks share differs from rank 0's");
        for (const auto field :
             {&Header::input_rows, &Header::output_rows, &Header::send_rows, &Header::receive_rows,
              &Header::window_rows, &Header::scratch_rows, &Header::scratch_base})
            if (h.*field > kMostRows) fault(r, "header", "more than 2^63 - 1 rows");
    }

    void posts(u32 r) {
        for (u32 k = 0; k < views_[r].header->num_posts; ++k) {
            const Post& p = views_[r].posts[k];
            if (p.rank >= num_ranks() || p.value < 1 || p.value > kMaxValue || p.reserved)
                fault(r, "post", "a rank, value or reserved field is out of range");
        }
    }

    void records(u32 r) {
        const Header& h = *views_[r].header;
        u64 stages = 0, streams = 0, segments = 0, links = 0;
        for (u32 q = 0; q < kNumQueues; ++q) {
            const Queue& queue = views_[r].queues[q];
            u64 items = 0, last = 0;
            if (queue.num_stages) {
                if (h.op != kCombine && q >= kSum) fault(r, kNames[q], "only a combine has any");
                if (!next(r, q, queue.first_stage, queue.num_stages, h.num_stages, &stages)) return;
            }
            for (u32 k = 0; k < queue.num_stages; ++k) {
                const Stage& stage = views_[r].stages[queue.first_stage + k];
                if (!next(r, q, stage.first_stream, stage.num_streams, h.num_streams, &streams) ||
                    !ticks(r, q, stage, &last))
                    return;
                if (stage.first_item != items)
                    fault(r, kNames[q], "stages are not numbered in order");
                items += u64{stage.num_chunks} * stage.num_streams;
                for (u32 x = 0; x < stage.num_streams; ++x) {
                    const Stream& s = views_[r].streams[stage.first_stream + x];
                    if (!next(r, q, s.first_segment, s.num_segments, h.num_segments, &segments) ||
                        !next(r, q, s.first_link, s.num_links, h.num_links, &links))
                        return;
                    stream(r, q, stage, s);
                }
            }
            if (items != queue.num_items) fault(r, kNames[q], "the number of items is wrong");
        }
        if (stages != h.num_stages || streams != h.num_streams || segments != h.num_segments ||
            links != h.num_links)
            fault(r, "header", "records that no queue leads to");
    }

    // False: do not go on.
    bool ticks(u32 r, u32 q, const Stage& stage, u64* last) {
        // Chunk flags bound the number of chunks; a reduce has none.
        if (!stage.num_chunks || !stage.num_streams || stage.reserved ||
            (q != kReduce && stage.num_chunks > flags_.chunk_slots)) {
            fault(r, kNames[q], "a stage's chunks, streams or reserved field are out of range");
            return false;
        }
        if (stage.ticks_end < stage.ticks_begin || stage.ticks_end > kMostTicks ||
            stage.ticks_end - stage.ticks_begin > kMostRows / (u64{stage.num_chunks} + 1)) {
            fault(r, kNames[q], "plan times fall within a stage, or are too large");
            return false;
        }
        if (plan_time(q, stage, 0) < *last) fault(r, kNames[q], "plan times fall");
        *last = plan_time(q, stage, stage.num_chunks - 1);
        return true;
    }

    void stream(u32 r, u32 q, const Stage& stage, const Stream& s) {
        const Header& h = *views_[r].header;
        if (!s.num_rows || !s.chunk_rows || s.num_rows > kMostRows ||
            s.chunk_rows > ~u64{0} / stage.num_chunks || s.source_row > kMostRows ||
            s.target_row > kMostRows)
            return fault(r, kNames[q], "a stream's rows are out of range");
        const u64 chunks = ceil_div(s.num_rows, s.chunk_rows);
        if (chunks > stage.num_chunks)
            return fault(r, kNames[q], "a stream has more chunks than its stage");
        if (q == kReduce && (chunks != stage.num_chunks || s.num_rows > h.output_rows))
            return fault(r, kNames[q], "more items than tokens");
        if (s.peer >= num_ranks()) fault(r, kNames[q], "a peer that is no rank");
        if (s.credit_slot != kNoSlot &&
            (q != kReceive || s.credit_rank >= num_ranks() || s.credit_chunk >= chunks ||
             s.credit_value < 1 || s.credit_value > kMaxValue))
            fault(r, kNames[q], "a credit out of range");
        if (s.gate_slot != kNoSlot && (s.gate_value < 1 || s.gate_value > kMaxValue))
            fault(r, kNames[q], "a gate's value is out of range");
        if (spare_fields(h.op, q, s)) fault(r, kNames[q], "a field that nothing reads is in use");
        u64 end = 0;
        bool whole = true;
        for (u32 k = 0; k < s.num_segments; ++k) {
            const Segment& g = views_[r].segments[s.first_segment + k];
            if (g.stream_row < end || !g.num_rows || g.stream_row > s.num_rows ||
                g.num_rows > s.num_rows - g.stream_row || g.row > kMostRows ||
                g.peer >= num_ranks())
                return fault(r, kNames[q], "segments overlap, or are out of range");
            if (spare_fields(h.op, q, g))
                fault(r, kNames[q], "a field that nothing reads is in use");
            whole &= g.stream_row == end;
            end = g.stream_row + g.num_rows;
        }
        // Of a chunk packed for a put, or landed from one, a rank may have a part.
        const bool part = (q == kPack && h.op != kCombine) || (q == kLand && h.op != kDispatch);
        if (!part && (!whole || end != s.num_rows))
            fault(r, kNames[q], "segments leave rows of the stream out");
        for (u32 k = 0; k < s.num_links; ++k) {
            const Link& link = views_[r].links[s.first_link + k];
            if (link.rank >= num_ranks() || link.reserved)
                fault(r, kNames[q], "a link's rank or reserved field is out of range");
        }
    }

    // Those are zero, so that equal plans are equal bytes.
    static bool spare_fields(u32 op, u32 q, const Stream& s) {
        const bool reads_source = q == kPut || q == kReceive || q == kSum;
        const bool writes_target =
            q == kPush || q == kPut || q == kSum || (q == kPack && op != kCombine);
        return (!reads_source && s.source_row) || (!writes_target && s.target_row) ||
               (q == kReduce && s.slot != kNoSlot) || (s.gate_slot == kNoSlot && s.gate_value) ||
               (s.credit_slot == kNoSlot && (s.credit_rank || s.credit_value || s.credit_chunk));
    }
    static bool spare_fields(u32 op, u32 q, const Segment& g) {
        const bool row = op == kAllToAll   ? q != kPut
                         : op == kDispatch ? q == kPack || q == kPush || q == kTake
                                           : q == kPack || q == kPush || q == kReceive;
        return (!row && g.row) || (q != kPut && g.slot) || (q != kPut && q != kReceive && g.peer);
    }
};

}  // namespace

std::vector<std::string> check_form(const Plan& plan, const Tables& tables,
                                    std::size_t most_faults) {
    if (tables.size() != plan.traffic.num_ranks)
        return {std::to_string(tables.size()) + " tables for " +
                std::to_string(plan.traffic.num_ranks) + " ranks"};
    for (std::size_t r = 0; r < tables.size(); ++r)
        if (const char* why = misfit(tables[r]))
            return {"rank " + std::to_string(r) + " header: " + why};
    FormCheck check(plan, tables, most_faults);
    check.run();
    return std::move(check.faults);
}

}  // namespace fastkern
