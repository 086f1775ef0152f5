// CUDA entry of static exchanges: what precedes the dispatch, with a block for each rank, and the
// arguments of a kernel that is captured.
#include "kernels/target/cuda.h"
//
#include "kernels/body/static.h"
#include "kernels/transport/mapped.h"

using namespace fastkern;

extern "C" __global__ void __launch_bounds__(512, 2)
    fastkern_static_direct(const __grid_constant__ StaticLaunch launch) {
    prepare_dispatch<MappedTransport, true>(CudaTarget(), launch);
}

extern "C" __global__ void __launch_bounds__(512, 2)
    fastkern_static_enter(const __grid_constant__ StaticLaunch launch) {
    prepare_dispatch<MappedTransport, false>(CudaTarget(), launch);
}

extern "C" __global__ void __launch_bounds__(512, 2)
    fastkern_static_values(const __grid_constant__ StaticLaunch launch) {
    follow_dispatch(CudaTarget(), launch);
}
