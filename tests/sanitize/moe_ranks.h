// Dispatches and combines on ranks as threads, without Python: route, counts of all ranks, plan,
// handle, tables, kernel, each step by every rank for itself as the runtime does it.
#pragma once

#include "kernels/entry/host_launch.h"
#include "tests/sanitize/moe_case.h"

namespace fastkern {

// One call: a dispatch if it has a payload, else a combine.
struct MoeStep {
    u32 routing;      // index; the first step of each is a dispatch that makes its handles
    bool record;      // this one
    Payload payload;  // no parts: a combine
    Sums sums;
    std::vector<u32> delay_us;  // [R] sleep before the step

    bool dispatch() const { return !payload.part_bytes.empty(); }
};

struct MoeProgram {
    std::vector<Routing> routings;
    std::vector<MoeStep> steps;
    PolicyChoice policy;
    Options options;
    u32 num_units;   // of route
    bool exchanged;  // ranks learn counts by records, and so enter each call together; else they
                     // know all counts, and calls of different ranks overlap as the flags allow
};

MoeProgram make_program(Random& random, const Topology& topology);

// Runs it on every rank. An empty string, or what went wrong.
std::string run_program(const MoeProgram& program, const LaunchOptions& options);

}  // namespace fastkern
