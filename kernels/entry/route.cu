// CUDA entry of route. A launch each: count, with a lane for each unit; scan, with one for each
// key; fill, with one for each unit, once the counts of all ranks are known.
#include "kernels/target/cuda.h"
//
#include "kernels/body/route.h"

using namespace fastkern;

extern "C" __global__ void __launch_bounds__(512, 2)
    fastkern_route_count(const __grid_constant__ RouteArgs args) {
    const u64 unit = route_index(CudaTarget());
    if (unit < args.num_units) route_count(args, static_cast<u32>(unit));
}

extern "C" __global__ void __launch_bounds__(512, 2)
    fastkern_route_scan(const __grid_constant__ RouteArgs args) {
    const u64 key = route_index(CudaTarget());
    if (key < route_keys(args)) route_scan(args, key);
}

extern "C" __global__ void __launch_bounds__(512, 2)
    fastkern_route_fill(const __grid_constant__ RouteArgs args) {
    const u64 unit = route_index(CudaTarget());
    if (unit < args.num_units) route_fill(args, static_cast<u32>(unit));
}
