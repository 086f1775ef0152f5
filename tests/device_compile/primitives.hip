// The operations of the HIP target, each in a kernel of its own.
#include "kernels/target/hip.h"
//
#include "tests/device_compile/primitives.h"

using namespace fastkern;

static_assert(HipTarget::kWide == 16 && HipTarget::kValues<float> == 4 &&
                  HipTarget::kValues<double> == 1,
              "16 bytes of floats");

#define FASTKERN_KERNEL(name)                                                        \
    extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size(64, 512))) \
    primitive_##name(const PrimitiveArgs args) {                                     \
        Primitives<HipTarget>{HipTarget(), args}.name();                             \
    }
#include "tests/device_compile/primitive_kernels.h"
