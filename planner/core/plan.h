// A plan: the checked traffic, the chosen order of puts, and what any rank's table is lowered from.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "planner/core/order.h"
#include "planner/core/traffic.h"

namespace fastkern {

enum class PolicyChoice : u32 { kWhole, kSplit, kDirect, kSpreadout, kAuto };

const char* policy_name(u32 policy);

// Rows that a rank moves inside its server, by balancing, redistribution and the local part.
struct ScaleUpLoad {
    u64 most_out = 0;   // of any rank
    u64 most_in = 0;    // of any rank
    u64 most_link = 0;  // of any ordered pair of ranks
};

struct Plan {
    Topology topology;
    Options options;
    Traffic traffic;
    u64 row_bytes = 0;
    u32 policy = kWhole;
    u64 hash = 0;
    Vector<Put> order;             // whole, split: puts between servers by start
    Vector<u64> stage_rows;        // direct, spreadout: [R] most rows of shift k over scale-out
    Vector<u64> to_rank;           // dispatch: [R][R] tokens of each rank that each rank gets
    std::vector<std::string> why;  // how the policy was chosen, a line each; see Options::explain

    bool moe() const { return !to_rank.empty(); }
    bool shifted() const { return !moe() && (policy == kDirect || policy == kSpreadout); }

    // Rows of put `p` on rail `rail`, and the first of them in the rail's stream of the tile.
    std::pair<u64, u64> rail_part(const Put& p, u32 rail) const {
        const u64 w = traffic.tile(p.sender, p.receiver);
        const u64 c = traffic.rail_rows(p.sender, p.receiver, rail);
        const u64 begin = mul_div(p.row_begin, c, w);
        return {begin, mul_div(p.row_end, c, w) - begin};
    }

    // Send and receive staging, the most rows that any rank needs (direct, spreadout of all-to-all:
    // more, see lower_shifted).
    std::pair<u64, u64> staging_rows() const;

    u64 bound_rows() const { return std::max(traffic.max_rail_out, traffic.max_rail_in); }
    u64 completion_rows() const;
    u32 max_puts_per_rank() const;
    std::vector<std::pair<u32, u64>> puts(u32 rank) const;  // (peer, rows) in order
    ScaleUpLoad scale_up_load()
        const;  // of the planned policies; direct and spreadout: local part only
};

// Throws std::invalid_argument when the input cannot be planned; see make_traffic and order_split.
Plan make_plan(const i64* matrix, const Topology& topology, u64 row_bytes, PolicyChoice choice,
               const Options& options);

// A plan for dispatch and for the combine that follows it; see make_token_traffic. Direct and
// spreadout leave every row on its owner's rail: all puts at once, or server after server.
Plan make_moe_plan(const i64* to_server, const i64* to_rank, const Topology& topology,
                   u64 row_bytes, PolicyChoice choice, const Options& options);

// This rank's stage table: of an all-to-all, or of a dispatch.
Vector<u8> lower(const Plan& plan, u32 rank);

// What a combine needs to know beside the plan of its dispatch.
struct CombineShape {
    u64 row_bytes;          // of a row between servers, and from proxies to owners
    u64 partial_row_bytes;  // of a rank's sum, inside a server
    u64 num_partials;       // the most partial rows that any proxy gave out in the dispatch
    u64 num_tokens;         // of this rank
};

// This rank's table of the combine: the dispatch's plan transposed. Chunks hold as many rows as in
// the dispatch, since a proxy's Arrival records go by them.
Vector<u8> lower_combine(const Plan& plan, u32 rank, const CombineShape& shape);

// Lowers every rank and checks: each row delivered once to the right place; one sender per receiver
// at a time; every wait has a producer; plan times strictly increase along every dependency; every
// range inside its buffer. Returns the faults found (empty: none), at most `most`.
std::vector<std::string> validate(const Plan& plan, std::size_t most = 16);

// The same on given tables, one per rank (any origin).
std::vector<std::string> validate_tables(const Plan& plan, const std::vector<Vector<u8>>& tables,
                                         std::size_t most = 16);

}  // namespace fastkern
