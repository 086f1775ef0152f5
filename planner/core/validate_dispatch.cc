// The validator's third part for a dispatch: follows the rows of every pack list. Which ranks of
// another server a row is for is in its header, so there rows are followed to the proxy only.
#include "planner/core/validate_rows.h"

namespace fastkern {

namespace {

class DispatchRows : public RowWalk {
  public:
    DispatchRows(const Plan& plan, const Tables& tables, std::size_t most_faults)
        : RowWalk(plan, tables, most_faults),
          window_(num_ranks()),
          taken_(num_ranks()),
          arrived_(num_ranks()) {
        result.staged.resize(num_ranks());
    }

    Dispatched result;

    void run() {
        std::vector<Runs> send(num_ranks());
        for_each_item_of(kPack, [&](const WalkItem& item) {
            from_list(item, &send[item.s.peer], item.table.header->send_rows, "send staging");
        });
        for_each_item_of(kPush, [&](const WalkItem& item) {
            const Header& h = *item.table.header;
            const bool own = item.s.peer == item.rank;
            from_list(item, &window_[item.s.peer], own ? h.output_rows : h.window_rows, "window");
        });
        for_each_item_of(
            kPut, [&](const WalkItem& item) { move_put(item, send[item.rank], &result.staged); });
        for_each_item_of(kReceive, [&](const WalkItem& item) { receive(item); });
        for_each_item_of(kTake, [&](const WalkItem& item) { take(item); });
        for (u32 r = 0; r < num_ranks(); ++r) {
            check_list(r);
            check_header(r);
        }
    }

  private:
    std::vector<Runs> window_;   // rows that ranks of the server wrote, own ones too
    std::vector<Runs> taken_;    // of those, rows that were landed
    std::vector<Runs> arrived_;  // pack list -> where (src: the proxy; first: its staging row)

    void from_list(const WalkItem& item, Runs* region, u64 limit, const char* what) {
        const u64 flag = signal_to(item, item.s.peer);
        for_each_segment(item, [&](const Segment& g, u64 skip, u64 n, u64 row) {
            if (g.row + skip + n > item.table.header->input_rows)
                fault(item, "reads past the end of the pack list");
            store(item, region, item.s.target_row + row, Run{item.rank, g.row + skip, n, flag},
                  limit, what);
        });
    }

    // Rows of one source in a chunk are a run of its list, for a rank's part of them must be a run
    // of its window.
    void receive(const WalkItem& item) {
        std::vector<u8> seen(num_local(), u8{0});
        for_each_segment(item, [&](const Segment& g, u64, u64 n, u64 row) {
            if (server_of(g.peer) != server_of(item.s.peer) || seen[local_of(g.peer)]++)
                fault(item, "rank " + std::to_string(g.peer) +
                                " is a source twice, or in another server than the sender");
            const u64 first = item.s.source_row + row;
            u64 list_row = kNoFlag;
            load(item, result.staged[item.rank], first, n, [&](u64 offset, const Run& run) {
                if (run.src != g.peer)
                    fault(item, "row " + std::to_string(first + offset) + " is of rank " +
                                    std::to_string(run.src) + ", not " + std::to_string(g.peer));
                if (list_row == kNoFlag) list_row = run.first - offset;
                if (run.first != list_row + offset)
                    fault(item, "rows of one source are no run of its list");
                store(item, &arrived_[run.src], run.first,
                      Run{item.rank, first + offset, run.num_rows, 0},
                      views_[run.src].header->input_rows, "pack list");
            });
        });
        for_each_signal(item, [&](u32 at, u64 slot) {
            result.chunks.emplace(
                flag_key(at, slot),
                Chunk{item.rank, item.s.source_row + item.begin, item.s.source_row + item.end});
        });
    }

    void take(const WalkItem& item) {
        for_each_segment(item, [&](const Segment& g, u64 skip, u64 n, u64) {
            load(item, window_[item.rank], g.row + skip, n, [&](u64 offset, const Run& run) {
                if (run.src != item.s.peer)
                    fault(item, "rows of rank " + std::to_string(run.src) + ", not " +
                                    std::to_string(item.s.peer));
                Run copy = run;
                copy.flag = 0;
                store(item, &taken_[item.rank], g.row + skip + offset, copy,
                      item.table.header->output_rows, "output");
            });
        });
    }

    // Every row of a rank's list is where it belongs: in the window of a rank of its server, or
    // with a proxy of the right other server.
    void check_list(u32 src) {
        for (u32 d = 0; d < num_ranks(); ++d) {
            const u64 first = input_row(src, d), rows = traffic_.at(src, d);
            if (server_of(d) != server_of(src)) {
                load(src, "pack list", arrived_[src], first, rows, {0}, [&](u64, const Run& run) {
                    if (server_of(run.src) != server_of(d))
                        fault(src, "pack list", "rows cross to the wrong server");
                });
                continue;
            }
            Runs own;  // one's own rows need no flag and are not taken
            for (auto [row, run] : window_[d])
                if (d == src && run.src == src)
                    own.emplace(row, Run{src, run.first, run.num_rows, 0});
            expect(d, "output", d == src ? own : taken_[d], window_row(d, src),
                   Run{src, first, rows}, {0});
        }
    }

    u64 window_row(u32 dst, u32 src) const {
        u64 row = 0;
        for (u32 s = 0; s < src; ++s) row += to_rank(s, dst);
        return row;
    }
    u64 to_rank(u32 src, u32 dst) const {
        return plan_.to_rank[std::size_t{src} * num_ranks() + dst];
    }

    void check_header(u32 r) {
        const Header& h = *views_[r].header;
        u64 listed = 0, local = 0;
        for (u32 d = 0; d < num_ranks(); ++d) {
            listed += traffic_.at(r, d);
            if (server_of(d) == server_of(r)) local += traffic_.at(d, r);
        }
        const u64 distinct = window_row(r, num_ranks());
        if (h.input_rows != listed || h.output_rows != distinct ||
            (num_local() > 1 && h.window_rows < distinct))
            fault(r, "header", "the number of rows is wrong");
        if (rows_in(window_[r]) != local) fault(r, "window", "has rows of nobody's list");
        if (rows_in(arrived_[r]) + own_rows(r) != listed)
            fault(r, "pack list", "rows leave that should stay");
        const bool told = num_local() > 1 && traffic_.servers > 1;
        if (h.scratch_rows < (told ? flags_.num_arrivals() : 0) || h.scratch_base ||
            h.scratch_row_bytes != sizeof(Arrival) * num_local())
            fault(r, "header", "no room for the Arrival records");
    }

    u64 own_rows(u32 r) const {
        u64 rows = 0;
        for (u32 d = 0; d < num_ranks(); ++d)
            if (server_of(d) == server_of(r)) rows += traffic_.at(r, d);
        return rows;
    }
};

}  // namespace

std::vector<std::string> check_dispatch(const Plan& plan, const Tables& tables,
                                        std::size_t most_faults) {
    DispatchRows check(plan, tables, most_faults);
    check.run();
    return std::move(check.faults);
}

Dispatched follow_dispatch(const Plan& plan, const Tables& tables) {
    DispatchRows check(plan, tables, 0);
    check.run();
    return std::move(check.result);
}

}  // namespace fastkern
