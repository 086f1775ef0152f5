// HIP entry of route. A launch each: count, with a lane for each unit; scan, with one for each key;
// fill, with one for each unit, once the counts of all ranks are known.
#include "kernels/target/hip.h"
//
#include "kernels/body/route.h"

using namespace fastkern;

extern "C" __global__ void
    __attribute__((amdgpu_flat_work_group_size(64, 512), amdgpu_waves_per_eu(8)))
    fastkern_route_count(const RouteArgs args) {
    const u64 unit = route_index(HipTarget());
    if (unit < args.num_units) route_count(args, static_cast<u32>(unit));
}

extern "C" __global__ void
    __attribute__((amdgpu_flat_work_group_size(64, 512), amdgpu_waves_per_eu(8)))
    fastkern_route_scan(const RouteArgs args) {
    const u64 key = route_index(HipTarget());
    if (key < route_keys(args)) route_scan(args, key);
}

extern "C" __global__ void
    __attribute__((amdgpu_flat_work_group_size(64, 512), amdgpu_waves_per_eu(8)))
    fastkern_route_fill(const RouteArgs args) {
    const u64 unit = route_index(HipTarget());
    if (unit < args.num_units) route_fill(args, static_cast<u32>(unit));
}
