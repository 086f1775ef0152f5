// Static exchanges: dispatches whose counts do not pass through the host's code before the launch,
// so that they can be captured into a graph. One block per rank prepares each of them:
//   count, scan   as route does (planned: by kernels of their own, before)
//   enter         counts of this rank to all ranks, and of all ranks here: see enter.h
//   bind          direct: the rows of the tables' streams and first output rows, from the counts
//   fill          as route does (planned: by a kernel of its own, when the host has planned)
// The direct tables were lowered once for the most rows there can be, with a place for each of them
// in staging, windows and lists; only how many there are changes from call to call.
//
// A call in which a rank's topk_idx is bad, or a rank would get more rows than it has room for,
// moves nothing, on any rank: all see the same counts. `outcome` says why, for the host to find.
//
// Memory order. Lanes of the block read what others of it wrote after a barrier; the kernels that
// follow in the stream see all of it.
//
// Example, direct, 2 ranks of 1 server, at most 4 tokens each, 2 experts, one on each rank. Rank 0
// has 3 tokens for expert 0 and 1 for expert 1, rank 1 has 2 and 0. Rank 0's push stream to rank 1
// gets 1 row, the one to itself 3; its take stream from rank 1, whose rows lie from window row 4
// on, 2. First output row of rank 1's copies for expert 0: 0 + 3.
#pragma once

#include "kernels/body/enter.h"
#include "kernels/body/route.h"

namespace fastkern {

// What a call is given. A launch brings it by value, so that a captured call keeps its own.
#define FASTKERN_STATIC_VALUES_FIELDS(X)              \
    X(MoeArgs, moe) /* for the kernel that follows */ \
    X(RouteArgs, route)
FASTKERN_RECORD(StaticValues, FASTKERN_STATIC_VALUES_FIELDS);
static_assert(sizeof(StaticValues) == 528, "layout");

// What may be wrong with a call besides a bad index.
constexpr u64 kTooManyRows = ~u64{0};        // for the output of that rank; moves nothing
constexpr u64 kOtherDispatch = ~u64{0} - 1;  // a combine, or a backward, of one before the last

using ValuesOfCall = const StaticValues*;
using MoeArgsToWrite = MoeArgs*;
struct RowPatch {
    u32 word;   // of the tables: a number of rows
    u32 count;  // which: rank * keys + key, or R * keys for own tokens
};
static_assert(sizeof(RowPatch) == 8, "layout");
using RowPatches = const RowPatch*;

// What is the same in every call of one rank; in device memory.
#define FASTKERN_STATIC_ARGS_FIELDS(X)                                                         \
    X(ValuesOfCall, values) /* of a launch that brings none */                                 \
    X(MoeArgsToWrite, moe)  /* where the values of one that does go */                         \
    X(ArgsOfRanks, call)    /* KernelArgs of the dispatch that follows */                      \
    X(u64, records)         /* offset in data of the entry records, [2][R] */                  \
    X(u64, record_bytes)    /* a multiple of 16. u64: keys, then 0 or 1 + bad position */      \
    X(Words, entries)       /* calls entered */                                                \
    X(Words, outcome) /* [6] 1: this call moves nothing; how many have been wrong so far; of \
                               the last of those a rank, and where its bad index is, or a \
                               WrongCall; serial of the last dispatch; 0, or 1 + rows of results \
                               by its tables */ \
    X(Words, counts)  /* planned: [R][keys], then own tokens */                                \
    X(u64, entry_ns)  /* deadline */                                                           \
    X(ConstIndices, expert_order) /* direct: [E] experts by owner, then by index there */      \
    X(ConstWords, most_rows)      /* direct: [R] rows of the outputs */                        \
    X(Words, expert_rows)         /* direct: [E] of all ranks, padded */                       \
    X(Words, slot_base)           /* direct: [E] see RouteArgs */                              \
    X(Words, tokens_per_expert)   /* direct: [own experts] */                                  \
    X(Words, tables)              /* direct */                                                 \
    X(RowPatches, patches)        /* direct: [num_patches] */                                  \
    X(u64, alignment)                                                                          \
    X(u32, num_patches)                                                                        \
    X(u32, first_slot) /* entry flags: rails [N], local [R] */
FASTKERN_RECORD(StaticArgs, FASTKERN_STATIC_ARGS_FIELDS);
static_assert(sizeof(StaticArgs) == 144, "layout");

using StaticArgsOfRanks = const StaticArgs*;

#define FASTKERN_STATIC_LAUNCH_FIELDS(X)                                \
    X(StaticArgsOfRanks, ranks) /* [blocks] */                          \
    X(u64, brings_values)       /* 1: `values`, of the one rank here */ \
    X(StaticValues, values)
FASTKERN_RECORD(StaticLaunch, FASTKERN_STATIC_LAUNCH_FIELDS);
static_assert(sizeof(StaticLaunch) == 544, "layout");

template <class Target>
FASTKERN_DEVICE void copy_words(const Target& target, void* to, const void* from, u32 num_bytes) {
    FASTKERN_ROLLED
    for (u32 k = target.lane(); k < num_bytes / 4; k += target.num_lanes())
        static_cast<u32*>(to)[k] = static_cast<const u32*>(from)[k];
}

// The arguments of the kernel that follows, if the launch brings them.
template <class Target>
FASTKERN_DEVICE void hand_on_values(const Target& target, const StaticLaunch& launch) {
    if (launch.brings_values)
        copy_words(target, launch.ranks[target.block()].moe, &launch.values.moe, sizeof(MoeArgs));
}

// One lane, for the host to find.
template <class Target>
FASTKERN_DEVICE void note_wrong_call(const Target& target, const StaticArgs& fixed, u32 rank,
                                     u64 why) {
    u64* const words = fixed.outcome;
    target.store_relaxed(&words[1], target.load_relaxed(&words[1]) + 1);
    target.store_relaxed(&words[2], rank);
    target.store_relaxed(&words[3], why);
}

// Before a combine, or a call of a backward, which goes by the tables of the last dispatch. One
// that belongs to another dispatch moves its rows all the same, for the other ranks wait for them;
// it is noted, and writes no more rows of its result than there are.
template <class Target>
FASTKERN_DEVICE void follow_dispatch(const Target& target, const StaticLaunch& launch) {
    hand_on_values(target, launch);
    if (target.lane() != 0) return;
    const StaticArgs& fixed = launch.ranks[target.block()];
    const MoeArgs& moe = launch.values.moe;
    if (fixed.outcome[4] != moe.serial)
        note_wrong_call(target, fixed, fixed.call->rank, kOtherDispatch);
    const TableView table = view_table(fixed.call->table);
    if (table.queues[kReduce].num_items == 0) return;
    // The last queue has one stream, and that one segment.
    auto& reduce = const_cast<Stream&>(table.streams[table.header->num_streams - 1]);
    u64& known = fixed.outcome[5];
    const u64 rows = known ? known - 1 : reduce.num_rows;
    known = rows + 1;
    reduce.num_rows = rows < moe.result_rows ? rows : moe.result_rows;
    const_cast<Segment&>(table.segments[reduce.first_segment]).num_rows = reduce.num_rows;
}

// What the block's lanes share.
struct Preparing {
    RouteArgs route;
    EntryBoard board;
};

// One rank's block, before its dispatch.
template <class Call>
class Preparation {
  public:
    FASTKERN_DEVICE Preparation(const Call& call, const StaticArgs& fixed, Preparing* shared)
        : call_(call), fixed_(fixed), shared_(*shared), route_(shared->route) {}

    FASTKERN_DEVICE void count() const {
        const auto& target = call_.target;
        FASTKERN_ROLLED
        for (u32 unit = target.lane(); unit < route_.num_units; unit += target.num_lanes())
            route_count(route_, unit);
        target.barrier();
        FASTKERN_ROLLED
        for (u32 key = target.lane(); key < keys(); key += target.num_lanes())
            route_scan(route_, key);
        target.barrier();
    }

    // Returns false when the call is aborted.
    FASTKERN_DEVICE bool enter() const {
        const auto& target = call_.target;
        u64* const own = reinterpret_cast<u64*>(row_of(route_.rank));
        FASTKERN_ROLLED
        for (u32 key = target.lane(); key < keys(); key += target.num_lanes())
            own[key] = route_.totals[key];
        if (target.lane() == 0) {
            const u64 bad = route_.bad[route_.num_units];
            own[keys()] = bad == ~u64{0} ? 0 : 1 + bad;
            view_handle(route_.handle).header->num_partials = 0;
        }
        const bool entered = enter_call(call_, board(), fixed_.entry_ns);
        if (target.lane() == 0) *fixed_.entries = board().entry;
        FASTKERN_ROLLED
        for (u32 r = target.lane(); entered && r < route_.num_ranks; r += target.num_lanes())
            if (const u64 bad = counts_of(r)[keys()]) refuse(r, bad - 1);
        target.barrier();
        return entered;
    }

    // For the host's planner: the counts of all ranks, or none of a call that moves nothing.
    FASTKERN_DEVICE void report(bool entered) const {
        const auto& target = call_.target;
        const bool moves = entered && !refused();
        FASTKERN_ROLLED
        for (u32 r = 0; r < route_.num_ranks; ++r) FASTKERN_ROLLED
        for (u32 key = target.lane(); key < keys(); key += target.num_lanes())
            fixed_.counts[u64{r} * keys() + key] = moves ? counts_of(r)[key] : 0;
        if (target.lane() == 0)
            fixed_.counts[u64{route_.num_ranks} * keys()] = moves ? route_.num_tokens : 0;
    }

    FASTKERN_DEVICE void bind() const {
        const auto& target = call_.target;
        FASTKERN_ROLLED
        for (u32 e = target.lane(); e < route_.num_experts; e += target.num_lanes()) {
            u64 rows = 0, before = 0;  // choices of this expert, of all ranks and of earlier ones
            for (u32 r = 0; r < route_.num_ranks; ++r) {
                const u64 copies = counts_of(r)[e];
                rows += copies;
                if (r < route_.rank) before += copies;
            }
            fixed_.slot_base[e] = before;
            fixed_.expert_rows[e] =
                (rows + fixed_.alignment - 1) / fixed_.alignment * fixed_.alignment;
            if (route_.owner[e] == route_.rank)
                fixed_.tokens_per_expert[route_.local_index[e]] = rows;
        }
        target.barrier();
        FASTKERN_ROLLED
        for (u32 p = target.lane(); p < route_.num_experts; p += target.num_lanes()) {
            const u32 e = fixed_.expert_order[p];
            u64 first = 0;
            FASTKERN_ROLLED
            for (u32 k = 1; k <= route_.local_index[e]; ++k)
                first += fixed_.expert_rows[fixed_.expert_order[p - k]];
            fixed_.slot_base[e] += first;
            if (first + fixed_.expert_rows[e] > fixed_.most_rows[route_.owner[e]] &&
                route_.layout == kExpertLayout)
                refuse(route_.owner[e], kTooManyRows);
        }
        target.barrier();
        FASTKERN_ROLLED
        for (u32 e = target.lane(); refused() && e < route_.num_experts; e += target.num_lanes())
            if (route_.owner[e] == route_.rank) fixed_.tokens_per_expert[route_.local_index[e]] = 0;
        FASTKERN_ROLLED
        for (u32 k = target.lane(); k < fixed_.num_patches; k += target.num_lanes()) {
            const RowPatch patch = fixed_.patches[k];
            const u32 rank = patch.count / keys();
            fixed_.tables[patch.word] = refused() ? 0
                                        : rank == route_.num_ranks
                                            ? route_.num_tokens
                                            : counts_of(rank)[patch.count % keys()];
        }
    }

    FASTKERN_DEVICE void fill() const {
        const auto& target = call_.target;
        FASTKERN_ROLLED
        for (u32 unit = target.lane(); unit < route_.num_units; unit += target.num_lanes())
            route_fill(route_, unit);
    }

  private:
    const Call& call_;
    const StaticArgs& fixed_;
    Preparing& shared_;
    const RouteArgs& route_;

    FASTKERN_DEVICE const EntryBoard& board() const { return shared_.board; }
    FASTKERN_DEVICE u32 keys() const { return static_cast<u32>(route_keys(route_)); }
    FASTKERN_DEVICE u8* row_of(u32 rank) const {
        return Call::Target::global(call_.own_data() + board().row(rank));
    }
    FASTKERN_DEVICE const u64* counts_of(u32 rank) const {
        return reinterpret_cast<const u64*>(row_of(rank));
    }
    FASTKERN_DEVICE bool refused() const {
        return call_.target.load_relaxed(&fixed_.outcome[0]) != 0;
    }
    // Several lanes may: one reason is kept.
    FASTKERN_DEVICE void refuse(u32 rank, u64 why) const {
        if (call_.target.compare_and_swap(&fixed_.outcome[0], 0, 1) == 0)
            note_wrong_call(call_.target, fixed_, rank, why);
    }
};

// A block: of the rank with its number. Direct: all of it; else what precedes the host's planner.
template <template <class> class Transport, bool kDirect, class Target>
FASTKERN_DEVICE void prepare_dispatch(const Target& target, const StaticLaunch& launch) {
    const StaticArgs& fixed = launch.ranks[target.block()];
    hand_on_values(target, launch);
    Preparing& shared = target.template shared<Preparing>();
    if (launch.brings_values)
        copy_words(target, &shared.route, &launch.values.route, sizeof(RouteArgs));
    else
        copy_words(target, &shared.route, &fixed.values->route, sizeof(RouteArgs));
    const KernelArgs& args = target.share(*fixed.call);
    target.barrier();
    if (target.lane() == 0) {
        const RouteArgs& route = shared.route;
        shared.board =
            EntryBoard{fixed.records,   fixed.record_bytes, *fixed.entries + 1,   fixed.first_slot,
                       route.num_ranks, route.servers,      route.gpus_per_server};
        fixed.outcome[4] =
            launch.brings_values ? launch.values.moe.serial : fixed.values->moe.serial;
        fixed.outcome[5] = 0;
        fixed.outcome[0] = 0;
    }
    target.barrier();
    const Transport<Target> transport(target, args);
    const Call<Target, Transport<Target>> call{target, transport, &args};
    const Preparation<Call<Target, Transport<Target>>> preparation(call, fixed, &shared);
    if constexpr (kDirect) preparation.count();
    const bool entered = preparation.enter();
    if constexpr (!kDirect) return preparation.report(entered);
    if (!entered) return;
    preparation.bind();
    target.barrier();
    preparation.fill();
}

}  // namespace fastkern
