// Activations to int8, for all x86 paths. The twins in lanes_portable.h say the same in plain C++.
#pragma once
#include <immintrin.h>
#include "formats.h"

namespace edgespec {
namespace {
uint32_t largest_bits(const float* x, int count) {
  __m256i top = _mm256_setzero_si256();
  for (int i = 0; i < count; i += 8)
    top = _mm256_max_epu32(top, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + i)), _mm256_set1_epi32(0x7fffffff)));
  __m128i four = _mm_max_epu32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  return uint32_t(_mm_cvtsi128_si32(_mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1))));
}
// to nearest, ties to even
INLINE __m256i codes8(const float* x, __m256 inverse) {
  return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), inverse));
}
INLINE void codes32(const float* x, float inverse, int8_t* q, int* sums) {
  const __m256 scale = _mm256_set1_ps(inverse);
  const __m256i low = _mm256_packs_epi32(codes8(x, scale), codes8(x + 8, scale)),
                high = _mm256_packs_epi32(codes8(x + 16, scale), codes8(x + 24, scale));
  const __m256i codes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), codes);
  const __m256i eights =
      _mm256_sad_epu8(_mm256_xor_si256(codes, _mm256_set1_epi8(char(0x80))), _mm256_setzero_si256());  // sums of 8 codes + 128
  const __m256i halves = _mm256_add_epi32(eights, _mm256_shuffle_epi32(eights, 0x4e));
  sums[0] = _mm256_cvtsi256_si32(halves) - 16 * 128;
  sums[1] = _mm_cvtsi128_si32(_mm256_extracti128_si256(halves, 1)) - 16 * 128;
}
}  // namespace
}  // namespace edgespec
