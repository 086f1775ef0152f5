// Nothing but weighted sums, of float and of double: what of the combine must not be fused.
#include "kernels/target/cuda.h"
//
#include "tests/device_compile/weighted_sum.h"

using namespace fastkern;

#define FASTKERN_KERNEL(name, Sum)                                                     \
    extern "C" __global__ void name##s(const __grid_constant__ SumArgs args) {         \
        sum_row<CudaTarget, Sum>(args);                                                \
    }                                                                                  \
    extern "C" __global__ void name##_products(const __grid_constant__ SumArgs args) { \
        sum_products<CudaTarget, Sum>(args);                                           \
    }
FASTKERN_KERNEL(sum_float, float)
FASTKERN_KERNEL(sum_double, double)
