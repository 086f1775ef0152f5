// CUDA entries, transport `nccl_gin`: mapped heaps inside a server, NCCL's puts between servers. In
// one file, since its headers take longer to compile than the kernels.
#include "kernels/target/cuda.h"
//
#include "kernels/body/exchange.h"
#include "kernels/transport/nccl_gin.h"

using namespace fastkern;

extern "C" __global__ void __launch_bounds__(512, 1)
    fastkern_exchange(const __grid_constant__ LaunchArgs launch) {
    run_launch<AllToAll, GinTransport>(CudaTarget(), launch);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    fastkern_dispatch(const __grid_constant__ LaunchArgs launch) {
    run_launch<Dispatch, GinTransport>(CudaTarget(), launch);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    fastkern_combine(const __grid_constant__ LaunchArgs launch) {
    run_launch<Combine<float>, GinTransport>(CudaTarget(), launch);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    fastkern_combine_float64(const __grid_constant__ LaunchArgs launch) {
    run_launch<Combine<double>, GinTransport>(CudaTarget(), launch);
}
