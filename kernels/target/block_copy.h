// Copying by all lanes of a block, or of one team, shared by the device targets. A target supplies
// `Memory`: static load(const V*) and store(V*, V) for V = u8, u32, u64, Words16, each one machine
// access; and FASTKERN_ROLLED, which keeps the loop after it from being unrolled: compilers would
// divide by the stride to find the number of rounds.
#pragma once

#include "kernels/target/words16.h"

namespace fastkern {

// Less than 16 bytes, by one team. (A loop would take registers; most teams have no use for it.)
template <class Memory, u32 kLanes>
FASTKERN_DEVICE void copy_few(u32 lane, u8* to, const u8* from, u32 bytes) {
    if constexpr (kLanes >= 16) {
        if (lane < bytes) Memory::store(to + lane, Memory::load(from + lane));
    } else {
        for (u32 k = lane; k < bytes; k += kLanes) Memory::store(to + k, Memory::load(from + k));
    }
}

// Teams of kLanes lanes take turns at tiles: kUnroll vectors of V for each lane, which are all read
// before the first is written; neighbouring lanes touch neighbouring memory. All teams share what
// is less than a tile. `to` and `from` are equal modulo sizeof(V); single bytes lead up to the
// first aligned vector and follow the last one. Addresses are those of the team plus the lane, and
// strides are constants: few registers.
//
// Example, V of 16 bytes, 32 lanes, 2 teams, 5,000 bytes to an address 8 past a multiple of 16:
// lanes 0 to 7 of team 0 copy 8 bytes; teams 0 and 1 copy a tile of 2,048 bytes each; of the 896
// left team 0 copies 512 and team 1 384.
template <class V, class Memory, u32 kLanes, u32 kUnroll, class Size>
FASTKERN_DEVICE void copy_vectors(u32 team, u32 num_teams, u32 lane, u8* to, const u8* from,
                                  Size bytes) {
    constexpr u32 kStride = kLanes * sizeof(V), kTile = kUnroll * kStride;
    if (sizeof(V) > 1) {
        u32 head = (0 - static_cast<u32>(reinterpret_cast<u64>(to))) % sizeof(V);
        if (head > bytes) head = static_cast<u32>(bytes);
        const u32 rest = static_cast<u32>(bytes - head) % sizeof(V);
        const Size tail = bytes - rest;
        if (team == 0) {
            copy_few<Memory, kLanes>(lane, to, from, head);
            copy_few<Memory, kLanes>(lane, to + tail, from + tail, rest);
        }
        to += head;
        from += head;
        bytes = tail - head;
    }
    const Size tiles = bytes / kTile * kTile;
    FASTKERN_ROLLED
    for (Size at = Size{team} * kTile; at < tiles; at += Size{num_teams} * kTile) {
        const V* const source = reinterpret_cast<const V*>(from + at);
        V* const target = reinterpret_cast<V*>(to + at);
        V values[kUnroll];
        for (u32 j = 0; j < kUnroll; ++j) values[j] = Memory::load(source + (j * kLanes + lane));
        for (u32 j = 0; j < kUnroll; ++j) Memory::store(target + (j * kLanes + lane), values[j]);
    }
    const u32 left = static_cast<u32>(bytes - tiles) / sizeof(V);
    FASTKERN_ROLLED
    for (u32 k = team * kLanes + lane; k < left; k += num_teams * kLanes)
        Memory::store(reinterpret_cast<V*>(to + tiles) + k,
                      Memory::load(reinterpret_cast<const V*>(from + tiles) + k));
}

// With the widest vectors that the two addresses allow. Every byte is written once, none outside.
// Size: u32 or u64.
template <class Memory, u32 kLanes, u32 kUnroll, class Size>
FASTKERN_DEVICE void block_copy(u32 team, u32 num_teams, u32 lane, u8* to, const u8* from,
                                Size bytes) {
    const u32 skew =
        static_cast<u32>(reinterpret_cast<u64>(to)) - static_cast<u32>(reinterpret_cast<u64>(from));
    if (skew % 16 == 0)
        copy_vectors<Words16, Memory, kLanes, kUnroll>(team, num_teams, lane, to, from, bytes);
    else if (skew % 8 == 0)
        copy_vectors<u64, Memory, kLanes, kUnroll>(team, num_teams, lane, to, from, bytes);
    else if (skew % 4 == 0)
        copy_vectors<u32, Memory, kLanes, kUnroll>(team, num_teams, lane, to, from, bytes);
    else
        copy_vectors<u8, Memory, kLanes, kUnroll>(team, num_teams, lane, to, from, bytes);
}

}  // namespace fastkern
