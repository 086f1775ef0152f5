// The host target with teams of several lanes, for tests: team operations, copies and wide accesses
// go the way they go on devices, where nothing but a GPU could run them otherwise. Lanes are
// threads that meet at each team operation; all lanes of a team must come, as on devices.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "kernels/target/host.h"
//
#include "kernels/target/block_copy.h"

namespace fastkern {

// One access each, of an address that a device could access.
struct HostMemory {
    template <class V>
    static V load(const V* p) {
        check(p, sizeof(V));
        V value;
        std::memcpy(&value, p, sizeof(V));
        return value;
    }
    template <class V>
    static void store(V* p, const V& value) {
        check(p, sizeof(V));
        std::memcpy(p, &value, sizeof(V));
    }

  private:
    static void check(const void* p, u64 bytes) {
        if (reinterpret_cast<u64>(p) % bytes == 0) return;
        std::fprintf(stderr, "fastkern: an access of %llu bytes at %p\n", bytes, p);
        std::abort();
    }
};

// What the lanes of one team share.
struct HostTeam {
    u32 arrived = 0;
    u32 generation = 0;
    u64 values[2][4];
};

class HostTeamTarget : public HostTarget {
  public:
    static constexpr u32 kTeam = 4;
    static constexpr u32 kMostTeams = 16;  // of a block

    // teams: [kMostTeams], of the block.
    HostTeamTarget(const HostTarget& lane, HostTeam* teams)
        : HostTarget(lane), team_(teams + lane.lane() / kTeam) {}

    void copy(u8* to, const u8* from, u64 bytes) const {
        block_copy<HostMemory, kTeam, 4>(team(), num_teams(), team_lane(), to, from, bytes);
    }

    u32 team() const { return lane() / kTeam; }
    u32 num_teams() const { return num_lanes() / kTeam; }
    u32 team_lane() const { return lane() % kTeam; }
    u32 team_lanes() const { return kTeam; }
    void team_copy(u8* to, const u8* from, u32 bytes) const {
        block_copy<HostMemory, kTeam, 2>(0, 1, team_lane(), to, from, bytes);
    }
    u32 team_rank(bool mine, u32* total) const {
        const u64* const all = exchange(mine);
        u32 before = 0;
        *total = 0;
        for (u32 k = 0; k < kTeam; ++k) {
            if (k == team_lane()) before = *total;
            *total += static_cast<u32>(all[k]);
        }
        return before;
    }
    u32 team_pick(u32 value, bool mine) const {
        const u64* const all = exchange(u64{mine} << 32 | value);
        for (u32 k = 0; k < kTeam; ++k)
            if (all[k] >> 32) return static_cast<u32>(all[k]);
        return 0;
    }
    u32 team_read(u32 value, u32 lane) const { return static_cast<u32>(exchange(value)[lane]); }

    template <class Sum>
    static constexpr u32 kValues = sizeof(Sum) == 4 ? 4 : 1;

    static constexpr u32 kWide = 16;
    static Words16 load16(const u8* from) {
        return HostMemory::load(reinterpret_cast<const Words16*>(from));
    }
    static u64 load8(const u8* from) {
        return HostMemory::load(reinterpret_cast<const u64*>(from));
    }
    static void store16(u8* to, const Words16& words) {
        HostMemory::store(reinterpret_cast<Words16*>(to), words);
    }
    static void store8(u8* to, u64 word) { HostMemory::store(reinterpret_cast<u64*>(to), word); }

  private:
    // Every lane's value. Two sets in turn, so that one meeting suffices.
    const u64* exchange(u64 value) const {
        u64* const values = team_->values[turn_ ^= 1];
        __atomic_store_n(&values[team_lane()], value, __ATOMIC_RELAXED);
        const u32 generation = __atomic_load_n(&team_->generation, __ATOMIC_ACQUIRE);
        if (__atomic_add_fetch(&team_->arrived, 1, __ATOMIC_ACQ_REL) == kTeam) {
            __atomic_store_n(&team_->arrived, 0, __ATOMIC_RELAXED);
            __atomic_store_n(&team_->generation, generation + 1, __ATOMIC_RELEASE);
            return values;
        }
        u32 rounds = 0;
        while (__atomic_load_n(&team_->generation, __ATOMIC_ACQUIRE) == generation) pause(rounds++);
        return values;
    }

    HostTeam* team_;
    mutable u32 turn_ = 0;
};

}  // namespace fastkern
