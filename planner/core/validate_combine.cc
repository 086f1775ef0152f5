// The validator's third part for a combine: follows every row that the dispatch brought back to its
// owner's window, and every partial row of owners. Which partial rows a proxy gets is in the
// Arrival records, so there the chunk that each record stands for must be the one that is summed.
#include "planner/core/validate_rows.h"

namespace fastkern {

namespace {

bool same(const Chunk& a, const Chunk& b) {
    return a.proxy == b.proxy && a.begin == b.begin && a.end == b.end;
}

class CombineRows : public RowWalk {
  public:
    CombineRows(const Plan& plan, const Tables& dispatch, const Tables& tables,
                std::size_t most_faults)
        : RowWalk(plan, tables, most_faults), dispatched_(follow_dispatch(plan, dispatch)) {
        // What the dispatch left behind is there when the call begins: flag 0.
        for (Runs& runs : dispatched_.staged)
            for (auto& [row, run] : runs) run.flag = 0;
    }

    void run() {
        const u32 r_count = num_ranks();
        std::vector<Runs> send(r_count), receive(r_count), window(r_count), partial(r_count);
        for_each_item_of(kPack, [&](const WalkItem& item) { pack(item); });
        for (const auto& [flag, chunk] : dispatched_.chunks)
            if (!packed_.count(flag))
                fault(static_cast<u32>(flag >> 32), "pack",
                      "leaves out a chunk that it has sums for, of rank " +
                          std::to_string(chunk.proxy));
        for_each_item_of(kSum, [&](const WalkItem& item) { sum(item, &send[item.rank]); });
        for_each_item_of(kPut,
                         [&](const WalkItem& item) { move_put(item, send[item.rank], &receive); });
        for_each_item_of(
            kReceive, [&](const WalkItem& item) { hand_back(item, receive[item.rank], &window); });
        for_each_item_of(kPush, [&](const WalkItem& item) { push(item, &partial[item.s.peer]); });
        for (u32 r = 0; r < r_count; ++r) {
            check_window(r, window[r]);
            check_partials(r, partial[r]);
            check_tokens(r);
        }
    }

  private:
    Dispatched dispatched_;
    std::map<u64, u64> packed_;   // land flag of the dispatch -> times its sums were packed
    std::map<u64, Chunk> ready_;  // pack flag -> the chunk whose sums it stands for

    // One segment: the Arrival record of chunk 0.
    void pack(const WalkItem& item) {
        const u64 record = item.table.segments[item.s.first_segment].row + item.chunk;
        const u64 land = flag_key(item.rank, u64{flags_.land(0, 0)} + record);
        const auto found = dispatched_.chunks.find(land);
        if (item.s.num_segments != 1 || record >= flags_.num_arrivals() ||
            found == dispatched_.chunks.end())
            return fault(item, "Arrival record " + std::to_string(record) + " was never told");
        if (found->second.proxy != item.s.peer)
            fault(item, "sums for rank " + std::to_string(found->second.proxy) + " go to rank " +
                            std::to_string(item.s.peer));
        if (packed_[land]++) fault(item, "packs the sums of a chunk twice");
        ready_.emplace(signal_to(item, item.s.peer), found->second);
    }

    void sum(const WalkItem& item, Runs* send) {
        const u64 begin = item.s.source_row + item.begin, n = item.end - item.begin;
        const Chunk here{item.rank, begin, begin + n};
        for (const u64 flag : waits_of(item)) {
            const auto found = ready_.find(flag);
            if (found == ready_.end() || !same(found->second, here))
                fault(item, "awaits the partial rows of another chunk");
        }
        const u64 flag = signal_to(item, item.rank);
        load(item.rank, "sum", dispatched_.staged[item.rank], begin, n, {0},
             [&](u64 offset, Run run) {
                 run.flag = flag;
                 store(item, send, item.s.target_row + item.begin + offset, run,
                       item.table.header->send_rows, "send staging");
             });
    }

    void hand_back(const WalkItem& item, const Runs& receive, std::vector<Runs>* window) {
        for_each_segment(item, [&](const Segment& g, u64 skip, u64 n, u64 row) {
            const u64 flag = signal_to(item, g.peer);
            if (server_of(g.peer) != server_of(item.rank))
                return fault(item, "hands rows to another server");
            load(item, receive, item.s.source_row + row, n, [&](u64 offset, Run run) {
                if (run.src != g.peer)
                    fault(item, "hands a row of rank " + std::to_string(run.src) + " to rank " +
                                    std::to_string(g.peer));
                run.flag = flag;
                store(item, &(*window)[g.peer], g.row + skip + offset, run,
                      item.table.header->window_rows, "window");
            });
        });
    }

    // Sums of this rank's window rows, for their owner.
    void push(const WalkItem& item, Runs* partial) {
        const u64 first = item.table.segments[item.s.first_segment].row + item.begin;
        if (item.s.num_segments != 1) fault(item, "more than one run of window rows");
        if (item.s.peer == item.rank) fault(item, "its own sums need no partial rows");
        store(item, partial, item.s.target_row + item.begin,
              Run{item.rank, first, item.end - item.begin, signal_to(item, item.s.peer)},
              item.table.header->scratch_base, "partial rows of owners");
    }

    u64 window_row(u32 dst, u32 src) const {  // of the dispatch
        u64 row = 0;
        for (u32 s = 0; s < src; ++s) row += plan_.to_rank[std::size_t{s} * num_ranks() + dst];
        return row;
    }

    // An owner's window lies by server, and there in the order of its list.
    void check_window(u32 owner, const Runs& window) {
        const std::vector<u64> awaited = waits_of(owner, {kLand});
        u64 row = 0;
        for (u32 b = 0; b < traffic_.servers; ++b) {
            if (b == server_of(owner)) continue;
            const u32 dst = b * num_local() + local_of(owner);
            const u64 rows = traffic_.at(owner, dst);
            expect(owner, "window", window, row, Run{owner, input_row(owner, dst), rows}, awaited);
            row += rows;
        }
        if (rows_in(window) != row) fault(owner, "window", "has rows of nobody's list");
    }

    // An owner's partial rows lie by contributor, and there in the order of its window.
    void check_partials(u32 owner, const Runs& partial) {
        const std::vector<u64> awaited = waits_of(owner, {kTake});
        u64 row = 0;
        for (u32 j = 0; j < num_local(); ++j) {
            const u32 rank = server_of(owner) * num_local() + j;
            if (rank == owner) continue;
            const u64 rows = traffic_.at(owner, rank);
            expect(owner, "partial rows", partial, row, Run{rank, window_row(rank, owner), rows},
                   awaited);
            row += rows;
        }
        if (rows_in(partial) != row) fault(owner, "partial rows", "has sums of nobody's tokens");
        const Header& h = *views_[owner].header;
        if (h.input_rows || h.scratch_rows < h.scratch_base)
            fault(owner, "header", "the number of rows is wrong");
    }

    void check_tokens(u32 r) {
        Runs reduced;
        for_each_item_of(r, kReduce, [&](const WalkItem& item) {
            if (item.s.peer != r) fault(item, "is another rank's");
            store(item, &reduced, item.begin, Run{r, item.begin, item.end - item.begin, 0},
                  item.table.header->output_rows, "output");
        });
        if (rows_in(reduced) != views_[r].header->output_rows)
            fault(r, "reduce", "leaves tokens out");
    }
};

}  // namespace

std::vector<std::string> check_combine(const Plan& plan, const Tables& dispatch,
                                       const Tables& tables, std::size_t most_faults) {
    CombineRows check(plan, dispatch, tables, most_faults);
    check.run();
    return std::move(check.faults);
}

}  // namespace fastkern
