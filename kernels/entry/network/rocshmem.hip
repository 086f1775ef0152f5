// HIP entries, transport `rocshmem`: mapped heaps inside a server, rocSHMEM between servers; flags
// and all that is written from outside during the call as fine-grained memory.
#include "kernels/target/hip.h"
//
#include "kernels/body/exchange.h"
#include "kernels/transport/rocshmem.h"

using namespace fastkern;

extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size(64, 512))) fastkern_exchange(
    const LaunchArgs launch) {
    run_launch<AllToAll, RocshmemTransport>(HipTarget(), launch);
}

extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size(64, 512))) fastkern_dispatch(
    const LaunchArgs launch) {
    run_launch<Dispatch, RocshmemTransport>(HipTarget(), launch);
}

extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size(64, 512))) fastkern_combine(
    const LaunchArgs launch) {
    run_launch<Combine<float>, RocshmemTransport>(HipTarget(), launch);
}

extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size(64, 512)))
fastkern_combine_float64(const LaunchArgs launch) {
    run_launch<Combine<double>, RocshmemTransport>(HipTarget(), launch);
}
