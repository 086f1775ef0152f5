// The traffic matrix, checked, and the sums that everything else is computed from.
#pragma once

#include "planner/core/arena.h"
#include "planner/core/topology.h"

namespace fastkern {

// Rows from each rank to each rank, row-major [R][R], with its tile sums.
struct Traffic {
    u32 num_ranks = 0;
    u32 servers = 0;
    u32 gpus_per_server = 0;
    Vector<u64> rows;      // [R][R]
    Vector<u64> tiles;     // [N][N] rows of each server pair; the diagonal is zero
    u64 max_rail_out = 0;  // most rows a rank sends over scale-out after balancing
    u64 max_rail_in = 0;
    u64 max_output_rows = 0;
    bool balanced = true;  // false: rows stay on their owner's rail, for its same-index peer

    u64 at(u32 src, u32 dst) const { return rows[static_cast<std::size_t>(src) * num_ranks + dst]; }
    u64 tile(u32 a, u32 b) const { return tiles[static_cast<std::size_t>(a) * servers + b]; }

    // Rows that rail `rail` carries of tile a -> b: floor or ceil of W / M. The remainder starts at
    // rail (a + b) mod M, for if it always started at 0 that rail would be the heaviest everywhere.
    u64 rail_rows(u32 a, u32 b, u32 rail) const {
        const u64 w = tile(a, b);
        const u32 m = gpus_per_server;
        if (!balanced) return at(a * m + rail, b * m + rail);
        const u32 position = (rail + m - (a + b) % m) % m;
        return w / m + (position < w % m ? 1 : 0);
    }
    u64 longest_rail(u32 a, u32 b) const {
        if (balanced) return tile(a, b) / gpus_per_server + (tile(a, b) % gpus_per_server != 0);
        u64 most = 0;
        for (u32 l = 0; l < gpus_per_server; ++l) {
            const u64 rows = rail_rows(a, b, l);
            if (rows > most) most = rows;
        }
        return most;
    }
};

// Throws std::invalid_argument naming the entry, row or column when an entry is negative, a sum
// passes 2^63 - 1, or rows * row_bytes does.
Traffic make_traffic(const i64* matrix, const Topology& topology, u64 row_bytes);

// What dispatch moves, from tokens, each counted once: to_server [R][N] that each rank has for each
// server, to_rank [R][R] for each rank. Inside a server rows are to_rank's; between servers a
// rank's rows for a server stand at its same-index peer there, since they can cross on any rail.
Traffic make_token_traffic(const i64* to_server, const i64* to_rank, const Topology& topology,
                           u64 row_bytes);

}  // namespace fastkern
