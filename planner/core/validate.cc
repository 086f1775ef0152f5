// The validator: reads the tables alone, knows nothing of how they were made.
#include <algorithm>
#include <map>
#include <unordered_map>

#include "planner/core/plan.h"

namespace fastkern {

namespace {

// A run of rows followed from an input to where it ends.
struct Run {
    u32 src;
    u64 input_row;
    u64 num_rows;
};

class Validator {
  public:
    Validator(const Plan& plan, const std::vector<std::vector<u8>>& tables, std::size_t most)
        : plan_(plan), traffic_(plan.traffic), most_(most) {
        for (const auto& block : tables) views_.push_back(view_table(block.data()));
        flags_ = {traffic_.num_ranks, traffic_.servers, traffic_.gpus_per_server,
                  plan.options.chunk_slots};
    }

    std::vector<std::string> run() {
        produce();
        if (faults_.empty()) await();
        if (faults_.empty()) deliver();
        return std::move(faults_);
    }

  private:
    const Plan& plan_;
    const Traffic& traffic_;
    const std::size_t most_;
    FlagLayout flags_{};
    std::vector<TableView> views_;
    std::vector<std::string> faults_;
    std::unordered_map<u64, u64> written_;  // (rank, slot, value) -> plan time + 1
    std::unordered_map<u64, u32> awaited_;  // (rank, slot, value) -> waits

    // Values above 1 occur only in credits; slots are below 2^32 and values below 2^16.
    static u64 key(u32 rank, u32 slot, u32 value) {
        return (u64{rank} << 48) ^ (u64{slot} << 16) ^ value;
    }

    void fault(u32 rank, const char* queue, const std::string& text) {
        if (faults_.size() < most_)
            faults_.push_back("rank " + std::to_string(rank) + " " + queue + ": " + text);
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

    void write(u32 rank, u32 queue, u32 at, u32 slot, u32 value, u64 time) {
        if (at >= traffic_.num_ranks || slot >= flags_.num_slots()) {
            fault(rank, kNames[queue], "a flag lies outside the heap");
            return;
        }
        if (!written_.emplace(key(at, slot, value), time + 1).second)
            fault(rank, kNames[queue],
                  "flag " + std::to_string(slot) + " of rank " + std::to_string(at) +
                      " has two writes");
    }

    void produce() {
        for (u32 r = 0; r < views_.size(); ++r) {
            const TableView& t = views_[r];
            u32 credits = 0;
            for (u32 k = 0; k < t.header->num_posts; ++k) {
                const Post& p = t.posts[k];
                credits += p.slot == flags_.credit(r);
                if (!written_.emplace(key(p.rank, p.slot, p.value), 0).second)
                    fault(r, "post", "flag " + std::to_string(p.slot) + " has two writes");
            }
            if (credits > 1) fault(r, "post", "lets two senders start at once");
            for_each_item(
                r, [&](u32 q, const Stage&, const Stream& s, u32 c, u64 time, u64 begin, u64 end) {
                    if (q == kReceive) {
                        if (s.credit_slot != kNoSlot && s.credit_chunk == c)
                            write(r, q, s.credit_rank, s.credit_slot, s.credit_value, time);
                        for (u32 k = 0; k < s.num_links; ++k) {
                            const Link& link = t.links[s.first_link + k];
                            if (touches(r, s, begin, end, link.rank, false))
                                write(r, q, link.rank, link.slot + c, 1, time);
                        }
                    } else if (q <= kPut && s.slot != kNoSlot &&
                               (q == kPut || touches(r, s, begin, end, 0, true))) {
                        write(r, q, s.peer, s.slot + c, 1, time);
                    }
                });
        }
    }

    void wait(u32 rank, u32 queue, u32 slot, u32 value, u64 time) {
        const auto found = written_.find(key(rank, slot, value));
        if (found == written_.end())
            fault(rank, kNames[queue],
                  "flag " + std::to_string(slot) + " value " + std::to_string(value) +
                      " is awaited but never written");
        else if (found->second > time)  // stored + 1: strictly earlier is <=
            fault(rank, kNames[queue],
                  "flag " + std::to_string(slot) + " is written no earlier than awaited");
        ++awaited_[key(rank, slot, value)];
    }

    void await() {
        for (u32 r = 0; r < views_.size(); ++r) {
            const TableView& t = views_[r];
            for_each_item(r, [&](u32 q, const Stage&, const Stream& s, u32 c, u64 time, u64 begin,
                                 u64 end) {
                const bool holds_rows =
                    q == kPut || q == kReceive || touches(r, s, begin, end, 0, true);
                if (s.gate_slot != kNoSlot && holds_rows)
                    wait(r, q, s.gate_slot, s.gate_value, time);
                if (q == kPut)
                    for_each_segment(r, s, begin, end, [&](const Segment& g, u64, u64, u64) {
                        wait(r, q, g.slot + c, 1, time);
                    });
                if (q >= kReceive && holds_rows) wait(r, q, s.slot + c, 1, time);
                if (q == kReceive)
                    for (u32 k = 0; k < s.num_links; ++k)
                        wait(r, q, t.links[s.first_link + k].gate_slot, 1, time);
                // With credits, each receiver lets one sender start, and each arrival the next one.
                if (q == kPut && plan_.policy != kDirect && s.gate_slot != flags_.credit(s.peer))
                    fault(r, kNames[q], "starts without a credit of its receiver");
                // A write to a peer without a gate would reach buffers that are still in use.
                if ((q == kPack || q == kPush || q == kPut) && s.peer != r &&
                    s.gate_slot == kNoSlot)
                    fault(r, kNames[q],
                          "writes to rank " + std::to_string(s.peer) + " without a gate");
            });
        }
        // Ready may go unread (a peer that writes nothing here); everything else is consumed in its
        // call.
        for (const auto& [k, time] : written_) {
            const u32 slot = static_cast<u32>(k >> 16), rank = static_cast<u32>(k >> 48);
            if (slot >= flags_.num_ranks && !awaited_.count(k))
                fault(rank, "flags",
                      "flag " + std::to_string(slot) + " is written but never awaited");
        }
    }

    // Follows rows: pack fills send staging, put moves it, receive and land hand it on.
    using Runs = std::map<u64, Run>;  // first row of a region -> run

    void store(u32 rank, u32 queue, Runs* region, u64 row, const Run& run, u64 limit,
               const char* what) {
        if (row + run.num_rows > limit) {
            fault(rank, kNames[queue], std::string("writes past the end of the ") + what);
            return;
        }
        const auto after = region->lower_bound(row);
        if (after != region->end() && after->first < row + run.num_rows)
            fault(rank, kNames[queue], std::string("writes rows of the ") + what + " twice");
        if (after != region->begin()) {
            const auto before = std::prev(after);
            if (before->first + before->second.num_rows > row)
                fault(rank, kNames[queue], std::string("writes rows of the ") + what + " twice");
        }
        region->emplace(row, run);
    }

    // Calls visit(offset, run) for the runs in rows [row, row + num_rows); all must be there.
    template <class Visit>
    void load(u32 rank, u32 queue, const Runs& region, u64 row, u64 num_rows, const Visit& visit) {
        u64 at = row;
        auto it = region.upper_bound(row);
        if (it != region.begin()) --it;
        for (; it != region.end() && at < row + num_rows && it->first <= at; ++it) {
            const u64 end = std::min(it->first + it->second.num_rows, row + num_rows);
            if (end <= at) continue;
            visit(at - row, Run{it->second.src, it->second.input_row + (at - it->first), end - at});
            at = end;
        }
        if (at < row + num_rows) fault(rank, kNames[queue], "reads rows that nothing wrote");
    }

    template <class Visit>
    void for_each_stream(u32 queue, const Visit& visit) {
        for (u32 r = 0; r < views_.size(); ++r) {
            const TableView& t = views_[r];
            for (u32 k = 0; k < t.queues[queue].num_stages; ++k) {
                const Stage& stage = t.stages[t.queues[queue].first_stage + k];
                for (u32 x = 0; x < stage.num_streams; ++x)
                    visit(r, t, t.streams[stage.first_stream + x]);
            }
        }
    }

    void deliver() {
        const u32 r_count = traffic_.num_ranks;
        std::vector<Runs> send(r_count), receive(r_count), window(r_count), output(r_count);
        const auto all = [&](u32 q, const auto& body) {
            for_each_stream(q, [&](u32 r, const TableView& t, const Stream& s) {
                for_each_segment(r, s, 0, s.num_rows,
                                 [&](const Segment& g, u64, u64 n, u64 stream_row) {
                                     body(r, t, s, g, n, stream_row);
                                 });
            });
        };
        all(kPack,
            [&](u32 r, const TableView& t, const Stream& s, const Segment& g, u64 n, u64 row) {
                if (g.row + n > t.header->input_rows)
                    fault(r, "pack", "reads past the end of the input");
                store(r, kPack, &send[s.peer], s.target_row + row, {r, g.row, n},
                      t.header->send_rows, "send staging");
            });
        all(kPush, [&](u32 r, const TableView& t, const Stream& s, const Segment& g, u64 n,
                       u64 row) {
            if (g.row + n > t.header->input_rows)
                fault(r, "push", "reads past the end of the input");
            const bool own = s.peer == r;
            store(r, kPush, own ? &output[r] : &window[s.peer], s.target_row + row, {r, g.row, n},
                  own ? t.header->output_rows : t.header->window_rows, own ? "output" : "window");
        });
        for_each_stream(kPut, [&](u32 r, const TableView& t, const Stream& s) {
            load(r, kPut, send[r], s.source_row, s.num_rows, [&](u64 offset, const Run& run) {
                store(r, kPut, &receive[s.peer], s.target_row + offset, run, t.header->receive_rows,
                      "receive staging");
            });
        });
        all(kReceive, [&](u32 r, const TableView& t, const Stream& s, const Segment& g, u64 n,
                          u64 row) {
            const bool own = g.peer == r;
            load(r, kReceive, receive[r], s.source_row + row, n, [&](u64 offset, const Run& run) {
                store(r, kReceive, own ? &output[r] : &window[g.peer], g.row + offset, run,
                      own ? t.header->output_rows : t.header->window_rows,
                      own ? "output" : "window");
            });
        });
        for (const QueueKind q : {kLand, kTake})
            all(q, [&](u32 r, const TableView& t, const Stream&, const Segment& g, u64 n, u64) {
                load(r, q, window[r], g.row, n, [&](u64 offset, const Run& run) {
                    store(r, q, &output[r], g.row + offset, run, t.header->output_rows, "output");
                });
            });
        for (u32 d = 0; d < r_count; ++d) {
            u64 row = 0;
            for (u32 s = 0; s < r_count; ++s) {
                u64 input_row = 0;
                for (u32 k = 0; k < d; ++k) input_row += traffic_.at(s, k);
                load(d, kTake, output[d], row, traffic_.at(s, d), [&](u64 offset, const Run& run) {
                    if (run.src != s || run.input_row != input_row + offset)
                        fault(d, "output",
                              "row " + std::to_string(row + offset) + " should be row " +
                                  std::to_string(input_row + offset) + " of rank " +
                                  std::to_string(s) + ", is row " + std::to_string(run.input_row) +
                                  " of rank " + std::to_string(run.src));
                });
                row += traffic_.at(s, d);
            }
            if (views_[d].header->output_rows != row)
                fault(d, "output", "the number of rows is wrong");
        }
    }

    static constexpr const char* kNames[kNumQueues] = {"pack",    "push", "put",
                                                       "receive", "land", "take"};
};

}  // namespace

std::vector<std::string> validate_tables(const Plan& plan,
                                         const std::vector<std::vector<u8>>& tables,
                                         std::size_t most) {
    return Validator(plan, tables, most).run();
}

std::vector<std::string> validate(const Plan& plan, std::size_t most) {
    std::vector<std::vector<u8>> tables;
    for (u32 r = 0; r < plan.traffic.num_ranks; ++r) tables.push_back(lower(plan, r));
    return validate_tables(plan, tables, most);
}

}  // namespace fastkern
