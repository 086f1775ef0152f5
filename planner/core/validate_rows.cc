// The validator's second half: follows every row from an input to an output.
#include <map>

#include "planner/core/table_walk.h"

namespace fastkern {

namespace {

// A run of rows followed from an input to where it ends.
struct Run {
    u32 src;
    u64 input_row;
    u64 num_rows;
};

class RowCheck : public TableWalk {
  public:
    using TableWalk::TableWalk;

  private:
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

  public:
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
};

}  // namespace

std::vector<std::string> check_rows(const Plan& plan, const std::vector<std::vector<u8>>& tables,
                                    std::size_t most_faults) {
    RowCheck check(plan, tables, most_faults);
    check.deliver();
    return std::move(check.faults);
}

}  // namespace fastkern
