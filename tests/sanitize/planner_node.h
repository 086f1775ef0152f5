// The planner as a host node, run on a thread of its own while another reads what it tells.
#pragma once

#include "tests/sanitize/moe_case.h"

namespace fastkern {

// Random counts, some past a limit, against plans and tables made on the heap. An empty string, or
// what went wrong.
std::string run_host_planner(Random& random, const Topology& topology);

}  // namespace fastkern
