// Launching the persistent kernel on the host: blocks are groups of threads.
#pragma once

#include "kernels/body/args.h"

namespace fastkern {

enum class HostTransport : u32 { kShm, kShaped, kShuffled };

struct LaunchOptions {
    u32 num_blocks = 1;
    u32 num_lanes = 1;
    HostTransport transport = HostTransport::kShm;
    ShapedRates rates{};
    u64 seed = 0;        // shuffled
    bool teams = false;  // see target/host_team.h
};

// Runs one call of one rank and returns when it is over; args.num_blocks is taken from the options.
// Returns true when it ended well; false when it was aborted (see Control::record and
// Control::abort).
bool launch_on_host(KernelArgs args, const LaunchOptions& options);

}  // namespace fastkern
