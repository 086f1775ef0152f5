// HIP target, for gfx9: a block is a workgroup, a lane one of its work-items. For clang and HIPRTC;
// neither the HIP headers nor the device libraries are needed. The operations are those listed in
// kernels/target/host.h.
//
// Pointers read from a table are generic to the compiler (flat_*), so every access of memory shared
// between ranks casts to the global address space. Atomics are at system scope.
//
// A release is spelled out: write back the L2 (buffer_wbl2, from the fence), wait for that, then a
// relaxed operation. Compilers before LLVM 23 drop the wait where they count no store in flight,
// because they overlook the write-back itself (llvm-project pull request 178316).
#pragma once

#ifndef __device__  // hipcc and HIPRTC bring these along
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#endif

#define FASTKERN_DEVICE __device__
#define FASTKERN_ROLLED _Pragma("unroll 1")
#define FASTKERN_GLOBAL __attribute__((address_space(1)))
#define FASTKERN_CONSTANT __attribute__((address_space(4)))

#include "kernels/target/block_copy.h"

namespace fastkern {

// One access each, in the global space.
struct HipMemory {
    // A vector type: a struct cannot be read through another address space.
    using Words = u32 __attribute__((ext_vector_type(4)));

    template <class T>
    static __device__ FASTKERN_GLOBAL T* global(T* p) {
        return (FASTKERN_GLOBAL T*)p;
    }
    template <class T>
    static __device__ T load(const T* p) {
        return *global(p);
    }
    template <class T>
    static __device__ void store(T* p, T v) {
        *global(p) = v;
    }
    static __device__ Words16 load(const Words16* p) {
        const Words v = *global(reinterpret_cast<const Words*>(p));
        return Words16{v.x, v.y, v.z, v.w};
    }
    static __device__ void store(Words16* p, const Words16& v) {
        *global(reinterpret_cast<Words*>(p)) = Words{v.x, v.y, v.z, v.w};
    }
};

class HipTarget {
  public:
    // Not known to be the same twice: what follows from it is computed where it is needed, instead
    // of staying in registers during the whole kernel.
    __device__ u32 lane() const {
        u32 lane = __builtin_amdgcn_workitem_id_x();
        asm volatile("" : "+v"(lane));
        return lane;
    }
    __device__ u32 num_lanes() const { return __builtin_amdgcn_workgroup_size_x(); }
    __device__ u32 block() const { return __builtin_amdgcn_workgroup_id_x(); }

    // The fences order local memory and the compiler. They do not wait for stores to global memory:
    // see drain().
    __device__ void barrier() const {
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
        __builtin_amdgcn_s_barrier();
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    }

    // What fill(T&) makes, called on lane 0, for every lane: in local memory, until the broadcast
    // after the next. Two slots in turn, so that one barrier suffices: a slot is written again only
    // after the barrier of the other one, which all lanes reach once they have read.
    template <class T, class Fill>
    __device__ const T& broadcast(const Fill& fill) const {
        __shared__ T slots[2];
        T& slot = slots[turn_ ^= 1];
        if (lane() == 0) {
            fill(slot);
            wait_for_memory();  // the acquires before it: caches invalidated for all waves
        }
        barrier();
        return slot;
    }

    // Memory that the block's lanes share, one piece for each T, uninitialised.
    template <class T>
    __device__ T& shared() const {
        __shared__ T state;
        return state;
    }

    // A record that nobody writes during the kernel, where reading it is fast: through the scalar
    // cache.
    template <class T>
    __device__ const T& share(const T& given) const {
        return *constant(&given);
    }
    // Values that are the same on all lanes: not kept, but made again where they are needed, by
    // scalar instructions.
    template <class T>
    __device__ void keep(const T&) const {}
    template <class T, class Make>
    __device__ T kept(const Make& make) const {
        return make();
    }
    // What was read through *p until here does not stay in registers: the compiler takes it for
    // another address.
    template <class T>
    static __device__ void forget(const T** p) {
        u64 bits = uniform(reinterpret_cast<u64>(*p));
        asm volatile("" : "+s"(bits));
        *p = (const T*)(const FASTKERN_CONSTANT T*)bits;
    }
    // (Through a number: a cast there and back would be dropped.)
    // The same address, known to be of memory that nobody writes during the kernel; of global
    // memory.
    template <class T>
    static __device__ const T* constant(const T* p) {
        return (const T*)(const FASTKERN_CONSTANT T*)reinterpret_cast<u64>(p);
    }
    template <class T>
    static __device__ T* global(T* p) {
        return (T*)(FASTKERN_GLOBAL T*)reinterpret_cast<u64>(p);
    }

    // Each wave writes its own stores back to where other devices see them, and waits (vmcnt is a
    // counter of the wave). The barrier waits for none, and lane 0's release only for those of
    // lane 0's wave. After the barrier that follows, lane 0 may raise the flag.
    __device__ void drain() const { write_back(); }

    // All lanes copy a part each.
    __device__ void copy(u8* to, const u8* from, u64 bytes) const {
        block_copy<HipMemory, kWave, 4>(team(), num_teams(), team_lane(), to, from, bytes);
    }

    // A team is a wave. Blocks are whole ones.
    __device__ u32 team() const { return uniform(lane() / kWave); }
    __device__ u32 num_teams() const { return num_lanes() / kWave; }
    __device__ u32 team_lane() const { return lane() % kWave; }
    __device__ u32 team_lanes() const { return kWave; }
    // All lanes of a team copy a part each.
    __device__ void team_copy(u8* to, const u8* from, u32 bytes) const {
        block_copy<HipMemory, kWave, 2>(0, 1, team_lane(), to, from, bytes);
    }
    // How many lanes of the team before this one have `mine` set; `total`: of all.
    __device__ u32 team_rank(bool mine, u32* total) const {
        const u64 mask = __builtin_amdgcn_ballot_w64(mine);
        *total = __builtin_popcountll(mask);
        return __builtin_popcountll(mask & ((u64{1} << team_lane()) - 1));
    }
    // The value of the team's first lane that has `mine` set; 0 without any.
    __device__ u32 team_pick(u32 value, bool mine) const {
        const u64 mask = __builtin_amdgcn_ballot_w64(mine);
        if (mask == 0) return 0;
        return __builtin_amdgcn_readlane(value, __builtin_ctzll(mask));
    }
    // The value of one lane of the team, which all its lanes ask for.
    __device__ u32 team_read(u32 value, u32 lane) const {
        return __builtin_amdgcn_readlane(value, lane);
    }
    // A value that is the same on all lanes of the team.
    static __device__ u32 uniform(u32 value) { return __builtin_amdgcn_readfirstlane(value); }
    static __device__ u64 uniform(u64 value) {
        return u64{uniform(static_cast<u32>(value >> 32))} << 32 | uniform(static_cast<u32>(value));
    }

    // Waiting: spin, then sleep for 64, 512 and 2048 cycles (about 1 us).
    __device__ void pause(u32 rounds) const {
        if (rounds < 8) return;
        if (rounds < 16)
            __builtin_amdgcn_s_sleep(1);
        else if (rounds < 32)
            __builtin_amdgcn_s_sleep(8);
        else
            __builtin_amdgcn_s_sleep(32);
    }

    // s_memrealtime. Assumed: 100 MHz, as on every gfx9 Instinct (hipDeviceAttributeWallClockRate
    // says 100000 kHz).
    __device__ u64 now_ns() const { return __builtin_readsteadycounter() * kNsPerTick; }

    // Values that a lane sums at a time: 16 bytes of floats; doubles, which few need, one by one.
    template <class Sum>
    static constexpr u32 kValues = sizeof(Sum) == 4 ? 4 : 1;

    // One access of 8 or 16 bytes, at an address that is a multiple of it.
    static constexpr u32 kWide = 16;
    static __device__ Words16 load16(const u8* from) {
        return HipMemory::load(reinterpret_cast<const Words16*>(from));
    }
    static __device__ u64 load8(const u8* from) {
        return HipMemory::load(reinterpret_cast<const u64*>(from));
    }
    static __device__ void store16(u8* to, const Words16& words) {
        HipMemory::store(reinterpret_cast<Words16*>(to), words);
    }
    static __device__ void store8(u8* to, u64 word) {
        HipMemory::store(reinterpret_cast<u64*>(to), word);
    }

    // Rounded by itself, never fused with an addition (where pragmas count: not with
    // -ffp-contract=fast).
    static __device__ float product(float a, float b) {
#pragma clang fp contract(off)
        return a * b;
    }
    static __device__ double product(double a, double b) {
#pragma clang fp contract(off)
        return a * b;
    }

    static __device__ u64 load_relaxed(const u64* p) {
        return __hip_atomic_load(HipMemory::global(p), __ATOMIC_RELAXED, kSystem);
    }
    static __device__ u64 load_acquire(const u64* p) {
        return __hip_atomic_load(HipMemory::global(p), __ATOMIC_ACQUIRE, kSystem);
    }
    static __device__ void store_relaxed(u64* p, u64 v) {
        __hip_atomic_store(HipMemory::global(p), v, __ATOMIC_RELAXED, kSystem);
    }
    static __device__ void store_release(u64* p, u64 v) {
        write_back();
        __hip_atomic_store(HipMemory::global(p), v, __ATOMIC_RELAXED, kSystem);
    }
    static __device__ u64 fetch_add(u64* p, u64 v) {
        write_back();
        return __hip_atomic_fetch_add(HipMemory::global(p), v, __ATOMIC_ACQUIRE, kSystem);
    }
    static __device__ u64 compare_and_swap(u64* p, u64 expected, u64 desired) {
        write_back();
        __hip_atomic_compare_exchange_strong(HipMemory::global(p), &expected, desired,
                                             __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE, kSystem);
        return expected;
    }

  private:
    static constexpr int kSystem = __HIP_MEMORY_SCOPE_SYSTEM;
    static constexpr u64 kNsPerTick = 10;
    static constexpr u32 kWave = 64;

    // Not a builtin: those may be optimised away.
    static __device__ void wait_for_memory() { asm volatile("s_waitcnt vmcnt(0)" : : : "memory"); }

    static __device__ void write_back() {
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");  // at system scope
        wait_for_memory();
    }

    mutable u32 turn_ = 0;
};

}  // namespace fastkern
