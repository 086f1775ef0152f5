// Copying by all lanes of a block, shared by the device targets. A target supplies `Memory`: static
// load(const V*) and store(V*, V) for V = u8, u32, u64, Vector16, each one machine access; and
// FASTKERN_ROLLED, which keeps the loop after it from being unrolled: compilers would divide by the
// stride to find the number of rounds.
#pragma once

#include "planner/stage_table.h"

namespace fastkern {

struct alignas(16) Vector16 {
    u32 x, y, z, w;
};

// Vectors of V, block-strided, so that neighbouring lanes touch neighbouring memory. `to` and
// `from` are equal modulo sizeof(V); single bytes lead up to the first aligned vector and follow
// the last one.
template <class V, class Memory>
FASTKERN_DEVICE void copy_vectors(u32 lane, u32 num_lanes, u8* to, const u8* from, u64 bytes) {
    constexpr u32 kUnroll = 4;  // loads in flight per lane
    u64 head = (0 - reinterpret_cast<u64>(to)) % sizeof(V);
    if (head > bytes) head = bytes;
    const u64 num_vectors = (bytes - head) / sizeof(V);
    const u64 tail = head + num_vectors * sizeof(V);
    FASTKERN_ROLLED
    for (u64 k = lane; k < head; k += num_lanes) Memory::store(to + k, Memory::load(from + k));

    V* const targets = reinterpret_cast<V*>(to + head);
    const V* const sources = reinterpret_cast<const V*>(from + head);
    const u64 stride = num_lanes;
    u64 k = lane;
    FASTKERN_ROLLED
    for (; k + (kUnroll - 1) * stride < num_vectors; k += kUnroll * stride) {
        V values[kUnroll];
        for (u32 j = 0; j < kUnroll; ++j) values[j] = Memory::load(sources + k + j * stride);
        for (u32 j = 0; j < kUnroll; ++j) Memory::store(targets + k + j * stride, values[j]);
    }
    FASTKERN_ROLLED
    for (; k < num_vectors; k += stride) Memory::store(targets + k, Memory::load(sources + k));

    FASTKERN_ROLLED
    for (u64 b = tail + lane; b < bytes; b += num_lanes)
        Memory::store(to + b, Memory::load(from + b));
}

// With the widest vectors that the two addresses allow. Every byte is written once, none outside.
template <class Memory>
FASTKERN_DEVICE void block_copy(u32 lane, u32 num_lanes, u8* to, const u8* from, u64 bytes) {
    const u64 skew = reinterpret_cast<u64>(to) - reinterpret_cast<u64>(from);
    if (skew % 16 == 0)
        copy_vectors<Vector16, Memory>(lane, num_lanes, to, from, bytes);
    else if (skew % 8 == 0)
        copy_vectors<u64, Memory>(lane, num_lanes, to, from, bytes);
    else if (skew % 4 == 0)
        copy_vectors<u32, Memory>(lane, num_lanes, to, from, bytes);
    else
        copy_vectors<u8, Memory>(lane, num_lanes, to, from, bytes);
}

}  // namespace fastkern
