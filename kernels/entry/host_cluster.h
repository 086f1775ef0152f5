// All ranks of a call in one process, each a thread with its own blocks: the test bed for wide
// grids and for ThreadSanitizer. Calls follow each other without any barrier but the protocol's
// own.
#pragma once

#include <string>
#include <vector>

#include "kernels/entry/host_launch.h"

namespace fastkern {

struct ClusterCall {
    std::vector<const u8*> tables;  // [R]
    std::vector<const u8*> inputs;  // [R]
    std::vector<u8*> outputs;       // [R]
    std::vector<u32> delay_us;      // [R] sleep of each rank before it starts this call; or empty
};

// Runs the calls on every rank; `guard` bytes around each rank's data are checked afterwards.
// Returns an empty string, or what went wrong.
std::string run_cluster(const std::vector<ClusterCall>& calls, const LaunchOptions& options,
                        u64 progress_ns);

}  // namespace fastkern
