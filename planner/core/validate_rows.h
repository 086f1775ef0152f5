// Following rows: what the row checks of all operations share.
#pragma once

#include <map>

#include "planner/core/table_walk.h"

namespace fastkern {

constexpr u64 kNoFlag = ~u64{0};

inline u64 flag_key(u32 rank, u64 slot) { return u64{rank} << 32 | slot; }

// Rows followed from where they began: row `first` and on of rank `src`.
struct Run {
    u32 src;
    u64 first;
    u64 num_rows;
    u64 flag = kNoFlag;  // flag_key of the flag that says they are there
};

using Runs = std::map<u64, Run>;  // first row of a region -> run; runs do not overlap

class RowWalk : public TableWalk {
  public:
    using TableWalk::TableWalk;

  protected:
    // The flag by which an item tells `at` that its rows are there.
    u64 signal_to(const WalkItem& item, u32 at) const {
        u64 found = kNoFlag;
        for_each_signal(item, [&](u32 rank, u64 slot) {
            if (rank == at) found = flag_key(rank, slot);
        });
        return found;
    }

    std::vector<u64> waits_of(const WalkItem& item) const {
        std::vector<u64> found;
        for_each_wait(item, [&](u64 slot, u32) { found.push_back(flag_key(item.rank, slot)); });
        return found;
    }

    // The flags that a rank's items of these queues await.
    std::vector<u64> waits_of(u32 rank, std::initializer_list<u32> queues) {
        std::vector<u64> found;
        for (const u32 q : queues)
            for_each_item_of(rank, q, [&](const WalkItem& item) {
                for (const u64 flag : waits_of(item)) found.push_back(flag);
            });
        return found;
    }

    void store(u32 rank, const char* where, Runs* region, u64 row, const Run& run, u64 limit,
               const char* what) {
        if (row + run.num_rows > limit)
            return fault(rank, where, std::string("writes past the end of the ") + what);
        const auto after = region->lower_bound(row);
        const bool hits_after = after != region->end() && after->first < row + run.num_rows;
        const bool hits_before = after != region->begin() &&
                                 std::prev(after)->first + std::prev(after)->second.num_rows > row;
        if (hits_after || hits_before)
            return fault(rank, where, std::string("writes rows of the ") + what + " twice");
        region->emplace(row, run);
    }
    void store(const WalkItem& item, Runs* region, u64 row, const Run& run, u64 limit,
               const char* what) {
        store(item.rank, kNames[item.queue], region, row, run, limit, what);
    }

    // Calls visit(offset, run) for the runs in rows [row, row + num_rows). All must be there, and
    // their flags among those awaited.
    template <class Visit>
    void load(u32 rank, const char* where, const Runs& region, u64 row, u64 num_rows,
              const std::vector<u64>& awaited, const Visit& visit) {
        u64 at = row;
        auto it = region.upper_bound(row);
        if (it != region.begin()) --it;
        for (; it != region.end() && at < row + num_rows && it->first <= at; ++it) {
            const Run& run = it->second;
            const u64 end = std::min(it->first + run.num_rows, row + num_rows);
            if (end <= at) continue;
            if (run.flag == kNoFlag ||
                std::find(awaited.begin(), awaited.end(), run.flag) == awaited.end())
                fault(rank, where, "reads rows without their flag");
            visit(at - row, Run{run.src, run.first + (at - it->first), end - at, run.flag});
            at = end;
        }
        if (at < row + num_rows) fault(rank, where, "reads rows that nothing wrote");
    }
    template <class Visit>
    void load(const WalkItem& item, const Runs& region, u64 row, u64 num_rows, const Visit& visit) {
        load(item.rank, kNames[item.queue], region, row, num_rows, waits_of(item), visit);
    }

    // Rows [row, row + num_rows) must be row `first` and on of rank `src`, with flags among those
    // awaited.
    void expect(u32 rank, const char* where, const Runs& region, u64 row, const Run& expected,
                const std::vector<u64>& awaited) {
        load(rank, where, region, row, expected.num_rows, awaited, [&](u64 offset, const Run& run) {
            if (run.src != expected.src || run.first != expected.first + offset)
                fault(rank, where,
                      "row " + std::to_string(row + offset) + " should be row " +
                          std::to_string(expected.first + offset) + " of rank " +
                          std::to_string(expected.src) + ", is row " + std::to_string(run.first) +
                          " of rank " + std::to_string(run.src));
        });
    }

    static u64 rows_in(const Runs& region) {
        u64 rows = 0;
        for (const auto& [row, run] : region) rows += run.num_rows;
        return rows;
    }

    // First row of this rank's input (of a dispatch: its pack list) for `dst`.
    u64 input_row(u32 src, u32 dst) const {
        u64 row = 0;
        for (u32 d = 0; d < dst; ++d) row += traffic_.at(src, d);
        return row;
    }

    // A put's chunk: from one rank's send staging to another's receive staging.
    void move_put(const WalkItem& item, const Runs& send, std::vector<Runs>* receive) {
        const u64 flag = signal_to(item, item.s.peer);
        load(item, send, item.s.source_row + item.begin, item.end - item.begin,
             [&](u64 offset, Run run) {
                 run.flag = flag;
                 store(item, &(*receive)[item.s.peer], item.s.target_row + item.begin + offset, run,
                       item.table.header->receive_rows, "receive staging");
             });
    }
};

// What a combine goes by: the rows that a dispatch brought to each rank, where they were staged;
// and the chunk of them that each land flag, and so each Arrival record, stood for.
struct Chunk {
    u32 proxy;
    u64 begin;  // staging rows of the proxy
    u64 end;
};
struct Dispatched {
    std::vector<Runs> staged;     // [R]
    std::map<u64, Chunk> chunks;  // by flag_key of the rank told
};
Dispatched follow_dispatch(const Plan& plan, const Tables& tables);

}  // namespace fastkern
