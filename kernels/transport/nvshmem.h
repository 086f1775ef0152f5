// NVSHMEM between servers. Written against 3.8; compiled with NVRTC or nvcc, linked with its
// libnvshmem_device.a.
//
// A symmetric address is the local address of the same object, with a PE. All that others put here
// lies in the symmetric heap.
//
// Memory order. put() is the fused put with signal: bytes and flag travel on one queue pair, flag
// last. (A separate signal after nvshmem_fence would do too, but the fence of a GPU-initiated
// transport waits for all puts to all PEs.) NVSHMEM orders reads of what was put only behind its
// own test or wait, which on some machines must flush what the NIC has written; so a flag that has
// reached its stamp is tested by nvshmem_uint64_test, and then acquired for the stores of mapped
// peers.
//
// quiet() waits, for there is no test for completion; only this rank's own puts are waited for,
// whose arrival other ranks' flags do not depend on. A rank that leaves because of an abort does
// not call it.
#pragma once

// What nvshmem.h includes for devices but the collectives, which take longest to compile.
#include <non_abi/device/pt-to-pt/nvshmemi_transfer_api.cuh>
//
#include "kernels/transport/network.h"

#ifdef __CUDACC_RTC__
// uint64_t is unsigned long to nvcc, which built the library, and unsigned long long to NVRTC. The
// one function that takes it by value is handed on under the library's name. To be declared before
// the headers below use it.
template <threadgroup_t kScope>
__device__ void nvshmemi_transfer_put_signal_dispatch(void* to, void* from, size_t bytes,
                                                      void* flag, unsigned long value,
                                                      nvshmemi_amo_t operation, int pe,
                                                      bool returns_early, nvshmemx_qp_handle_t qp);
template <>
__device__ inline void nvshmemi_transfer_put_signal_dispatch<NVSHMEMI_THREADGROUP_BLOCK>(
    void* to, void* from, size_t bytes, void* flag, unsigned long long value,
    nvshmemi_amo_t operation, int pe, bool returns_early, nvshmemx_qp_handle_t qp) {
    nvshmemi_transfer_put_signal_dispatch<NVSHMEMI_THREADGROUP_BLOCK>(
        to, from, bytes, flag, static_cast<unsigned long>(value), operation, pe, returns_early, qp);
}
#endif

#include <device/nvshmem_defines.h>
#include <device/nvshmemx_defines.h>

namespace fastkern {

template <class Target>
class NvshmemWire {
  public:
    FASTKERN_DEVICE NvshmemWire(const Target& target, const KernelArgs& args)
        : target_(target), args_(args) {}

    // NVSHMEM begins and ends it with a block barrier.
    FASTKERN_DEVICE void put(u64 to, u64 from, u64 bytes, u32 rank, u32 slot, u64 stamp) const {
        u8* const data = args_.data[args_.rank];
        nvshmemx_putmem_signal_nbi_block(data + to, data + from, bytes, word(flag(slot)), stamp,
                                         NVSHMEM_SIGNAL_SET, pe(rank));
    }
    FASTKERN_DEVICE void raise(u32 rank, u32 slot, u64 stamp) const {
        signal(flag(slot), stamp, NVSHMEM_SIGNAL_SET, pe(rank));
    }
    FASTKERN_DEVICE bool seen(u32 slot, u64 stamp) const {
        if (target_.load_relaxed(flag(slot)) < stamp) return false;
        return nvshmem_uint64_test(word(flag(slot)), NVSHMEM_CMP_GE, stamp) &&
               target_.load_acquire(flag(slot)) >= stamp;
    }
    FASTKERN_DEVICE void notify(u32 rank, u64 word) const {
        signal(&args_.controls[args_.rank]->notice, word, NVSHMEM_SIGNAL_SET, pe(rank));
    }
    FASTKERN_DEVICE void beat(u32 rank) const {
        signal(&args_.controls[args_.rank]->beats, 1, NVSHMEM_SIGNAL_ADD, pe(rank));
    }
    FASTKERN_DEVICE bool quiet() const {
        nvshmem_quiet();
        return true;
    }

  private:
    // Once in a kernel.
    static __device__ __noinline__ void signal(u64* p, u64 value, int operation, int pe) {
        nvshmemx_signal_op(word(p), value, operation, pe);
    }

    static FASTKERN_DEVICE uint64_t* word(u64* p) { return reinterpret_cast<uint64_t*>(p); }
    FASTKERN_DEVICE u64* flag(u32 slot) const { return &args_.flags[args_.rank][slot]; }
    FASTKERN_DEVICE int pe(u32 rank) const {
        return static_cast<int>(network_args(args_).peers[rank]);
    }

    const Target& target_;
    const KernelArgs& args_;
};

template <class Target>
using NvshmemTransport = NetworkTransport<Target, NvshmemWire>;

}  // namespace fastkern
