// The validator's third part for an all-to-all: follows every row from an input to an output.
#include "planner/core/validate_rows.h"

namespace fastkern {

namespace {

class AllToAllRows : public RowWalk {
  public:
    using RowWalk::RowWalk;

    void run() {
        const u32 r_count = num_ranks();
        std::vector<Runs> send(r_count), receive(r_count), window(r_count), output(r_count);
        for (const u32 q : {kPack, kPush})
            for_each_item_of(
                q, [&](const WalkItem& item) { copy_input(item, &send, &window, &output); });
        for_each_item_of(kPut,
                         [&](const WalkItem& item) { move_put(item, send[item.rank], &receive); });
        for_each_item_of(kReceive, [&](const WalkItem& item) {
            for_each_segment(item, [&](const Segment& g, u64 skip, u64 n, u64 row) {
                const bool own = g.peer == item.rank;
                load(item, receive[item.rank], item.s.source_row + row, n,
                     [&](u64 offset, Run run) {
                         run.flag = own ? kNoFlag : signal_to(item, g.peer);
                         const Header& h = *item.table.header;
                         store(item, own ? &output[item.rank] : &window[g.peer],
                               g.row + skip + offset, run, own ? h.output_rows : h.window_rows,
                               own ? "output" : "window");
                     });
            });
        });
        for (const u32 q : {kLand, kTake})
            for_each_item_of(q, [&](const WalkItem& item) {
                for_each_segment(item, [&](const Segment& g, u64 skip, u64 n, u64) {
                    load(item, window[item.rank], g.row + skip, n, [&](u64 offset, Run run) {
                        run.flag = kNoFlag;
                        store(item, &output[item.rank], g.row + skip + offset, run,
                              item.table.header->output_rows, "output");
                    });
                });
            });
        for (u32 d = 0; d < r_count; ++d) check_output(d, output[d]);
    }

  private:
    void copy_input(const WalkItem& item, std::vector<Runs>* send, std::vector<Runs>* window,
                    std::vector<Runs>* output) {
        const Header& h = *item.table.header;
        const u32 peer = item.s.peer;
        for_each_segment(item, [&](const Segment& g, u64 skip, u64 n, u64 row) {
            if (g.row + skip + n > h.input_rows) fault(item, "reads past the end of the input");
            const Run run{item.rank, g.row + skip, n, signal_to(item, peer)};
            if (item.queue == kPack)
                store(item, &(*send)[peer], item.s.target_row + row, run, h.send_rows,
                      "send staging");
            else if (peer == item.rank)
                store(item, &(*output)[peer], item.s.target_row + row, run, h.output_rows,
                      "output");
            else
                store(item, &(*window)[peer], item.s.target_row + row, run, h.window_rows,
                      "window");
        });
    }

    void check_output(u32 d, Runs output) {
        // What is in the output needs no flag: the call is over.
        for (auto& [at, run] : output) run.flag = 0;
        u64 row = 0, input = 0;
        for (u32 s = 0; s < num_ranks(); ++s) {
            expect(d, "output", output, row, Run{s, input_row(s, d), traffic_.at(s, d)}, {0});
            row += traffic_.at(s, d);
            input += traffic_.at(d, s);
        }
        if (views_[d].header->output_rows != row || views_[d].header->input_rows != input)
            fault(d, "header", "the number of rows is wrong");
    }
};

}  // namespace

std::vector<std::string> check_all_to_all(const Plan& plan, const Tables& tables,
                                          std::size_t most_faults) {
    AllToAllRows check(plan, tables, most_faults);
    check.run();
    return std::move(check.faults);
}

}  // namespace fastkern
