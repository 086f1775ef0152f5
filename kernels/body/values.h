// The values of a row that one lane sums at a time, and the adding.
//
// Rows are of any type and may start anywhere. Example, 4 float sums a lane, a row of 6 bfloat16
// values at a multiple of 8 bytes: lane 0 reads values 0 to 3 at once in 8 bytes; then lanes 0 and
// 1 read values 4 and 5. A row that starts elsewhere is read value by value.
#pragma once

#include "kernels/body/number.h"

namespace fastkern {

template <class Sum>
struct SumKind;
template <>
struct SumKind<float> {
    static constexpr u32 kKind = kFloat32;
};
template <>
struct SumKind<double> {
    static constexpr u32 kKind = kFloat64;
};

// Four sums from and to 16 bytes of floats, or from and to 8 bytes of halves.
FASTKERN_DEVICE inline void unpack_sums(const Words16& words, float* sums) {
    sums[0] = float_of_bits(words.x);
    sums[1] = float_of_bits(words.y);
    sums[2] = float_of_bits(words.z);
    sums[3] = float_of_bits(words.w);
}
FASTKERN_DEVICE inline Words16 pack_sums(const float* sums) {
    return Words16{bits_of_float(sums[0]), bits_of_float(sums[1]), bits_of_float(sums[2]),
                   bits_of_float(sums[3])};
}
FASTKERN_DEVICE inline void unpack_halves(u64 halves, u32 kind, float* sums) {
    for (u32 j = 0; j < 4; ++j) {
        const u16 half = static_cast<u16>(halves >> (16 * j));
        sums[j] = kind == kBFloat16 ? float_of_bfloat16(half) : float_of_float16(half);
    }
}
FASTKERN_DEVICE inline u64 pack_halves(const float* sums, u32 kind) {
    u64 halves = 0;
    for (u32 j = 0; j < 4; ++j) halves |= u64{half_of_float(sums[j], kind)} << (16 * j);
    return halves;
}

// Loops have a constant number of rounds, so that devices keep the values in registers. More than
// one value is read or written by one access where the target has such: rows are aligned
// accordingly.
template <class Target, class Sum, u32 kCount>
struct Values {
    static constexpr bool kWide = Target::kWide != 0 && kCount > 1;
    static_assert(!kWide || kCount * sizeof(Sum) == 16, "four floats");

    Sum v[kCount];

    // kind: of the values there, for double sums float64.
    FASTKERN_DEVICE void load(const u8* from, u32 kind) {
        const u32 bytes = value_bytes(kind);
        if constexpr (kWide) {
            if (bytes == sizeof(Sum))
                unpack_sums(Target::load16(from), v);
            else
                unpack_halves(Target::load8(from), kind, v);
        } else {
            for (u32 j = 0; j < kCount; ++j) load_value(from + j * bytes, kind, v + j);
        }
    }
    FASTKERN_DEVICE void store(u8* to, u32 kind) const {
        const u32 bytes = value_bytes(kind);
        if constexpr (kWide) {
            if (bytes == sizeof(Sum))
                Target::store16(to, pack_sums(v));
            else
                Target::store8(to, pack_halves(v, kind));
        } else {
            for (u32 j = 0; j < kCount; ++j) store_value(to + j * bytes, kind, v[j]);
        }
    }
    // -0, which changes no term that it is added to: every sum starts with its first term.
    FASTKERN_DEVICE void clear() {
        for (u32 j = 0; j < kCount; ++j) v[j] = -Sum{0};
    }
    FASTKERN_DEVICE void add(const Values& terms) {
        for (u32 j = 0; j < kCount; ++j) v[j] = v[j] + terms.v[j];
    }
    FASTKERN_DEVICE void multiply(Sum factor) {
        for (u32 j = 0; j < kCount; ++j) v[j] = Target::product(v[j], factor);
    }
};

}  // namespace fastkern
