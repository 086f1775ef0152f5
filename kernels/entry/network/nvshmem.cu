// CUDA entries, transport `nvshmem`: mapped heaps inside a server, NVSHMEM between servers. In one
// file, since its headers take longer to compile than the kernels.
#include "kernels/target/cuda.h"
//
#include "kernels/body/exchange.h"
#include "kernels/transport/nvshmem.h"

using namespace fastkern;

extern "C" __global__ void __launch_bounds__(512, 1)
    fastkern_exchange(const __grid_constant__ LaunchArgs launch) {
    run_launch<AllToAll, NvshmemTransport>(CudaTarget(), launch);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    fastkern_dispatch(const __grid_constant__ LaunchArgs launch) {
    run_launch<Dispatch, NvshmemTransport>(CudaTarget(), launch);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    fastkern_combine(const __grid_constant__ LaunchArgs launch) {
    run_launch<Combine<float>, NvshmemTransport>(CudaTarget(), launch);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    fastkern_combine_float64(const __grid_constant__ LaunchArgs launch) {
    run_launch<Combine<double>, NvshmemTransport>(CudaTarget(), launch);
}
