// Matchings on small dense bipartite graphs, in integers.
#pragma once

#include <vector>

#include "planner/core/topology.h"

namespace fastkern {

// The assignment row -> column that maximises the sum of value[row * n + column] (Hungarian method
// by shortest augmenting paths, O(n^3)). Values are below 2^55; ties go to the smallest column.
void max_assignment(u32 n, const std::vector<i64>& value, std::vector<u32>* column_of);

// Is there a perfect matching on the pairs whose value is at least `threshold`? (augmenting paths)
bool has_perfect_matching(u32 n, const std::vector<u64>& value, u64 threshold);

}  // namespace fastkern
