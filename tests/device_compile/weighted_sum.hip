// Nothing but weighted sums, of float and of double: what of the combine must not be fused.
#include "kernels/target/hip.h"
//
#include "tests/device_compile/weighted_sum.h"

using namespace fastkern;

#define FASTKERN_KERNEL(name, Sum)                                                            \
    extern "C" __global__ void name##s(const SumArgs args) { sum_row<HipTarget, Sum>(args); } \
    extern "C" __global__ void name##_products(const SumArgs args) {                          \
        sum_products<HipTarget, Sum>(args);                                                   \
    }
FASTKERN_KERNEL(sum_float, float)
FASTKERN_KERNEL(sum_double, double)
