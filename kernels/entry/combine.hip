// HIP entry, transport `peer`: every rank's heap is mapped here, flags and all that a peer writes
// during the call as fine-grained memory.
#include "kernels/target/hip.h"
//
#include "kernels/body/exchange.h"
#include "kernels/transport/mapped.h"

extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size(1, 512))) fastkern_combine(
    const fastkern::KernelArgs args) {
    const fastkern::HipTarget target;
    const fastkern::MappedTransport<fastkern::HipTarget> transport(target, args);
    fastkern::exchange_block<fastkern::kCombine>(target, transport, args);
}
