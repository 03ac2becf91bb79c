// Lanes of AVX2 and of AVX-VNNI: 16 outputs are two registers.
#pragma once
#include <immintrin.h>
#include <cstring>
#include "formats.h"
#include "quantise_x86.h"

namespace edgespec {
namespace {
struct Two { __m256i a, b; };
struct TwoFloats { __m256 a, b; };

struct Lanes {
  static constexpr int kPairs = 6, kSums = 6, kAhead = 8192;
  using Bytes = Two;
  using Int = Two;
  using Part = Two;
  using Pair = Two;
  using Scale = Two;
  using Float = TwoFloats;

  OP __m256i load1(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  OP __m128i load_half(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  OP __m256i four_bytes(const void* p) { int32_t x; memcpy(&x, p, 4); return _mm256_set1_epi32(x); }

  OP Bytes load(const uint8_t* p) { return {load1(p), load1(p + 32)}; }
  OP void store1(uint8_t* p, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
  OP void store(uint8_t* p, Bytes x) { store1(p, x.a); store1(p + 32, x.b); }
  template <int n> OP __m256i shift1(__m256i x) {
    return n == 0 ? x : n < 0 ? _mm256_srli_epi16(x, n < 0 ? -n : 0) : _mm256_slli_epi16(x, n > 0 ? n : 0);
  }
  template <int n> OP Bytes shift(Bytes x) { return {shift1<n>(x.a), shift1<n>(x.b)}; }
  template <int bits>
  OP Bytes mask(Bytes x) {
    const __m256i m = _mm256_set1_epi8(char(bits));
    return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
  }
  template <int low, int high> OP Bytes join(Bytes x, Bytes y) {
    x = mask<low>(x); y = mask<high>(y);
    return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)};
  }
  OP Bytes look_up(Bytes x, const uint8_t* table) {
    const __m256i values = centre1(_mm256_broadcastsi128_si256(load_half(table)));
    return {_mm256_shuffle_epi8(values, x.a), _mm256_shuffle_epi8(values, x.b)};
  }
  OP __m256i centre1(__m256i x) { return kSignedCodes ? _mm256_xor_si256(x, _mm256_set1_epi8(-128)) : x; }
  OP Bytes centre(Bytes x) { return {centre1(x.a), centre1(x.b)}; }
  OP Int zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  OP Int broadcast(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  // Compilers turn a chain of sums into a tree, whose products are spilled, unless each sum is kept.
  OP __m256i keep(__m256i x) { asm("" : "+x"(x)); return x; }
  OP Int keep(Int x) { return {keep(x.a), keep(x.b)}; }
  OP Int add(Int x, Int y) {
    const Int sum = {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
#if defined(__clang__)
    return sum;  // and it takes one addend from memory
#else
    return keep(sum);
#endif
  }
  OP Pair load_pair(const int8_t* p) { return {_mm256_cvtepi8_epi16(load_half(p)), _mm256_cvtepi8_epi16(load_half(p + 16))}; }
  template <int n> OP Int subtract_shifted(Int x, Int y) {
    return {_mm256_sub_epi32(x.a, _mm256_slli_epi32(y.a, n)), _mm256_sub_epi32(x.b, _mm256_slli_epi32(y.b, n))};
  }

#if defined(__AVXVNNI__)
  static constexpr int kRows = 6, kBestRows = 6;
  static constexpr bool kWideParts = true, kSignedCodes = false;
  static constexpr int capacity(int max_code) { return max_code > 15 ? 64 : max_code > 7 ? 4 : 8; }  // few: parts of 16 bits
  template <bool first, bool> OP Part dot(Part sum, Bytes w, const int8_t* q) {
    const __m256i x = four_bytes(q);
    if (first) sum = zero();
    return {_mm256_dpbusd_avx_epi32(sum.a, w.a, x), _mm256_dpbusd_avx_epi32(sum.b, w.b, x)};
  }
  template <bool> OP Int add_part(Int sum, Part p) { return add(sum, p); }
  template <bool narrow> OP Int add_scaled(Int sum, Part p, Scale s) {
    if (narrow) return {_mm256_dpwssd_avx_epi32(sum.a, p.a, s.a), _mm256_dpwssd_avx_epi32(sum.b, p.b, s.b)};
    return add(sum, {_mm256_mullo_epi32(p.a, s.a), _mm256_mullo_epi32(p.b, s.b)});
  }
  OP Scale first(Pair p) { return {_mm256_srai_epi32(_mm256_slli_epi32(p.a, 16), 16), _mm256_srai_epi32(_mm256_slli_epi32(p.b, 16), 16)}; }
  OP Scale second(Pair p) { return {_mm256_srai_epi32(p.a, 16), _mm256_srai_epi32(p.b, 16)}; }
  OP Int add_pairs(Int sum, Pair p, const int16_t* q) {
    const __m256i x = four_bytes(q);
    return {_mm256_dpwssd_avx_epi32(sum.a, p.a, x), _mm256_dpwssd_avx_epi32(sum.b, p.b, x)};
  }
#else
  // vpmaddubsw sums two products in 16 bits, which hold max_code * 127 * 2 * quads. Codes of 8 bits are signed: what it takes
  // is their magnitudes, 128 at most, and the activations with their signs.
  static constexpr int kRows = 5, kBestRows = 4;  // with 6 a sum waits in memory, each time for the one before
  static constexpr bool kWideParts = false, kSignedCodes = true;
  static constexpr int capacity(int max_code) { return max_code > 63 ? 1 : max_code > 31 ? 2 : max_code > 15 ? 4 : 8; }
  OP __m256i add16(__m256i x, __m256i y) { return keep(_mm256_add_epi16(x, y)); }
  OP __m256i signed1(__m256i w, __m256i x) { return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)); }
  template <bool first, bool is_signed> OP Part dot(Part sum, Bytes w, const int8_t* q) {
    if (is_signed) return {signed1(w.a, four_bytes(q)), signed1(w.b, four_bytes(q))};
    const __m256i x = four_bytes(q), a = _mm256_maddubs_epi16(w.a, x), b = _mm256_maddubs_epi16(w.b, x);
    if (first) return {a, b};
    return {add16(sum.a, a), add16(sum.b, b)};
  }
  // A scale is in both halves of 32 bits.
  template <bool> OP Int add_scaled(Int sum, Part p, Scale s) { return add(sum, {_mm256_madd_epi16(p.a, s.a), _mm256_madd_epi16(p.b, s.b)}); }
  OP Int widen(Part p) { return {_mm256_madd_epi16(p.a, _mm256_set1_epi16(1)), _mm256_madd_epi16(p.b, _mm256_set1_epi16(1))}; }
  template <bool is_all> OP Int add_part(Int sum, Part p) { return is_all ? widen(p) : keep(add(sum, widen(p))); }
  OP __m256i first1(__m256i p) { return _mm256_blend_epi16(p, _mm256_slli_epi32(p, 16), 0xaa); }
  OP __m256i second1(__m256i p) { return _mm256_blend_epi16(p, _mm256_srli_epi32(p, 16), 0x55); }
  OP Scale first(Pair p) { return {first1(p.a), first1(p.b)}; }
  OP Scale second(Pair p) { return {second1(p.a), second1(p.b)}; }
  OP Int add_pairs(Int sum, Pair p, const int16_t* q) {
    const __m256i x = four_bytes(q);
    return add(sum, {_mm256_madd_epi16(p.a, x), _mm256_madd_epi16(p.b, x)});
  }
#endif

  OP Float to_float(Int x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
  OP Float broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  OP Float multiply(Float x, Float y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  OP Float fma(Float x, Float y, Float z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
  OP Float fnma(Float x, Float y, Float z) { return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)}; }
  OP Float larger(Float x, Float y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }  // y unless x > y
  OP Float load_floats(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  OP void store_floats(float* p, Float x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
  OP Float load_halves(const uint8_t* p) { return {_mm256_cvtph_ps(load_half(p)), _mm256_cvtph_ps(load_half(p + 16))}; }
  OP __m256 powers1(const uint8_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), 23));
  }
  OP Float load_powers(const uint8_t* p) { return {powers1(p), powers1(p + 8)}; }
  OP __m256 floats1(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  OP Float load_codes(const uint8_t* p) { return {floats1(p), floats1(p + 8)}; }
  OP Float broadcast_half(const uint8_t* p) { const __m256 x = _mm256_cvtph_ps(_mm_set1_epi16(int16_t(bits16_at(p)))); return {x, x}; }
  OP __m128i halves1(__m256 x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
  OP void store_halves(uint8_t* p, Float x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), halves1(x.a));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16), halves1(x.b));
  }
  OP __m256 load_bfloats(const uint8_t* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(p)), 16)); }
  template <Type type> OP Float load_weights(const uint8_t* p) {
    if (type == F16) return load_halves(p);
    if (type == BF16) return {load_bfloats(p), load_bfloats(p + 16)};
    return {_mm256_castsi256_ps(load1(p)), _mm256_castsi256_ps(load1(p + 32))};
  }
};
}  // namespace
}  // namespace edgespec
