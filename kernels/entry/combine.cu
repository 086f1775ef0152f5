// CUDA entry, transport `peer`: every rank's heap is mapped here.
#include "kernels/target/cuda.h"
//
#include "kernels/body/exchange.h"
#include "kernels/transport/mapped.h"

extern "C" __global__ void __launch_bounds__(512, 1)
    fastkern_combine(const __grid_constant__ fastkern::KernelArgs args) {
    const fastkern::CudaTarget target;
    const fastkern::MappedTransport<fastkern::CudaTarget> transport(target, args);
    fastkern::exchange_block<fastkern::kCombine>(target, transport, args);
}
