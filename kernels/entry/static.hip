// HIP entry of static exchanges: what precedes the dispatch, with a block for each rank, and the
// arguments of a kernel that is captured.
#include "kernels/target/hip.h"
//
#include "kernels/body/static.h"
#include "kernels/transport/mapped.h"

using namespace fastkern;

extern "C" __global__ void
    __attribute__((amdgpu_flat_work_group_size(64, 512), amdgpu_waves_per_eu(8)))
    fastkern_static_direct(const StaticLaunch launch) {
    prepare_dispatch<MappedTransport, true>(HipTarget(), launch);
}

extern "C" __global__ void
    __attribute__((amdgpu_flat_work_group_size(64, 512), amdgpu_waves_per_eu(8)))
    fastkern_static_enter(const StaticLaunch launch) {
    prepare_dispatch<MappedTransport, false>(HipTarget(), launch);
}

extern "C" __global__ void
    __attribute__((amdgpu_flat_work_group_size(64, 512), amdgpu_waves_per_eu(8)))
    fastkern_static_values(const StaticLaunch launch) {
    follow_dispatch(HipTarget(), launch);
}
