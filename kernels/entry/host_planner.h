// The planner as a host node of a graph: from the counts of all ranks, in pinned memory, to first
// rows and stage tables, in pinned memory. A host node calls no CUDA function, takes no lock of the
// interpreter, throws nothing, and asks the heap for nothing: plans lie in an arena.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/entry/host_counts.h"
#include "planner/core/plan.h"

namespace fastkern {

// All that is fixed when a dispatch is captured.
struct PlannerShape {
    RoutingShape routing;
    Topology topology;
    Options options;
    u64 row_bytes = 0;          // of the dispatch
    u64 combine_row_bytes = 0;  // of a combine's row between servers
    u64 partial_row_bytes = 0;  // of a rank's sum inside a server; 0: no combine follows
};

// Byte offsets in the block of a run's results. Tables start on multiples of 256, arrays on
// multiples of 16. A table fills its room from the start; what follows it is of earlier runs.
#define FASTKERN_PLANNER_LAYOUT_FIELDS(X)                          \
    X(slot_base)         /* u64 [E], see RouteArgs */              \
    X(window_base)       /* u64 [R] */                             \
    X(list_base)         /* u64 [R] */                             \
    X(return_base)       /* u64 [N] */                             \
    X(partial_base)      /* u64 [M] */                             \
    X(tokens_per_expert) /* i64 [own experts] */                   \
    X(dispatch_table)                                              \
    X(combine_table)                                               \
    X(dispatch_room) /* bytes, the most that the table can have */ \
    X(combine_room)  /* 0: no combine */                           \
    X(bytes)         /* of the block */

struct PlannerLayout {
#define FASTKERN_PLANNER_OFFSET(name) u64 name = 0;
    FASTKERN_PLANNER_LAYOUT_FIELDS(FASTKERN_PLANNER_OFFSET)
#undef FASTKERN_PLANNER_OFFSET
};

class HostPlanner {
  public:
    // Plans once for the most tokens, so that later runs find their memory. Throws
    // std::invalid_argument naming the field, or saying why tokens at capacity cannot be planned.
    explicit HostPlanner(PlannerShape shape);
    HostPlanner(const HostPlanner&) = delete;
    HostPlanner& operator=(const HostPlanner&) = delete;

    const PlannerLayout& layout() const { return layout_; }

    // counts: u64 [R][E + N + R], what route counts on each rank, then this rank's number of
    // tokens. out: layout().bytes. Both stay until the last run has ended. Throws
    // std::invalid_argument where an address is none or not aligned (counts 8, out 16).
    void bind(const u64* counts, u8* out);

    // The host node; `self` is a HostPlanner. Plans whole tiles. Where the counts cannot be or go
    // past a limit it keeps the first such reason and writes what follows from no tokens at all, so
    // that every rank's kernels end at once: all ranks decide alike, but for this rank's number of
    // tokens, which only it knows.
    static void run(void* self) noexcept;

    u64 num_runs() const { return num_runs_.load(std::memory_order_acquire); }
    // Blocks that plans have asked of the heap; those of a run are there before the first.
    std::size_t arena_blocks() const { return arena_blocks_.load(std::memory_order_relaxed); }
    std::string error() const;  // empty: none since clear_error
    void clear_error();

  private:
    struct Tables {
        Vector<u8> dispatch, combine;
    };

    void run_once() noexcept;
    bool plan_counts(RefusalText* why);
    Tables make_tables(const i64* to_server, const i64* to_rank, u64 num_tokens) const;
    void write_tables(const u8* dispatch, u64 dispatch_bytes, const u8* combine, u64 combine_bytes);
    void plan_nothing();
    void warm_up();
    void keep_error(const char* text) noexcept;

    const PlannerShape shape_;
    HostCounts counts_;
    const PlannerLayout layout_;
    std::vector<u8> nothing_dispatch_, nothing_combine_;  // this rank's tables of no tokens

    std::mutex running_;  // guards what follows
    Arena arena_;
    const u64* input_ = nullptr;
    u8* out_ = nullptr;

    std::atomic<u64> num_runs_{0};
    std::atomic<std::size_t> arena_blocks_{0};
    mutable std::mutex telling_;  // guards error_
    RefusalText error_;
};

}  // namespace fastkern
