// AVX-512 with VNNI: 16 outputs are one register; vpdpbusd sums 64 exact products.
#pragma once
#include <immintrin.h>
#include <cstring>
#include "formats.h"
#include "quantise_x86.h"

namespace edgespec {
namespace {
struct Lanes {
  static constexpr int kRows = 12, kBestRows = 12, kPairs = 6, kSums = 24, kAhead = 8192;
  static constexpr bool kWideParts = true, kSignedCodes = false;
  static constexpr int capacity(int max_code) { return max_code > 15 ? 64 : max_code > 7 ? 4 : 8; }  // few: parts of 16 bits
  using Bytes = __m512i;
  using Int = __m512i;
  using Part = __m512i;
  using Pair = __m512i;
  using Scale = __m512i;
  using Float = __m512;

  OP Bytes load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  OP void store(uint8_t* p, Bytes x) { _mm512_storeu_si512(p, x); }
  template <int n> OP Bytes shift(Bytes x) {
    return n == 0 ? x : n < 0 ? _mm512_srli_epi16(x, n < 0 ? -n : 0) : _mm512_slli_epi16(x, n > 0 ? n : 0);
  }
  template <int bits> OP Bytes mask(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(char(bits))); }
  // x & low | y & high
  template <int low, int high>
  OP Bytes join(Bytes x, Bytes y) {
    return _mm512_ternarylogic_epi32(x, _mm512_set1_epi8(char(low)), mask<high>(y), 0xea);
  }
  OP Bytes look_up(Bytes x, const uint8_t* table) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), x);
  }

  OP Bytes centre(Bytes x) { return x; }
  OP Int zero() { return _mm512_setzero_si512(); }
  OP Int broadcast(int32_t x) { return _mm512_set1_epi32(x); }
  OP Int four_bytes(const void* p) { int32_t x; memcpy(&x, p, 4); return _mm512_set1_epi32(x); }
  template <bool first, bool> OP Part dot(Part sum, Bytes w, const int8_t* q) {
    return _mm512_dpbusd_epi32(first ? zero() : sum, w, four_bytes(q));
  }
  template <bool> OP Int add_part(Int sum, Part p) { return _mm512_add_epi32(sum, p); }
  template <bool narrow> OP Int add_scaled(Int sum, Part p, Scale s) {
    return narrow ? _mm512_dpwssd_epi32(sum, p, s) : _mm512_add_epi32(sum, _mm512_mullo_epi32(p, s));
  }
  OP Pair load_pair(const int8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  OP Scale first(Pair p) { return _mm512_srai_epi32(_mm512_slli_epi32(p, 16), 16); }
  OP Scale second(Pair p) { return _mm512_srai_epi32(p, 16); }
  OP Int add_pairs(Int sum, Pair p, const int16_t* x) { return _mm512_dpwssd_epi32(sum, p, four_bytes(x)); }
  template <int n> OP Int subtract_shifted(Int x, Int y) { return _mm512_sub_epi32(x, _mm512_slli_epi32(y, n)); }

  OP Float to_float(Int x) { return _mm512_cvtepi32_ps(x); }
  OP Float broadcast(float x) { return _mm512_set1_ps(x); }
  OP Float multiply(Float x, Float y) { return _mm512_mul_ps(x, y); }
  OP Float fma(Float x, Float y, Float z) { return _mm512_fmadd_ps(x, y, z); }
  OP Float fnma(Float x, Float y, Float z) { return _mm512_fnmadd_ps(x, y, z); }
  OP Float larger(Float x, Float y) { return _mm512_max_ps(x, y); }  // y unless x > y
  OP Float load_floats(const float* p) { return _mm512_loadu_ps(p); }
  OP void store_floats(float* p, Float x) { _mm512_storeu_ps(p, x); }
  OP __m256i half_register(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  OP Float load_halves(const uint8_t* p) { return _mm512_cvtph_ps(half_register(p)); }
  OP Float load_powers(const uint8_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 23));
  }
  OP Float load_codes(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  OP Float broadcast_half(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_set1_epi16(int16_t(bits16_at(p)))); }
  OP void store_halves(uint8_t* p, Float x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  template <Type type> OP Float load_weights(const uint8_t* p) {
    if (type == F16) return load_halves(p);
    if (type == BF16) return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half_register(p)), 16));
    return _mm512_loadu_ps(p);
  }
};
}  // namespace
}  // namespace edgespec
