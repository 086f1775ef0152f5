// Random all-to-alls on ranks as threads, without Python.
#pragma once

#include <random>
#include <string>

#include "kernels/entry/host_launch.h"
#include "planner/core/plan.h"

namespace fastkern {

// Three calls back to back on every rank, checked against the definition of all-to-all. An empty
// string, or what went wrong.
std::string run_all_to_alls(std::mt19937_64& random, const Topology& topology,
                            const LaunchOptions& options);

}  // namespace fastkern
