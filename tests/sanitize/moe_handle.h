// From the counts of all ranks to one rank's handle, ready for route to fill.
#pragma once

#include "kernels/entry/host_route.h"
#include "tests/sanitize/moe_case.h"

namespace fastkern {

// Counts of all ranks, [R][E + N + R] as route has them.
using Counts = std::vector<std::vector<u64>>;

// By definition, without route.
Counts known_counts(const Routing& routing);

// First rows of a rank's tokens wherever they go, see RouteArgs.
RouteBases first_rows(const Routing& routing, const Counts& counts, u32 rank);

// A handle whose header is complete; nothing else is written.
std::vector<u64> empty_handle(const Routing& routing, const Plan& plan, const Counts& counts,
                              u32 rank);

}  // namespace fastkern
