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
    static __device__ Vector16 load(const Vector16* p) {
        const Words v = *global(reinterpret_cast<const Words*>(p));
        return Vector16{v.x, v.y, v.z, v.w};
    }
    static __device__ void store(Vector16* p, const Vector16& v) {
        *global(reinterpret_cast<Words*>(p)) = Words{v.x, v.y, v.z, v.w};
    }
};

class HipTarget {
  public:
    __device__ u32 lane() const { return __builtin_amdgcn_workitem_id_x(); }
    __device__ u32 num_lanes() const { return __builtin_amdgcn_workgroup_size_x(); }
    __device__ u32 block() const { return __builtin_amdgcn_workgroup_id_x(); }

    // The fences order local memory and the compiler. They do not wait for stores to global memory:
    // see drain().
    __device__ void barrier() const {
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
        __builtin_amdgcn_s_barrier();
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    }

    // Lane 0's value on every lane. Two slots in turn, so that one barrier suffices: a slot is
    // written again only after the barrier of the other one, which all lanes reach once they have
    // read.
    template <class T>
    __device__ T broadcast(const T& value) const {
        static_assert(sizeof(T) <= kSlotBytes, "too large to broadcast");
        T* slot = reinterpret_cast<T*>(slots() + (turn_ ^= 1) * kSlotBytes);
        if (lane() == 0) {
            *slot = value;
            wait_for_memory();  // the acquires behind `value`: caches invalidated for all waves
        }
        barrier();
        return *slot;
    }

    // Each wave writes its own stores back to where other devices see them, and waits (vmcnt is a
    // counter of the wave). The barrier waits for none, and lane 0's release only for those of
    // lane 0's wave. After the barrier that follows, lane 0 may raise the flag.
    __device__ void drain() const { write_back(); }

    // All lanes copy a part each.
    __device__ void copy(u8* to, const u8* from, u64 bytes) const {
        copy_apart(lane(), num_lanes(), to, from, bytes);
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

    static constexpr u32 kValues = 1;  // values that a lane sums at a time: neighbouring lanes read
                                       // neighbouring values
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
    static __device__ bool compare_and_swap(u64* p, u64 expected, u64 desired) {
        write_back();
        return __hip_atomic_compare_exchange_strong(HipMemory::global(p), &expected, desired,
                                                    __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE, kSystem);
    }

  private:
    static constexpr int kSystem = __HIP_MEMORY_SCOPE_SYSTEM;
    static constexpr u64 kNsPerTick = 10;
    static constexpr u32 kSlotBytes = 64;

    // Once in a kernel, not at every place that copies.
    static __device__ __attribute__((noinline)) void copy_apart(u32 lane, u32 num_lanes, u8* to,
                                                                const u8* from, u64 bytes) {
        block_copy<HipMemory>(lane, num_lanes, to, from, bytes);
    }

    // Not a builtin: those may be optimised away.
    static __device__ void wait_for_memory() { asm volatile("s_waitcnt vmcnt(0)" : : : "memory"); }

    static __device__ void write_back() {
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");  // at system scope
        wait_for_memory();
    }

    static __device__ u8* slots() {
        __shared__ alignas(16) u8 slots[2 * kSlotBytes];
        return slots;
    }

    mutable u32 turn_ = 0;
};

}  // namespace fastkern
