// HIP entry, transport `peer`: every rank's heap is mapped here, flags and all that a peer writes
// during the call as fine-grained memory.
// 32 means 64 registers: the compiler doubles amdgpu_num_vgpr on gfx90a and later.
#include "kernels/target/hip.h"
//
#include "kernels/body/exchange.h"
#include "kernels/transport/mapped.h"

extern "C" __global__ void
    __attribute__((amdgpu_flat_work_group_size(64, 512), amdgpu_num_vgpr(32)))
    fastkern_dispatch(const fastkern::LaunchArgs launch) {
    fastkern::run_launch<fastkern::Dispatch, fastkern::MappedTransport>(fastkern::HipTarget(),
                                                                        launch);
}
