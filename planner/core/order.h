// The order of puts between servers: a sequence of (sender, receiver, part of the tile) with plan
// times.
#pragma once

#include "planner/core/arena.h"
#include "planner/core/topology.h"

namespace fastkern {

// One put, done on every rail at once. Rows [row_begin, row_end) of the tile's W rows; rail l of
// the tile, with c_l rows, carries its rows [row_begin * c_l / W, row_end * c_l / W).
struct Put {
    u32 sender;
    u32 receiver;
    u64 row_begin;
    u64 row_end;
    u64 ticks_begin;
    u64 ticks_end;
};

// Server matrix [N][N] of rows with the cost of a put: `ticks(w)` is what w rows take, alpha
// included. Ticks stay below 2^56 whatever the rows, and w rows take at least as many ticks as they
// have chunks.
struct OrderProblem {
    u32 servers = 0;
    const u64* matrix = nullptr;
    u64 alpha_ticks = 0;
    u32 shift = 0;
    u64 least_ticks = 1;  // of any put, where shift is not zero

    u64 at(u32 a, u32 b) const { return matrix[static_cast<std::size_t>(a) * servers + b]; }
    u64 ticks(u64 w) const {
        const u64 t = w >> shift;
        return (t < least_ticks ? least_ticks : t) + alpha_ticks;
    }
};

OrderProblem make_order_problem(u32 servers, u32 gpus_per_server, const Vector<u64>& matrix,
                                u64 row_bytes, const Topology& topology, u32 chunk_slots);

// Whole tiles, each server pair once: repeatedly the assignment that maximises the sum of squared
// entries, heaviest rows and columns first; all matched tiles are put.
Vector<Put> order_by_assignment(const OrderProblem& problem);

// Whole tiles by list scheduling: whenever servers fall idle, start the pair with the largest
// max(rows left to send, rows left to receive), ties by size, then by index.
Vector<Put> order_by_list(const OrderProblem& problem);

// Split tiles (Birkhoff): stages whose widths sum to exactly L, the largest row or column sum.
// Throws std::invalid_argument when a pair would be cut into more than `most_parts` puts.
Vector<Put> order_split(const OrderProblem& problem, u32 most_parts);

// Sets the plan times: a put starts when both its sender and its receiver have ended their previous
// one. Sorts by start; returns the completion in ticks.
u64 replay(const OrderProblem& problem, Vector<Put>* puts);

}  // namespace fastkern
