// CUDA entry, transport `peer`: every rank's heap is mapped here. One kernel sums floats, the other
// doubles.
#include "kernels/target/cuda.h"
//
#include "kernels/body/exchange.h"
#include "kernels/transport/mapped.h"

extern "C" __global__ void __launch_bounds__(512, 2)
    fastkern_combine(const __grid_constant__ fastkern::LaunchArgs launch) {
    fastkern::run_launch<fastkern::Combine<float>, fastkern::MappedTransport>(
        fastkern::CudaTarget(), launch);
}

extern "C" __global__ void __launch_bounds__(512, 2)
    fastkern_combine_float64(const __grid_constant__ fastkern::LaunchArgs launch) {
    fastkern::run_launch<fastkern::Combine<double>, fastkern::MappedTransport>(
        fastkern::CudaTarget(), launch);
}
