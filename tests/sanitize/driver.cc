// Planner and host kernel without Python, for the sanitizers: random all-to-alls, dispatches and
// combines, all policies, several blocks and lanes, back-to-back calls, each checked against its
// definition; entries of static exchanges; and planners as host nodes.
//
// Usage: driver SECONDS SEED
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "tests/sanitize/all_to_all.h"
#include "tests/sanitize/entry.h"
#include "tests/sanitize/moe_ranks.h"
#include "tests/sanitize/planner_node.h"

using namespace fastkern;

namespace {

Topology random_topology(Random& random) {
    Topology t;
    t.servers = 1 + static_cast<u32>(random() % 4);
    t.gpus_per_server = 1 + static_cast<u32>(random() % 3);
    t.scale_up_cost = 2276;
    t.scale_out_cost = 20480;
    t.alpha_ps = random() % 2 ? 5'000'000 : 0;
    return t;
}

LaunchOptions random_options(Random& random) {
    LaunchOptions o;
    o.num_blocks = 1 + static_cast<u32>(random() % 3);
    o.num_lanes = 1 + static_cast<u32>(random() % 3);
    o.teams = random() % 3 == 0;
    if (o.teams) o.num_lanes = 4 * (1 + static_cast<u32>(random() % 2));
    o.transport = static_cast<HostTransport>(random() % 3);
    o.rates.ps_per_kib[kScaleUp] = 50'000;
    o.rates.ps_per_kib[kScaleOut] = 500'000;
    o.seed = random();
    return o;
}

}  // namespace

int main(int argc, char** argv) {
    const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
    Random random(argc > 2 ? static_cast<u64>(std::atoll(argv[2])) : 1);
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    int exchanges = 0, programs = 0, planners = 0, entries = 0;
    while (std::chrono::steady_clock::now() < end) {
        const Topology topology = random_topology(random);
        const LaunchOptions options = random_options(random);
        std::string error;
        if (random() % 6 == 0) {
            error = run_host_planner(random, topology);
            ++planners;
        } else if (random() % 6 == 0) {
            error = run_entries(random, topology, options);
            ++entries;
        } else if (random() % 3 == 0) {
            error = run_all_to_alls(random, topology, options);
            ++exchanges;
        } else {
            error = run_program(make_program(random, topology), options);
            ++programs;
        }
        if (error.empty()) continue;
        std::printf("cluster %d: %s\n", exchanges + programs + planners + entries, error.c_str());
        return 1;
    }
    std::printf(
        "%d clusters of all-to-alls, %d of dispatches and combines, %d that only entered, %d host "
        "planners, all right\n",
        exchanges, programs, entries, planners);
    return 0;
}
