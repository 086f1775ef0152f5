// What a network is given beside KernelArgs, which reach it as `network`. A plain record, shared by
// the host and every device; what a network has no use for stays null.
//
// A rank's control words and flags lie in one allocation of the library's symmetric memory, its
// data in another, each with the same offsets on every rank: growth replaces the data. KernelArgs
// name those of the ranks of this server as mapped here, and null for all others.
#pragma once

#include "kernels/body/args.h"

namespace fastkern {

using NumbersOfRanks = const u32*;

#define FASTKERN_NETWORK_FIELDS(X)                                                                 \
    X(NumbersOfRanks, peers)    /* [R] what the library calls each rank: PE, or rank */            \
    X(InputBytes, heap)         /* nccl_gin: where the control words begin here */                 \
    X(InputBytes, comm)         /* nccl_gin: ncclDevComm, in device memory */                      \
    X(OutputBytes, window)      /* nccl_gin: ncclWindow_t of control words and flags */            \
    X(OutputBytes, data_window) /* nccl_gin: ncclWindow_t of the data */                           \
    X(Words, written)    /* nccl_gin: [R][2 + chunk_slots] what the flags of others were set to */ \
    X(Words, puts)       /* nccl_gin: [contexts] puts begun since the communicator was made */     \
    X(u64, num_contexts) /* nccl_gin: what ncclDevComm says, for kernels that cannot read it */
FASTKERN_RECORD(NetworkArgs, FASTKERN_NETWORK_FIELDS);
static_assert(sizeof(NetworkArgs) == 64, "layout");

}  // namespace fastkern
