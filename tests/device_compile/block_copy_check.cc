// block_copy on the host, lane after lane: every byte of the target is written once, none beside
// it, and every access is aligned. Prints the accesses by width, for a caller that knows what is
// due.
#define FASTKERN_DEVICE
#define FASTKERN_ROLLED
#include "kernels/target/block_copy.h"
//
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

using namespace fastkern;

constexpr u64 kRoom = 4096;
alignas(64) u8 source[kRoom], target[kRoom];
u32 writes[kRoom];
u64 stores_by_width[17];

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
        return v;
    }
    template <class V>
    static void store(V* p, V v) {
        if (reinterpret_cast<u64>(p) % sizeof(V) != 0) fail("misaligned store");
        std::memcpy(p, &v, sizeof(V));
        const u64 first = static_cast<u64>(reinterpret_cast<u8*>(p) - target);
        for (u64 k = 0; k < sizeof(V); ++k) ++writes[first + k];
        ++stores_by_width[sizeof(V)];
    }
};

void check(u32 num_lanes, u64 to, u64 from, u64 bytes) {
    std::memset(target, 0, kRoom);
    std::memset(writes, 0, sizeof(writes));
    for (u32 lane = 0; lane < num_lanes; ++lane)
        block_copy<CheckedMemory>(lane, num_lanes, target + to, source + from, bytes);
    if (std::memcmp(target + to, source + from, bytes) != 0) fail("wrong bytes");
    for (u64 k = 0; k < kRoom; ++k)
        if (writes[k] != (k >= to && k < to + bytes ? 1u : 0u)) fail("not written once");
}

}  // namespace

int main() {
    for (u64 k = 0; k < kRoom; ++k) source[k] = static_cast<u8>(k * 131 + k / 256 + 1);
    const u32 lanes[] = {1, 3, 32, 64, 96};
    const u64 sizes[] = {0, 1, 7, 15, 16, 17, 31, 64, 100, 129, 1000, 2048, 3001};
    for (const u32 num_lanes : lanes)
        for (const u64 bytes : sizes)
            for (u64 to = 64; to < 80; ++to)
                for (u64 from = 128; from < 144; ++from) check(num_lanes, to, from, bytes);
    // Each width alone: the offsets between the two addresses are 0, 8, 4, 2 modulo 16.
    const u64 skews[] = {0, 8, 4, 2};
    for (const u64 skew : skews) {
        std::memset(stores_by_width, 0, sizeof(stores_by_width));
        check(32, 64, 128 + skew, 1600);
        std::printf("skew %llu: %llu %llu %llu %llu\n", skew, stores_by_width[16],
                    stores_by_width[8], stores_by_width[4], stores_by_width[1]);
    }
}
