// Plain C++ for any processor: slow, and the same bits.
#pragma once
#include <cmath>
#include <cstring>
#include "formats.h"

namespace edgespec {
namespace {
// Magnitudes are compared as integers: their order does not matter, and a NaN is the largest.
uint32_t largest_bits(const float* x, int count) {
  uint32_t top = 0;
  for (int i = 0; i < count; i++) { uint32_t bits; memcpy(&bits, x + i, 4); bits &= 0x7fffffff; top = bits > top ? bits : top; }
  return top;
}
// Codes of 32 inputs, and the sums of both halves. Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
void codes32(const float* x, float inverse, int8_t* q, int* sums) {
  sums[0] = sums[1] = 0;
  for (int i = 0; i < 32; i++) {
    const float shifted = x[i] * inverse + 12582912.f;
    int32_t code;
    memcpy(&code, &shifted, 4);
    q[i] = int8_t(code - 0x4b400000);
    sums[i / 16] += q[i];
  }
}
struct Lanes {
  static constexpr int kRows = 1, kBestRows = 1, kPairs = 1, kSums = 1, kAhead = 4096;
  static constexpr bool kWideParts = true, kSignedCodes = false;
  static constexpr int capacity(int) { return 64; }
  struct Bytes { uint8_t at[64]; };
  struct Int { int32_t at[16]; };
  struct Pair { int16_t at[32]; };
  struct Float { float at[16]; };
  using Part = Int;
  using Scale = Int;

  template <class F> static void each(F f) { _Pragma("GCC unroll 1") for (int i = 0; i < kOutputs; i++) f(i); }
  template <class F> static Int ints(F f) { Int x; each([&](int i) { x.at[i] = f(i); }); return x; }
  template <class F> static Float floats(F f) { Float x; each([&](int i) { x.at[i] = f(i); }); return x; }
  template <class F>
  static Bytes bytes(F f) {
    Bytes x;
    _Pragma("GCC unroll 1") for (int i = 0; i < 64; i++) x.at[i] = uint8_t(f(i));
    return x;
  }

  static Bytes load(const uint8_t* p) { Bytes x; memcpy(x.at, p, 64); return x; }
  static void store(uint8_t* p, const Bytes& x) { memcpy(p, x.at, 64); }
  template <int n>
  static Bytes shift(const Bytes& x) {
    return bytes([&](int i) { return n < 0 ? x.at[i] >> (n < 0 ? -n : 0) : x.at[i] << (n > 0 ? n : 0); });
  }
  template <int bits> static Bytes mask(const Bytes& x) { return bytes([&](int i) { return x.at[i] & bits; }); }
  template <int low, int high>
  static Bytes join(const Bytes& x, const Bytes& y) {
    return bytes([&](int i) { return (x.at[i] & low) | (y.at[i] & high); });
  }
  static Bytes look_up(const Bytes& x, const uint8_t* table) { return bytes([&](int i) { return table[x.at[i] & 15]; }); }

  static Bytes centre(const Bytes& x) { return x; }
  static Int zero() { return {}; }
  static Int broadcast(int32_t x) { return ints([&](int) { return x; }); }
  template <bool first, bool> static Part dot(const Part& sum, const Bytes& w, const int8_t* q) {
    return ints([&](int i) {
      return (first ? 0 : sum.at[i]) + w.at[4 * i] * q[0] + w.at[4 * i + 1] * q[1] + w.at[4 * i + 2] * q[2] + w.at[4 * i + 3] * q[3];
    });
  }
  template <bool> static Int add_part(const Int& sum, const Part& p) { return ints([&](int i) { return sum.at[i] + p.at[i]; }); }
  template <bool> static Int add_scaled(const Int& sum, const Part& p, const Scale& s) {
    return ints([&](int i) { return sum.at[i] + p.at[i] * s.at[i]; });
  }
  static Pair load_pair(const int8_t* p) { Pair x; for (int i = 0; i < 32; i++) x.at[i] = p[i]; return x; }
  static Scale first(const Pair& p) { return ints([&](int i) { return p.at[2 * i]; }); }
  static Scale second(const Pair& p) { return ints([&](int i) { return p.at[2 * i + 1]; }); }
  static Int add_pairs(const Int& sum, const Pair& p, const int16_t* x) {
    return ints([&](int i) { return sum.at[i] + p.at[2 * i] * x[0] + p.at[2 * i + 1] * x[1]; });
  }
  template <int n>
  static Int subtract_shifted(const Int& x, const Int& y) {
    return ints([&](int i) { return x.at[i] - y.at[i] * (1 << n); });
  }

  static Float to_float(const Int& x) { return floats([&](int i) { return float(x.at[i]); }); }
  static Float broadcast(float x) { return floats([&](int) { return x; }); }
  static Float multiply(const Float& x, const Float& y) { return floats([&](int i) { return x.at[i] * y.at[i]; }); }
  static Float fma(const Float& x, const Float& y, const Float& z) {
    return floats([&](int i) { return fmaf(x.at[i], y.at[i], z.at[i]); });
  }
  static Float fnma(const Float& x, const Float& y, const Float& z) {
    return floats([&](int i) { return fmaf(-x.at[i], y.at[i], z.at[i]); });
  }
  static Float larger(const Float& x, const Float& y) { return floats([&](int i) { return x.at[i] > y.at[i] ? x.at[i] : y.at[i]; }); }
  static Float load_floats(const float* p) { Float x; memcpy(x.at, p, 64); return x; }
  static void store_floats(float* p, const Float& x) { memcpy(p, x.at, 64); }
  static Float load_halves(const uint8_t* p) { return floats([&](int i) { return half_at(p + 2 * i); }); }
  static Float load_powers(const uint8_t* p) { return floats([&](int i) { return float_of_bits(uint32_t(p[i]) << 23); }); }
  static Float load_codes(const uint8_t* p) { return floats([&](int i) { return float(int8_t(p[i])); }); }
  static Float broadcast_half(const uint8_t* p) { return broadcast(half_at(p)); }
  static void store_halves(uint8_t* p, const Float& x) {
    each([&](int i) {
      const uint16_t h = half_of(x.at[i]);
      memcpy(p + 2 * i, &h, 2);
    });
  }
  template <Type type> static Float load_weights(const uint8_t* p) { return floats([&](int i) { return weight_at<type>(p, i); }); }
};
}  // namespace
}  // namespace edgespec
