// Balancing of one tile: which rail carries which rows.
#pragma once

#include "planner/core/arena.h"
#include "planner/core/traffic.h"

namespace fastkern {

// Rows of one (source, destination) pair on one rail: a contiguous run of that pair's rows.
struct Piece {
    u32 rail;
    u32 src_local;
    u32 dst_local;
    u64 stream_row;  // first row in the rail's stream of this tile
    u64 pair_row;    // first row among the rows from source to destination
    u64 num_rows;
};

// Pieces of a tile, ordered by rail and then by stream_row; rail l owns [rail_begin[l],
// rail_begin[l+1]).
struct TilePieces {
    Vector<Piece> pieces;
    Vector<u32> rail_begin;
};

// Between balancing one tile and the next.
struct BalanceScratch {
    Vector<u64> left, next_row, own, room;
    Vector<Piece> moved;
    Vector<u32> order;
};

// Every rail carries floor or ceil of W / M rows. A row stays on its owner's rail when there is
// room (no copy before the put), else it takes its destination's rail (no copy after it), else any
// rail with room. Own rows come first in each stream, so that the first put waits for no balancing.
//
// Example, M = 2, tile [[4, 4], [2, 2]] (sources send 8 and 4): each rail carries 6. Source 0 keeps
// 6 and gives 2 rows for destination 1 to rail 1, where they need no further copy at the other end.
void balance_tile(const Traffic& traffic, u32 a, u32 b, BalanceScratch* scratch, TilePieces* out);

}  // namespace fastkern
