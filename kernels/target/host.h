// Host target: a rank is a process (or a thread in tests), a block is a group of threads, a lane a
// thread.
//
// Every target supplies the same operations:
//   lane num_lanes block barrier drain copy
//   broadcast shared share keep kept forget constant global
//   team num_teams team_lane team_lanes team_copy team_rank team_pick team_read uniform
//   pause now_ns
//   load_relaxed load_acquire store_relaxed store_release fetch_add compare_and_swap
//   kValues kWide load16 load8 store16 store8 product
// A team is a group of neighbouring lanes that step together without a barrier (a warp, a wave;
// here one lane). Atomics are at system scope. Release and acquire sit on the flag operation
// itself, never in a fence (HIP spells them out: see hip.h).
#pragma once

#include <sched.h>
#include <time.h>

#include <cstring>

#include "kernels/target/words16.h"

#define FASTKERN_DEVICE
#define FASTKERN_ROLLED  // see block_copy.h

// A build with this defined has a fault on purpose: ThreadSanitizer must find it.
#ifdef FASTKERN_FAULT_RELAXED_RELEASE
#define FASTKERN_RELEASE __ATOMIC_RELAXED
#else
#define FASTKERN_RELEASE __ATOMIC_RELEASE
#endif

namespace fastkern {

// What the lanes of one block share.
struct HostBlock {
    u32 num_lanes = 1;
    u32 arrived = 0;
    u32 generation = 0;
    alignas(16) u8 slots[2][256];
    alignas(16) u8 state[8448];
};

class HostTarget {
  public:
    HostTarget(HostBlock* shared, u32 block, u32 lane)
        : shared_(shared), block_(block), lane_(lane) {}

    u32 lane() const { return lane_; }
    u32 num_lanes() const { return shared_->num_lanes; }
    u32 block() const { return block_; }

    void barrier() const {
        if (shared_->num_lanes == 1) return;
        const u32 generation = __atomic_load_n(&shared_->generation, __ATOMIC_ACQUIRE);
        if (__atomic_add_fetch(&shared_->arrived, 1, __ATOMIC_ACQ_REL) == shared_->num_lanes) {
            __atomic_store_n(&shared_->arrived, 0, __ATOMIC_RELAXED);
            __atomic_store_n(&shared_->generation, generation + 1, __ATOMIC_RELEASE);
            return;
        }
        u32 rounds = 0;
        while (__atomic_load_n(&shared_->generation, __ATOMIC_ACQUIRE) == generation)
            pause(rounds++);
    }

    // What fill(T&) makes, called on lane 0, for every lane. Two slots in turn, so that one barrier
    // suffices.
    template <class T, class Fill>
    T broadcast(const Fill& fill) const {
        static_assert(sizeof(T) <= sizeof(shared_->slots[0]), "too large to broadcast");
        T value;
        if (shared_->num_lanes == 1) {
            fill(value);
            return value;
        }
        u8* slot = shared_->slots[turn_ ^= 1];
        if (lane_ == 0) {
            fill(value);
            std::memcpy(slot, &value, sizeof(T));
        }
        barrier();
        std::memcpy(&value, slot, sizeof(T));
        return value;
    }

    // Memory that the block's lanes share, one piece of it, uninitialised.
    template <class T>
    T& shared() const {
        static_assert(sizeof(T) <= sizeof(shared_->state), "too large to share");
        return *reinterpret_cast<T*>(shared_->state);
    }

    // A record that nobody writes during the kernel, where reading it is fast.
    template <class T>
    const T& share(const T& given) const {
        return given;
    }
    // Values that are the same on all lanes, one of each type: kept by each lane, which is a
    // thread.
    template <class T>
    void keep(const T& value) const {
        kept_here<T>() = value;
    }
    template <class T, class Make>
    const T& kept(const Make&) const {
        return kept_here<T>();
    }
    // What was read through *p until here need not stay in registers.
    template <class T>
    static void forget(const T**) {}
    // The same address, known to be of memory that nobody writes during the kernel; of global
    // memory.
    template <class T>
    static const T* constant(const T* p) {
        return p;
    }
    template <class T>
    static T* global(T* p) {
        return p;
    }

    void drain() const {}  // the release of the flag covers what happened before the barrier

    // All lanes copy a part each.
    void copy(u8* to, const u8* from, u64 bytes) const {
        if (bytes == 0) return;  // the pointers may be null
        const u64 lanes = shared_->num_lanes;
        if (lanes == 1) {
            std::memcpy(to, from, bytes);
            return;
        }
        const u64 share = (bytes / lanes + 15) / 16 * 16;
        const u64 begin = share * lane_ < bytes ? share * lane_ : bytes;
        const u64 end = lane_ + 1 == lanes || begin + share > bytes ? bytes : begin + share;
        std::memcpy(to + begin, from + begin, end - begin);
    }

    u32 team() const { return lane_; }
    u32 num_teams() const { return shared_->num_lanes; }
    u32 team_lane() const { return 0; }
    u32 team_lanes() const { return 1; }
    // All lanes of a team copy a part each.
    void team_copy(u8* to, const u8* from, u32 bytes) const {
        if (bytes) std::memcpy(to, from, bytes);
    }
    // How many lanes of the team before this one have `mine` set; `total`: of all.
    u32 team_rank(bool mine, u32* total) const {
        *total = mine;
        return 0;
    }
    // The value of the team's first lane that has `mine` set; 0 without any.
    u32 team_pick(u32 value, bool mine) const { return mine ? value : 0; }
    // The value of one lane of the team, which all its lanes ask for.
    u32 team_read(u32 value, u32) const { return value; }
    // A value that is the same on all lanes of the team.
    static u32 uniform(u32 value) { return value; }
    static u64 uniform(u64 value) { return value; }

    // Waiting: spin, then yield, then sleep up to 50 us. Ranks outnumber cores here.
    void pause(u32 rounds) const {
        if (rounds < 16) {
            cpu_relax();
        } else if (rounds < 64) {
            sched_yield();
        } else {
            const long ns = rounds < 128 ? 10'000 : 50'000;
            const timespec t{0, ns};
            nanosleep(&t, nullptr);
        }
    }

    u64 now_ns() const { return clock_ns(); }

    template <class Sum>
    static constexpr u32 kValues = 256;  // values that a lane sums at a time

    // Are there accesses of 8 and 16 bytes that the compiler does not find itself? Here there are
    // not, and these are never called.
    static constexpr u32 kWide = 0;
    static Words16 load16(const u8*) { return {}; }
    static u64 load8(const u8*) { return 0; }
    static void store16(u8*, const Words16&) {}
    static void store8(u8*, u64) {}

    // Rounded by itself, never fused with an addition: see the compiler's options.
    static float product(float a, float b) { return a * b; }
    static double product(double a, double b) { return a * b; }

    static u64 clock_ns() {
        timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return static_cast<u64>(t.tv_sec) * 1'000'000'000ull + static_cast<u64>(t.tv_nsec);
    }

    static u64 load_relaxed(const u64* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
    static u64 load_acquire(const u64* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
    static void store_relaxed(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
    static void store_release(u64* p, u64 v) { __atomic_store_n(p, v, FASTKERN_RELEASE); }
    static u64 fetch_add(u64* p, u64 v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
    // Returns what the word held: `expected` where it has been swapped.
    static u64 compare_and_swap(u64* p, u64 expected, u64 desired) {
        __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE);
        return expected;
    }

  private:
    template <class T>
    static T& kept_here() {
        static thread_local T value;
        return value;
    }

    static void cpu_relax() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    HostBlock* shared_;
    u32 block_;
    u32 lane_;
    mutable u32 turn_ = 0;
};

}  // namespace fastkern
