// The operations of the CUDA target, each in a kernel of its own.
#include "kernels/target/cuda.h"
//
#include "tests/device_compile/primitives.h"

using namespace fastkern;

static_assert(CudaTarget::kWide == 16 && CudaTarget::kValues<float> == 4 &&
                  CudaTarget::kValues<double> == 1,
              "16 bytes of floats");

#define FASTKERN_KERNEL(name)                                          \
    extern "C" __global__ void __launch_bounds__(512)                  \
        primitive_##name(const __grid_constant__ PrimitiveArgs args) { \
        Primitives<CudaTarget>{CudaTarget(), args}.name();             \
    }
#include "tests/device_compile/primitive_kernels.h"
