// Values of expert outputs and sums: reading and rounding without the help of any target, so that
// every target rounds alike. Sums are float, or double for double values.
#pragma once

#include "planner/stage_table.h"

namespace fastkern {

enum ValueKind : u32 { kFloat64, kFloat32, kBFloat16, kFloat16, kNumValueKinds };

FASTKERN_HD inline u32 value_bytes(u32 kind) {
    return kind == kFloat64 ? 8 : kind == kFloat32 ? 4 : 2;
}

FASTKERN_HD inline float float_of_bits(u32 bits) {
    union {
        u32 bits;
        float value;
    } u = {bits};
    return u.value;
}

FASTKERN_HD inline u32 bits_of_float(float value) {
    union {
        float value;
        u32 bits;
    } u = {value};
    return u.bits;
}

using u16 = unsigned short;

FASTKERN_HD inline float float_of_bfloat16(u16 h) { return float_of_bits(u32{h} << 16); }

// To the nearest, ties to even; a NaN stays one.
FASTKERN_HD inline u16 bfloat16_of_float(float value) {
    const u32 bits = bits_of_float(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

FASTKERN_HD inline float float_of_float16(u16 h) {
    const u32 sign = (u32{h} & 0x8000u) << 16, exponent = (h >> 10) & 0x1fu, fraction = h & 0x3ffu;
    if (exponent == 0x1f) return float_of_bits(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0) {  // zero or subnormal: fraction * 2^-24, exact
        const float magnitude = static_cast<float>(fraction) * 5.9604644775390625e-8f;
        return float_of_bits(sign | bits_of_float(magnitude));
    }
    return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

FASTKERN_HD inline u16 float16_of_float(float value) {
    const u32 bits = bits_of_float(value), magnitude = bits & 0x7fffffffu;
    const u16 sign = static_cast<u16>((bits >> 16) & 0x8000u);
    if (magnitude > 0x7f800000u) return sign | 0x7e00;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00;  // 65520 and more round to infinity
    if (magnitude >= 0x38800000u) {                      // normal, from 2^-14
        const u32 rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1);
        return sign | static_cast<u16>((rounded - 0x38000000u) >> 13);
    }
    // Subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits of the sum.
    return sign | static_cast<u16>(bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u);
}

// Of a float in one of the types of 2 bytes.
FASTKERN_HD inline u16 half_of_float(float value, u32 kind) {
    return kind == kBFloat16 ? bfloat16_of_float(value) : float16_of_float(value);
}

FASTKERN_HD inline void load_value(const u8* p, u32 kind, float* out) {
    if (kind == kFloat32)
        *out = *reinterpret_cast<const float*>(p);
    else if (kind == kBFloat16)
        *out = float_of_bfloat16(*reinterpret_cast<const u16*>(p));
    else
        *out = float_of_float16(*reinterpret_cast<const u16*>(p));
}
FASTKERN_HD inline void load_value(const u8* p, u32, double* out) {
    *out = *reinterpret_cast<const double*>(p);
}

FASTKERN_HD inline void store_value(u8* p, u32 kind, float value) {
    if (kind == kFloat32)
        *reinterpret_cast<float*>(p) = value;
    else
        *reinterpret_cast<u16*>(p) = half_of_float(value, kind);
}
FASTKERN_HD inline void store_value(u8* p, u32, double value) {
    *reinterpret_cast<double*>(p) = value;
}

}  // namespace fastkern
