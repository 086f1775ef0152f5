// Entries of static exchanges: counts of all ranks to all ranks, ranks as threads.
#pragma once

#include "kernels/entry/host_launch.h"
#include "tests/sanitize/moe_case.h"

namespace fastkern {

// Some entries, one after the other, with delays. An empty string, or what went wrong.
std::string run_entries(Random& random, const Topology& topology, const LaunchOptions& options);

}  // namespace fastkern
