// Lanes of Arm's dot products, signed (armv8.2-a+dotprod) and mixed (+i8mm): 16 outputs are four of 32 registers.
#pragma once
#include <arm_neon.h>
#include <cstring>
#include "formats.h"

namespace edgespec {
namespace {
// Activations to int8. The twins in lanes_portable.h say the same in plain C++. `count` is a multiple of 16.
uint32_t largest_bits(const float* x, int count) {
  uint32x4_t top[4] = {};
  for (int i = 0; i < count; i += 16)
    UNROLL for (int j = 0; j < 4; j++) top[j] = vmaxq_u32(top[j], vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(x + i + 4 * j))));
  return vmaxvq_u32(vmaxq_u32(vmaxq_u32(top[0], top[1]), vmaxq_u32(top[2], top[3])));
}
// to nearest, ties to even
INLINE int16x8_t codes4(const float* x, float inverse) {
  return vreinterpretq_s16_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x), inverse)));
}
INLINE int8x16_t codes8(const float* x, float inverse) {
  return vreinterpretq_s8_s16(vuzp1q_s16(codes4(x, inverse), codes4(x + 4, inverse)));
}
INLINE void codes32(const float* x, float inverse, int8_t* q, int* sums) {
  UNROLL for (int half = 0; half < 2; half++) {
    const int8x16_t codes = vuzp1q_s8(codes8(x + 16 * half, inverse), codes8(x + 16 * half + 8, inverse));
    vst1q_s8(q + 16 * half, codes);
    sums[half] = vaddlvq_s8(codes);
  }
}

struct Lanes {
  // Rows: their parts take 16 registers, the codes 4; sums of super-blocks wait in memory. Sums of attention: 24, and 5 for a factor and
  // what it multiplies.
  static constexpr int kRows = 4, kBestRows = 4, kPairs = 6, kSums = 6, kAhead = 4096;
  static constexpr bool kWideParts = true;
  static constexpr int capacity(int) { return 64; }
  struct Bytes { uint8x16_t at[4]; };
  struct Int { int32x4_t at[4]; };
  struct Pair { int16x8_t at[4]; };
  struct Float { float32x4_t at[4]; };
  using Part = Int;
  using Scale = Int;

  template <class Result, class F> OP Result four(F f) { return {f(0), f(1), f(2), f(3)}; }
#define EACH(Result, expression) four<Result>([&](int i) ALWAYS_INLINE { return expression; })
  OP int8x8_t four_bytes(const void* p) { uint32_t x; memcpy(&x, p, 4); return vcreate_s8(x); }
  OP int8x16_t as_signed(uint8x16_t x) { return vreinterpretq_s8_u8(x); }
  OP int32x4_t as_ints(int16x8_t x) { return vreinterpretq_s32_s16(x); }

  OP Bytes load(const uint8_t* p) { return EACH(Bytes, vld1q_u8(p + 16 * i)); }
  OP void store(uint8_t* p, Bytes x) { UNROLL for (int i = 0; i < 4; i++) vst1q_u8(p + 16 * i, x.at[i]); }
  template <int n> OP Bytes shift(Bytes x) {
    if constexpr (n < 0) return EACH(Bytes, vshrq_n_u8(x.at[i], -n));
    else if constexpr (n > 0) return EACH(Bytes, vshlq_n_u8(x.at[i], n));
    else return x;
  }
  template <int bits> OP Bytes mask(Bytes x) { return EACH(Bytes, vandq_u8(x.at[i], vdupq_n_u8(bits))); }
  template <int low, int high> OP Bytes join(Bytes x, Bytes y) {
    x = mask<low>(x); y = mask<high>(y);
    return EACH(Bytes, vorrq_u8(x.at[i], y.at[i]));
  }
#if defined(__ARM_FEATURE_MATMUL_INT8)
  static constexpr bool kSignedCodes = false;
  OP Bytes centre(Bytes x) { return x; }
  OP int32x4_t dot4(int32x4_t sum, uint8x16_t w, int8x8_t q) { return vusdotq_lane_s32(sum, w, q, 0); }
#else
  static constexpr bool kSignedCodes = true;
  OP Bytes centre(Bytes x) { return EACH(Bytes, veorq_u8(x.at[i], vdupq_n_u8(0x80))); }
  OP int32x4_t dot4(int32x4_t sum, uint8x16_t w, int8x8_t q) { return vdotq_lane_s32(sum, as_signed(w), q, 0); }
#endif
  OP Bytes look_up(Bytes x, const uint8_t* table) {
    const Bytes values = centre({vld1q_u8(table)});
    return EACH(Bytes, vqtbl1q_u8(values.at[0], x.at[i]));
  }

  OP Int zero() { return broadcast(0); }
  OP Int broadcast(int32_t x) { return EACH(Int, ((void)i, vdupq_n_s32(x))); }
  template <bool first, bool> OP Part dot(Part sum, Bytes w, const int8_t* q) {
    const int8x8_t x = four_bytes(q);
    if (first) sum = zero();
    return EACH(Part, dot4(sum.at[i], w.at[i], x));
  }
  template <bool> OP Int add_part(Int sum, Part p) { return EACH(Int, vaddq_s32(sum.at[i], p.at[i])); }
  template <bool> OP Int add_scaled(Int sum, Part p, Scale s) { return EACH(Int, vmlaq_s32(sum.at[i], p.at[i], s.at[i])); }
  OP Pair load_pair(const int8_t* p) { return EACH(Pair, vmovl_s8(vld1_s8(p + 8 * i))); }
  OP Scale first(Pair p) { return EACH(Scale, vshrq_n_s32(vshlq_n_s32(as_ints(p.at[i]), 16), 16)); }
  OP Scale second(Pair p) { return EACH(Scale, vshrq_n_s32(as_ints(p.at[i]), 16)); }
  OP Int add_pairs(Int sum, Pair p, const int16_t* q) {
    const Scale a = first(p), b = second(p);
    return EACH(Int, vmlaq_n_s32(vmlaq_n_s32(sum.at[i], a.at[i], q[0]), b.at[i], q[1]));
  }
  template <int n> OP Int subtract_shifted(Int x, Int y) { return EACH(Int, vsubq_s32(x.at[i], vshlq_n_s32(y.at[i], n))); }

  OP Float to_float(Int x) { return EACH(Float, vcvtq_f32_s32(x.at[i])); }
  OP Float broadcast(float x) { return EACH(Float, ((void)i, vdupq_n_f32(x))); }
  OP Float multiply(Float x, Float y) { return EACH(Float, vmulq_f32(x.at[i], y.at[i])); }
  OP Float fma(Float x, Float y, Float z) { return EACH(Float, vfmaq_f32(z.at[i], x.at[i], y.at[i])); }
  OP Float fnma(Float x, Float y, Float z) { return EACH(Float, vfmsq_f32(z.at[i], x.at[i], y.at[i])); }
  OP Float larger(Float x, Float y) { return EACH(Float, vbslq_f32(vcgtq_f32(x.at[i], y.at[i]), x.at[i], y.at[i])); }
  OP Float load_floats(const float* p) { return EACH(Float, vld1q_f32(p + 4 * i)); }
  OP void store_floats(float* p, Float x) { UNROLL for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, x.at[i]); }
  OP uint16x4_t load4(const uint8_t* p) { return vreinterpret_u16_u8(vld1_u8(p)); }
  OP Float load_halves(const uint8_t* p) { return EACH(Float, vcvt_f32_f16(vreinterpret_f16_u16(load4(p + 8 * i)))); }
  OP Float load_powers(const uint8_t* p) {
    const uint8x16_t bytes = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
    const uint32x4_t powers[4] = {vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low), vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)};
    return EACH(Float, vreinterpretq_f32_u32(vshlq_n_u32(powers[i], 23)));
  }
  OP Float load_codes(const uint8_t* p) {
    const int8x16_t codes = as_signed(vld1q_u8(p));
    const int16x8_t low = vmovl_s8(vget_low_s8(codes)), high = vmovl_high_s8(codes);
    return to_float({vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)});
  }
  OP Float broadcast_half(const uint8_t* p) {
    const float32x4_t x = vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits16_at(p))));
    return {x, x, x, x};
  }
  OP void store_halves(uint8_t* p, Float x) {
    UNROLL for (int i = 0; i < 4; i++) vst1_u8(p + 8 * i, vreinterpret_u8_f16(vcvt_f16_f32(x.at[i])));
  }
  template <Type type> OP Float load_weights(const uint8_t* p) {
    if constexpr (type == F16) return load_halves(p);
    else if constexpr (type == BF16) return EACH(Float, vreinterpretq_f32_u32(vshll_n_u16(load4(p + 8 * i), 16)));
    else return EACH(Float, vreinterpretq_f32_u8(vld1q_u8(p + 16 * i)));
  }
#undef EACH
};
}  // namespace
}  // namespace edgespec
