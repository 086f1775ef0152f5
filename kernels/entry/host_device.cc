#include "kernels/entry/host_device.h"

#include <cstring>
#include <stdexcept>

#include "kernels/entry/host_threads.h"
//
#include "kernels/body/exchange.h"
#include "kernels/body/route.h"
#include "kernels/body/static.h"
#include "kernels/transport/mapped.h"
#include "kernels/transport/shared.h"

namespace fastkern {

namespace {

template <class Record>
Record read_record(const u8* arguments, u64 num_bytes) {
    if (num_bytes != sizeof(Record))
        throw std::invalid_argument("the kernel's argument has " + std::to_string(sizeof(Record)) +
                                    " bytes, not " + std::to_string(num_bytes));
    Record record;
    std::memcpy(&record, arguments, sizeof record);
    return record;
}

struct Grid {
    u32 num_blocks;
    u32 num_lanes;
    bool teams;
};

template <class Op>
void run_exchange(const LaunchArgs& launch, const Grid& grid) {
    if (u64{launch.num_ranks} * launch.blocks_per_rank != grid.num_blocks)
        throw std::invalid_argument("the grid is not blocks_per_rank blocks for each rank");
    run_blocks(grid.num_blocks, grid.num_lanes, grid.teams, [&](const auto& target) {
        if (launch.num_ranks && launch.ranks[0].network)
            run_launch<Op, SharedTransport>(target, launch);
        else
            run_launch<Op, MappedTransport>(target, launch);
    });
}

template <class Pass>
void run_route(u64 num_items, const Grid& grid, const Pass& pass) {
    if (u64{grid.num_blocks} * grid.num_lanes < num_items)
        throw std::invalid_argument("fewer lanes than units or keys");
    for (u64 k = 0; k < num_items; ++k) pass(k);
}

template <class Body>
void run_static(const u8* arguments, u64 num_bytes, const Grid& grid, const Body& body) {
    const auto launch = read_record<StaticLaunch>(arguments, num_bytes);
    if (launch.brings_values && grid.num_blocks != 1)
        throw std::invalid_argument("values are of one rank, blocks of several");
    run_blocks(grid.num_blocks, grid.num_lanes, grid.teams,
               [&](const auto& target) { body(target, launch); });
}

struct Kernel {
    const char* name;
    void (*run)(const u8* arguments, u64 num_bytes, const Grid& grid);
};

template <class Op>
void launch_exchange(const u8* arguments, u64 num_bytes, const Grid& grid) {
    run_exchange<Op>(read_record<LaunchArgs>(arguments, num_bytes), grid);
}

const Kernel kKernels[] = {
    {"fastkern_exchange", launch_exchange<AllToAll>},
    {"fastkern_dispatch", launch_exchange<Dispatch>},
    {"fastkern_combine", launch_exchange<Combine<float>>},
    {"fastkern_combine_float64", launch_exchange<Combine<double>>},
    {"fastkern_route_count",
     [](const u8* arguments, u64 num_bytes, const Grid& grid) {
         const auto args = read_record<RouteArgs>(arguments, num_bytes);
         run_route(args.num_units, grid,
                   [&](u64 unit) { route_count(args, static_cast<u32>(unit)); });
     }},
    {"fastkern_route_scan",
     [](const u8* arguments, u64 num_bytes, const Grid& grid) {
         const auto args = read_record<RouteArgs>(arguments, num_bytes);
         run_route(route_keys(args), grid, [&](u64 key) { route_scan(args, key); });
     }},
    {"fastkern_route_fill",
     [](const u8* arguments, u64 num_bytes, const Grid& grid) {
         const auto args = read_record<RouteArgs>(arguments, num_bytes);
         run_route(args.num_units, grid,
                   [&](u64 unit) { route_fill(args, static_cast<u32>(unit)); });
     }},
    {"fastkern_static_direct",
     [](const u8* arguments, u64 num_bytes, const Grid& grid) {
         run_static(arguments, num_bytes, grid, [](const auto& target, const StaticLaunch& launch) {
             prepare_dispatch<MappedTransport, true>(target, launch);
         });
     }},
    {"fastkern_static_enter",
     [](const u8* arguments, u64 num_bytes, const Grid& grid) {
         run_static(arguments, num_bytes, grid, [](const auto& target, const StaticLaunch& launch) {
             prepare_dispatch<MappedTransport, false>(target, launch);
         });
     }},
    {"fastkern_static_values",
     [](const u8* arguments, u64 num_bytes, const Grid& grid) {
         run_static(arguments, num_bytes, grid, [](const auto& target, const StaticLaunch& launch) {
             follow_dispatch(target, launch);
         });
     }},
};

}  // namespace

std::vector<std::string> device_kernel_names() {
    std::vector<std::string> names;
    for (const Kernel& kernel : kKernels) names.emplace_back(kernel.name);
    return names;
}

u32 lanes_of_team() { return HostTeamTarget::kTeam; }

void launch_device_kernel(const std::string& name, u32 grid, u32 num_lanes, bool teams,
                          const u8* arguments, u64 num_bytes) {
    for (const Kernel& kernel : kKernels)
        if (name == kernel.name)
            return kernel.run(arguments, num_bytes, Grid{grid, num_lanes, teams});
    throw std::invalid_argument("no kernel is called " + name);
}

}  // namespace fastkern
