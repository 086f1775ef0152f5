// What the two halves of the validator share: walking the items of all ranks' tables, and faults.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "planner/core/plan.h"

namespace fastkern {

class TableWalk {
  public:
    TableWalk(const Plan& plan, const std::vector<std::vector<u8>>& tables, std::size_t most_faults)
        : plan_(plan), traffic_(plan.traffic), most_(most_faults) {
        for (const auto& block : tables) views_.push_back(view_table(block.data()));
        flags_ = {traffic_.num_ranks, traffic_.servers, traffic_.gpus_per_server,
                  plan.options.chunk_slots};
    }

    std::vector<std::string> faults;

  protected:
    static constexpr const char* kNames[kNumQueues] = {"pack",    "push", "put",
                                                       "receive", "land", "take"};
    const Plan& plan_;
    const Traffic& traffic_;
    const std::size_t most_;
    FlagLayout flags_{};
    std::vector<TableView> views_;

    void fault(u32 rank, const char* queue, const std::string& text) {
        if (faults.size() < most_)
            faults.push_back("rank " + std::to_string(rank) + " " + queue + ": " + text);
    }

    // Calls visit(queue, stage, stream, chunk, time, first row, end row) for the items that hold
    // rows.
    template <class Visit>
    void for_each_item(u32 rank, const Visit& visit) {
        const TableView& t = views_[rank];
        for (u32 q = 0; q < kNumQueues; ++q) {
            u64 last = 0, items = 0;
            for (u32 k = 0; k < t.queues[q].num_stages; ++k) {
                const Stage& stage = t.stages[t.queues[q].first_stage + k];
                if (stage.first_item != items)
                    fault(rank, kNames[q], "stages are not numbered in order");
                items += u64{stage.num_chunks} * stage.num_streams;
                for (u32 c = 0; c < stage.num_chunks; ++c) {
                    const u64 time = plan_time(q, stage, c);
                    if (time < last)
                        fault(rank, kNames[q], "plan times fall at stage " + std::to_string(k));
                    last = time;
                    for (u32 x = 0; x < stage.num_streams; ++x) {
                        const Stream& s = t.streams[stage.first_stream + x];
                        const u64 begin = c * s.chunk_rows;
                        if (begin < s.num_rows)
                            visit(q, stage, s, c, time, begin,
                                  std::min(s.num_rows, begin + s.chunk_rows));
                    }
                }
                for (u32 x = 0; x < stage.num_streams; ++x) {
                    const Stream& s = t.streams[stage.first_stream + x];
                    if (ceil_div(s.num_rows, s.chunk_rows) > stage.num_chunks)
                        fault(rank, kNames[q], "a stream has more chunks than its stage");
                }
            }
            if (items != t.queues[q].num_items)
                fault(rank, kNames[q], "the number of items is wrong");
        }
    }

    template <class Visit>
    void for_each_segment(u32 rank, const Stream& s, u64 begin, u64 end, const Visit& visit) {
        const Segment* g = views_[rank].segments + s.first_segment;
        for (u32 k = 0; k < s.num_segments; ++k) {
            const u64 first = std::max(begin, g[k].stream_row);
            const u64 last = std::min(end, g[k].stream_row + g[k].num_rows);
            if (first < last) visit(g[k], first - g[k].stream_row, last - first, first);
        }
    }

    bool touches(u32 rank, const Stream& s, u64 begin, u64 end, u32 peer, bool any) {
        bool found = false;
        for_each_segment(rank, s, begin, end,
                         [&](const Segment& g, u64, u64, u64) { found |= any || g.peer == peer; });
        return found;
    }
};

// Every wait has a producer with a smaller plan time; gates stand before remote writes; one sender
// per receiver at a time; nothing is signalled twice or left unread.
std::vector<std::string> check_flags(const Plan& plan, const std::vector<std::vector<u8>>& tables,
                                     std::size_t most_faults);

// Every row is delivered once to the right place, and every range lies inside its buffer.
std::vector<std::string> check_rows(const Plan& plan, const std::vector<std::vector<u8>>& tables,
                                    std::size_t most_faults);

}  // namespace fastkern
