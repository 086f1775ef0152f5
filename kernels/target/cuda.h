// CUDA target: a block is a thread block, a lane one of its threads. For nvcc and NVRTC; no
// standard header is included. The operations are those listed in kernels/target/host.h.
//
// Pointers read from a table are generic to the compiler, so every access of shared memory between
// ranks names its space: PTX with `.global`. Data moves by plain (weak) loads and stores, never by
// ld.global.nc or __restrict__: the read-only path does not see what a peer wrote meanwhile.
#pragma once

#define FASTKERN_DEVICE __device__
#define FASTKERN_ROLLED _Pragma("unroll 1")

#include "kernels/target/block_copy.h"

namespace fastkern {

// One access each, in the global space. `volatile` and the memory clobber keep them after the
// acquire and before the release that guard them.
struct CudaMemory {
    static __device__ u64 global(const void* p) { return __cvta_generic_to_global(p); }

    static __device__ Vector16 load(const Vector16* p) {
        Vector16 v;
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(global(p))
                     : "memory");
        return v;
    }
    static __device__ u64 load(const u64* p) {
        u64 v;
        asm volatile("ld.global.u64 %0, [%1];" : "=l"(v) : "l"(global(p)) : "memory");
        return v;
    }
    static __device__ u32 load(const u32* p) {
        u32 v;
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(global(p)) : "memory");
        return v;
    }
    static __device__ u8 load(const u8* p) {
        u32 v;
        asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(global(p)) : "memory");
        return static_cast<u8>(v);
    }
    static __device__ void store(Vector16* p, const Vector16& v) {
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                     :
                     : "l"(global(p)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                     : "memory");
    }
    static __device__ void store(u64* p, u64 v) {
        asm volatile("st.global.u64 [%0], %1;" : : "l"(global(p)), "l"(v) : "memory");
    }
    static __device__ void store(u32* p, u32 v) {
        asm volatile("st.global.u32 [%0], %1;" : : "l"(global(p)), "r"(v) : "memory");
    }
    static __device__ void store(u8* p, u8 v) {
        asm volatile("st.global.u8 [%0], %1;" : : "l"(global(p)), "r"(u32{v}) : "memory");
    }
};

class CudaTarget {
  public:
    __device__ u32 lane() const { return threadIdx.x; }
    __device__ u32 num_lanes() const { return blockDim.x; }
    __device__ u32 block() const { return blockIdx.x; }

    __device__ void barrier() const { __syncthreads(); }

    // Lane 0's value on every lane. Two slots in turn, so that one barrier suffices: a slot is
    // written again only after the barrier of the other one, which all lanes reach once they have
    // read.
    template <class T>
    __device__ T broadcast(const T& value) const {
        static_assert(sizeof(T) <= kSlotBytes, "too large to broadcast");
        T* slot = reinterpret_cast<T*>(slots() + (turn_ ^= 1) * kSlotBytes);
        if (lane() == 0) *slot = value;
        barrier();
        return *slot;
    }

    // Nothing to do: in the PTX memory model the block barrier orders every lane's stores before
    // what follows in lane 0, and lane 0's release at system scope is cumulative: whoever acquires
    // the flag sees them all. The same holds the other way round for lane 0's acquire and the
    // barrier after it.
    __device__ void drain() const {}

    // All lanes copy a part each.
    __device__ void copy(u8* to, const u8* from, u64 bytes) const {
        copy_apart(lane(), num_lanes(), to, from, bytes);
    }

    // Waiting: spin, then sleep 32 ns, twice as long every 8 rounds, up to 1 us.
    __device__ void pause(u32 rounds) const {
        if (rounds < 8) return;
        const u32 doublings = rounds / 8 - 1;
        __nanosleep(32u << (doublings < 5 ? doublings : 5));
    }

    // globaltimer counts ns. It may advance in steps of 1 us, enough for deadlines.
    __device__ u64 now_ns() const {
        u64 ns;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns) : : "memory");
        return ns;
    }

    static constexpr u32 kValues = 1;  // values that a lane sums at a time: neighbouring lanes read
                                       // neighbouring values, and 512 lanes have registers enough
    // Rounded by itself: these are never fused with an addition.
    static __device__ float product(float a, float b) { return __fmul_rn(a, b); }
    static __device__ double product(double a, double b) { return __dmul_rn(a, b); }

    static __device__ u64 load_relaxed(const u64* p) {
        u64 v;
        asm volatile("ld.relaxed.sys.global.u64 %0, [%1];"
                     : "=l"(v)
                     : "l"(CudaMemory::global(p))
                     : "memory");
        return v;
    }
    static __device__ u64 load_acquire(const u64* p) {
        u64 v;
        asm volatile("ld.acquire.sys.global.u64 %0, [%1];"
                     : "=l"(v)
                     : "l"(CudaMemory::global(p))
                     : "memory");
        return v;
    }
    static __device__ void store_relaxed(u64* p, u64 v) {
        asm volatile("st.relaxed.sys.global.u64 [%0], %1;"
                     :
                     : "l"(CudaMemory::global(p)), "l"(v)
                     : "memory");
    }
    static __device__ void store_release(u64* p, u64 v) {
        asm volatile("st.release.sys.global.u64 [%0], %1;"
                     :
                     : "l"(CudaMemory::global(p)), "l"(v)
                     : "memory");
    }
    static __device__ u64 fetch_add(u64* p, u64 v) {
        u64 before;
        asm volatile("atom.acq_rel.sys.global.add.u64 %0, [%1], %2;"
                     : "=l"(before)
                     : "l"(CudaMemory::global(p)), "l"(v)
                     : "memory");
        return before;
    }
    static __device__ bool compare_and_swap(u64* p, u64 expected, u64 desired) {
        u64 before;
        asm volatile("atom.acq_rel.sys.global.cas.b64 %0, [%1], %2, %3;"
                     : "=l"(before)
                     : "l"(CudaMemory::global(p)), "l"(expected), "l"(desired)
                     : "memory");
        return before == expected;
    }

  private:
    static constexpr u32 kSlotBytes = 64;

    // Once in a kernel, not at every place that copies.
    static __device__ __noinline__ void copy_apart(u32 lane, u32 num_lanes, u8* to, const u8* from,
                                                   u64 bytes) {
        block_copy<CudaMemory>(lane, num_lanes, to, from, bytes);
    }

    static __device__ u8* slots() {
        __shared__ alignas(16) u8 slots[2 * kSlotBytes];
        return slots;
    }

    mutable u32 turn_ = 0;
};

}  // namespace fastkern
