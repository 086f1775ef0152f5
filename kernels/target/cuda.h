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

    static __device__ Words16 load(const Words16* p) {
        Words16 v;
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
    static __device__ void store(Words16* p, const Words16& v) {
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
    // Read anew each time: what follows from it is computed where it is needed, instead of staying
    // in registers during the whole kernel.
    __device__ u32 lane() const {
        u32 lane;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(lane));
        return lane;
    }
    __device__ u32 num_lanes() const { return blockDim.x; }
    __device__ u32 block() const { return blockIdx.x; }

    __device__ void barrier() const { __syncthreads(); }

    // What fill(T&) makes, called on lane 0, for every lane: in shared memory, until the broadcast
    // after the next. Two slots in turn, so that one barrier suffices: a slot is written again only
    // after the barrier of the other one, which all lanes reach once they have read.
    template <class T, class Fill>
    __device__ const T& broadcast(const Fill& fill) const {
        __shared__ T slots[2];
        T& slot = slots[turn_ ^= 1];
        if (lane() == 0) fill(slot);
        barrier();
        return slot;
    }

    // Memory that the block's lanes share, one piece for each T, uninitialised.
    template <class T>
    __device__ T& shared() const {
        __shared__ T state;
        return state;
    }

    // A record that nobody writes during the kernel, where reading it is fast: in shared memory.
    template <class T>
    __device__ const T& share(const T& given) const {
        static_assert(sizeof(T) % 4 == 0, "copied by words");
        __shared__ T record;
        const u32* const words = reinterpret_cast<const u32*>(constant(&given));
        for (u32 k = lane(); k < sizeof(T) / 4; k += num_lanes())
            reinterpret_cast<u32*>(&record)[k] = words[k];
        barrier();
        return record;
    }
    // Values that are the same on all lanes, one of each type: kept in shared memory, so that they
    // take no registers.
    template <class T>
    __device__ void keep(const T& value) const {
        barrier();
        if (lane() == 0) shared<T>() = value;
        barrier();
    }
    template <class T, class Make>
    __device__ const T& kept(const Make&) const {
        return shared<T>();
    }
    // What was read through *p until here does not stay in registers: nor does it otherwise, in
    // shared memory.
    template <class T>
    static __device__ void forget(const T**) {}
    // The same address, known to be of memory that nobody writes during the kernel; of global
    // memory.
    template <class T>
    static __device__ const T* constant(const T* p) {
        return global(p);
    }
    template <class T>
    static __device__ T* global(T* p) {
        __builtin_assume(__isGlobal(p));
        return p;
    }

    // Nothing to do: in the PTX memory model the block barrier orders every lane's stores before
    // what follows in lane 0, and lane 0's release at system scope is cumulative: whoever acquires
    // the flag sees them all. The same holds the other way round for lane 0's acquire and the
    // barrier after it.
    __device__ void drain() const {}

    // All lanes copy a part each.
    __device__ void copy(u8* to, const u8* from, u64 bytes) const {
        block_copy<CudaMemory, kWarp, 4>(team(), num_teams(), team_lane(), to, from, bytes);
    }

    // A team is a warp. Blocks are whole ones.
    __device__ u32 team() const { return lane() / kWarp; }
    __device__ u32 num_teams() const { return num_lanes() / kWarp; }
    __device__ u32 team_lane() const { return lane() % kWarp; }
    __device__ u32 team_lanes() const { return kWarp; }
    // All lanes of a team copy a part each.
    __device__ void team_copy(u8* to, const u8* from, u32 bytes) const {
        block_copy<CudaMemory, kWarp, 2>(0, 1, team_lane(), to, from, bytes);
    }
    // How many lanes of the team before this one have `mine` set; `total`: of all.
    __device__ u32 team_rank(bool mine, u32* total) const {
        const u32 mask = __ballot_sync(kAllLanes, mine);
        *total = __popc(mask);
        return __popc(mask & ((1u << team_lane()) - 1));
    }
    // The value of the team's first lane that has `mine` set; 0 without any.
    __device__ u32 team_pick(u32 value, bool mine) const {
        const u32 mask = __ballot_sync(kAllLanes, mine);
        const u32 found = __shfl_sync(kAllLanes, value, mask ? __ffs(mask) - 1 : 0);
        return mask ? found : 0;
    }
    // The value of one lane of the team, which all its lanes ask for.
    __device__ u32 team_read(u32 value, u32 lane) const {
        return __shfl_sync(kAllLanes, value, lane);
    }
    // A value that is the same on all lanes of the team.
    static __device__ u32 uniform(u32 value) { return value; }
    static __device__ u64 uniform(u64 value) { return value; }

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

    // Values that a lane sums at a time: 16 bytes of floats; doubles, which few need, one by one.
    template <class Sum>
    static constexpr u32 kValues = sizeof(Sum) == 4 ? 4 : 1;

    // One access of 8 or 16 bytes, at an address that is a multiple of it.
    static constexpr u32 kWide = 16;
    static __device__ Words16 load16(const u8* from) {
        return CudaMemory::load(reinterpret_cast<const Words16*>(from));
    }
    static __device__ u64 load8(const u8* from) {
        return CudaMemory::load(reinterpret_cast<const u64*>(from));
    }
    static __device__ void store16(u8* to, const Words16& words) {
        CudaMemory::store(reinterpret_cast<Words16*>(to), words);
    }
    static __device__ void store8(u8* to, u64 word) {
        CudaMemory::store(reinterpret_cast<u64*>(to), word);
    }

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
    static __device__ u64 compare_and_swap(u64* p, u64 expected, u64 desired) {
        u64 before;
        asm volatile("atom.acq_rel.sys.global.cas.b64 %0, [%1], %2, %3;"
                     : "=l"(before)
                     : "l"(CudaMemory::global(p)), "l"(expected), "l"(desired)
                     : "memory");
        return before;
    }

  private:
    static constexpr u32 kWarp = 32, kAllLanes = ~0u;

    mutable u32 turn_ = 0;
};

}  // namespace fastkern
