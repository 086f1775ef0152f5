// CUDA entry, transport `peer`: every rank's heap is mapped here.
#include "kernels/target/cuda.h"
//
#include "kernels/body/exchange.h"
#include "kernels/transport/mapped.h"

extern "C" __global__ void __launch_bounds__(512, 2)
    fastkern_exchange(const __grid_constant__ fastkern::LaunchArgs launch) {
    fastkern::run_launch<fastkern::AllToAll, fastkern::MappedTransport>(fastkern::CudaTarget(),
                                                                        launch);
}
