// Matchings on small dense bipartite graphs, in integers.
#pragma once

#include "planner/core/arena.h"
#include "planner/core/topology.h"

namespace fastkern {

// Between one assignment or matching and the next.
struct MatchingScratch {
    Vector<i64> u, v, least;
    Vector<u32> row_of, from;
    Vector<u8> used;
};

// The assignment row -> column that maximises the sum of value[row * n + column] (Hungarian method
// by shortest augmenting paths, O(n^3)). Values are below 2^55; ties go to the smallest column.
void max_assignment(u32 n, const Vector<i64>& value, MatchingScratch* scratch,
                    Vector<u32>* column_of);

// Is there a perfect matching on the pairs whose value is at least `threshold`? (augmenting paths)
bool has_perfect_matching(u32 n, const Vector<u64>& value, u64 threshold, MatchingScratch* scratch);

}  // namespace fastkern
