// block_copy on the host, team after team and lane after lane: every byte of the target is written
// once, none beside it, and every access is aligned. Prints the accesses by width, for a caller
// that knows what is due.
#define FASTKERN_DEVICE
#define FASTKERN_ROLLED
#include "kernels/target/block_copy.h"
//
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

using namespace fastkern;

constexpr u64 kRoom = 40960;
alignas(64) u8 source[kRoom], target[kRoom];
u32 writes[kRoom];
u64 loads_by_width[17], stores_by_width[17];

[[noreturn]] void fail(const char* what) {
    std::printf("FAULT: %s\n", what);
    std::exit(1);
}

struct CheckedMemory {
    template <class V>
    static V load(const V* p) {
        if (reinterpret_cast<u64>(p) % sizeof(V) != 0) fail("misaligned load");
        V v;
        std::memcpy(&v, p, sizeof(V));
        ++loads_by_width[sizeof(V)];
        return v;
    }
    template <class V>
    static void store(V* p, V v) {
        if (reinterpret_cast<u64>(p) % sizeof(V) != 0) fail("misaligned store");
        std::memcpy(p, &v, sizeof(V));
        const u64 first = static_cast<u64>(reinterpret_cast<u8*>(p) - target);
        if (first + sizeof(V) > kRoom) fail("not written once");
        for (u64 k = 0; k < sizeof(V); ++k) ++writes[first + k];
        ++stores_by_width[sizeof(V)];
    }
};

template <u32 kLanes, u32 kUnroll, class Size>
void copy(u32 num_teams, u64 to, u64 from, u64 bytes) {
    for (u32 team = 0; team < num_teams; ++team)
        for (u32 lane = 0; lane < kLanes; ++lane)
            block_copy<CheckedMemory, kLanes, kUnroll>(team, num_teams, lane, target + to,
                                                       source + from, static_cast<Size>(bytes));
}

// Around what is copied, too.
template <u32 kLanes, u32 kUnroll, class Size>
void check(u32 num_teams, u64 to, u64 from, u64 bytes) {
    const u64 span = to + bytes + 64;
    std::memset(target, 0, span);
    std::memset(writes, 0, span * sizeof(u32));
    copy<kLanes, kUnroll, Size>(num_teams, to, from, bytes);
    if (std::memcmp(target + to, source + from, bytes) != 0) fail("wrong bytes");
    for (u64 k = 0; k < span; ++k)
        if (writes[k] != (k >= to && k < to + bytes ? 1u : 0u)) fail("not written once");
}

template <u32 kLanes, u32 kUnroll, class Size>
void check_alignments(u32 num_teams, u64 bytes) {
    for (u64 to = 64; to < 80; ++to)
        for (u64 from = 128; from < 144; ++from)
            check<kLanes, kUnroll, Size>(num_teams, to, from, bytes);
}

// Every size to 40 bytes, some to 3001, and those around one and two tiles of each width.
template <u32 kLanes, u32 kUnroll, class Size>
void check_sizes() {
    const u64 sizes[] = {64, 100, 129, 1000, 2048, 3001};
    for (u32 num_teams = 1; num_teams <= 4; ++num_teams) {
        for (u64 bytes = 0; bytes <= 40; ++bytes)
            check_alignments<kLanes, kUnroll, Size>(num_teams, bytes);
        for (const u64 bytes : sizes) check_alignments<kLanes, kUnroll, Size>(num_teams, bytes);
        for (u64 width = 1; width <= 16; width *= 2)
            for (u64 tiles = 1; tiles <= num_teams + 1; ++tiles)
                for (u64 bytes = tiles * width * kLanes * kUnroll - 1, k = 0; k < 3; ++k)
                    for (u64 skew = 0; skew < 16; skew += width)
                        check<kLanes, kUnroll, Size>(num_teams, 71, 135 + skew, bytes + k);
    }
}

template <u32 kLanes, u32 kUnroll>
void check_all() {
    check_sizes<kLanes, kUnroll, u32>();
    check_sizes<kLanes, kUnroll, u64>();
}

}  // namespace

int main() {
    for (u64 k = 0; k < kRoom; ++k) source[k] = static_cast<u8>(k * 131 + k / 256 + 1);
    check_all<4, 2>();  // the host's teams
    check_all<4, 4>();
    check_all<32, 2>();
    check_all<32, 4>();
    check_all<64, 2>();
    check_all<64, 4>();
    // Each width alone: the offsets between the two addresses are 0, 8, 4, 2 modulo 16.
    const u64 skews[] = {0, 8, 4, 2};
    for (const u64 skew : skews) {
        std::memset(loads_by_width, 0, sizeof(loads_by_width));
        std::memset(stores_by_width, 0, sizeof(stores_by_width));
        copy<32, 4, u64>(2, 64, 128 + skew, 1600);
        if (std::memcmp(loads_by_width, stores_by_width, sizeof(loads_by_width)) != 0)
            fail("loads and stores differ");
        std::printf("skew %llu: %llu %llu %llu %llu\n", skew, stores_by_width[16],
                    stores_by_width[8], stores_by_width[4], stores_by_width[1]);
    }
}
