// Kernels of the x86 paths; included once per instruction set, which the compiler's flags choose.
#pragma once
#include <cmath>
#include <cstring>
#include <immintrin.h>
#include "tiles.h"

namespace edgespec {
namespace {
#define UNROLL _Pragma("GCC unroll 16")
#define INL __attribute__((always_inline)) inline
static INL float largest(const float* x, int64_t n) {
  __m256 top = _mm256_setzero_ps(); const __m256 sign = _mm256_set1_ps(-0.f);
  for (int64_t i = 0; i < n; i += 8) top = _mm256_max_ps(top, _mm256_andnot_ps(sign, _mm256_loadu_ps(x + i)));
  float t[8]; _mm256_storeu_ps(t, top); float r = 0; for (float v : t) r = v > r ? v : r; return r;
}
static INL int codes32(const float* x, __m256 inv, int8_t* q, int16_t* sums16) {   // 32 codes and the sums of both halves
  __m256i i[4]; for (int j = 0; j < 4; j++) i[j] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * j), inv));
  __m256i lo = _mm256_packs_epi32(i[0], i[1]), hi = _mm256_packs_epi32(i[2], i[3]);
  __m256i b = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(lo, hi), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256((__m256i*)q, b);
  __m256i s = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), b), _mm256_set1_epi16(1));
  int32_t t[8]; _mm256_storeu_si256((__m256i*)t, s);
  int a = t[0] + t[1] + t[2] + t[3], c = t[4] + t[5] + t[6] + t[7];
  if (sums16) { sums16[0] = (int16_t)a; sums16[1] = (int16_t)c; }
  return a + c;
}
static void quantise(int64_t block, const float* x, int64_t k, int64_t m, uint8_t* out) {
  if (block == 256) {
    Activations256* A = (Activations256*)out;
    for (int r = 0; r < m; r++) for (int64_t b = 0; b < k / 256; b++) {
      Activations256& a = A[b * m + r]; const float* p = x + r * k + b * 256; float top = largest(p, 256);
      a.d = top / 127.f; __m256 inv = _mm256_set1_ps(top > 0 ? 127.f / top : 0.f);
      for (int s = 0; s < 8; s++) a.sums32[s] = (int16_t)codes32(p + 32 * s, inv, a.q + 32 * s, a.sums16 + 2 * s);
    }
  } else {
    Activations32* A = (Activations32*)out;
    for (int r = 0; r < m; r++) for (int64_t b = 0; b < k / 32; b++) {
      Activations32& a = A[b * m + r]; const float* p = x + r * k + b * 32; float top = largest(p, 32);
      a.d = top / 127.f; a.sum = codes32(p, _mm256_set1_ps(top > 0 ? 127.f / top : 0.f), a.q, nullptr);
    }
  }
}

// ---------------------------------------------------------------- products
static INL __m256i load(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
static INL __m256i quad(const int8_t* p) { int32_t v; memcpy(&v, p, 4); return _mm256_set1_epi32(v); }
static INL __m256 half8(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
static INL __m256i twice(const uint8_t* p) { __m256i s = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); return _mm256_or_si256(s, _mm256_slli_epi32(s, 16)); }

#if defined(__AVX512VNNI__)
// 16 columns in one register: cols 0..7 in the lower half. vpdpbusd: 64 products each, exact in int32.
static INL __m512i widen(const uint8_t* p) {
  __m256i x = load(p);
  return _mm512_and_si512(_mm512_inserti64x4(_mm512_castsi256_si512(x), _mm256_srli_epi16(x, 4), 1), _mm512_set1_epi8(15));
}
static INL __m512i quad16(const int8_t* p) { int32_t v; memcpy(&v, p, 4); return _mm512_set1_epi32(v); }
static INL __m512 half16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static INL __m512i u8x16(const void* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
template <int R> static INL void step(const TileQ4K& B, const Activations256* a, float* f) {
  __m512i acc[R], mins[R]; UNROLL for (int r = 0; r < R; r++) acc[r] = mins[r] = _mm512_setzero_si512();
  for (int s = 0; s < 8; s++) {
    __m512i t[R]; UNROLL for (int r = 0; r < R; r++) t[r] = _mm512_setzero_si512();
    UNROLL for (int j = 0; j < 8; j++) { __m512i w = widen(B.q[s * 8 + j]);
      UNROLL for (int r = 0; r < R; r++) t[r] = _mm512_dpbusd_epi32(t[r], w, quad16(a[r].q + s * 32 + j * 4)); }
    __m512i sc = u8x16(B.scales[s]);
    UNROLL for (int r = 0; r < R; r++) acc[r] = _mm512_add_epi32(acc[r], _mm512_mullo_epi32(t[r], sc));
  }
  UNROLL for (int p = 0; p < 4; p++) { __m512i mn = _mm512_cvtepu8_epi16(load(B.mins[p]));
    UNROLL for (int r = 0; r < R; r++) mins[r] = _mm512_dpwssd_epi32(mins[r], mn, quad16((const int8_t*)(a[r].sums32 + 2 * p))); }
  __m512 d = half16(B.d), dm = half16(B.dmin);
  UNROLL for (int r = 0; r < R; r++) { __m512 da = _mm512_set1_ps(a[r].d), v = _mm512_load_ps(f + r * kOutputs);
    v = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r]), _mm512_mul_ps(d, da), v);
    _mm512_store_ps(f + r * kOutputs, _mm512_fnmadd_ps(_mm512_cvtepi32_ps(mins[r]), _mm512_mul_ps(dm, da), v)); }
}
template <int R> static INL void step(const TileQ6K& B, const Activations256* a, float* f) {
  __m512i acc[R], mins[R]; UNROLL for (int r = 0; r < R; r++) acc[r] = mins[r] = _mm512_setzero_si512();
  const __m512i top = _mm512_set1_epi8(0x30);
  for (int p = 0; p < 8; p++) {   // 32 inputs: two groups of 16
    __m512i sc2 = _mm512_cvtepi8_epi16(load(B.scales[p]));
    __m512i sc[2] = {_mm512_srai_epi32(_mm512_slli_epi32(sc2, 16), 16), _mm512_srai_epi32(sc2, 16)};
    UNROLL for (int g = 0; g < 2; g++) {
      __m512i t[R]; UNROLL for (int r = 0; r < R; r++) t[r] = _mm512_setzero_si512();
      UNROLL for (int h = 0; h < 2; h++) { int pair = p * 4 + g * 2 + h; __m256i x = load(B.high[pair]);
        __m512i e = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_slli_epi16(x, 4)), _mm256_slli_epi16(x, 2), 1);
        __m512i o = _mm512_inserti64x4(_mm512_castsi256_si512(x), _mm256_srli_epi16(x, 2), 1);
        __m512i w0 = _mm512_or_si512(widen(B.low[pair * 2]), _mm512_and_si512(e, top)), w1 = _mm512_or_si512(widen(B.low[pair * 2 + 1]), _mm512_and_si512(o, top));
        UNROLL for (int r = 0; r < R; r++) { t[r] = _mm512_dpbusd_epi32(t[r], w0, quad16(a[r].q + pair * 8)); t[r] = _mm512_dpbusd_epi32(t[r], w1, quad16(a[r].q + pair * 8 + 4)); } }
      UNROLL for (int r = 0; r < R; r++) acc[r] = _mm512_add_epi32(acc[r], _mm512_mullo_epi32(t[r], sc[g])); }
    UNROLL for (int r = 0; r < R; r++) mins[r] = _mm512_dpwssd_epi32(mins[r], sc2, quad16((const int8_t*)(a[r].sums16 + 2 * p)));
  }
  __m512 d = half16(B.d);
  UNROLL for (int r = 0; r < R; r++) { __m512i v = _mm512_sub_epi32(acc[r], _mm512_slli_epi32(mins[r], 5));
    _mm512_store_ps(f + r * kOutputs, _mm512_fmadd_ps(_mm512_cvtepi32_ps(v), _mm512_mul_ps(d, _mm512_set1_ps(a[r].d)), _mm512_load_ps(f + r * kOutputs))); }
}
template <int R, bool MIN> static INL void step32(const uint8_t (*q)[32], const uint16_t* dp, const uint16_t* mp, const Activations32* a, float* f) {
  __m512i t[R]; UNROLL for (int r = 0; r < R; r++) t[r] = _mm512_setzero_si512();
  UNROLL for (int j = 0; j < 8; j++) { __m512i w = widen(q[j]);
    UNROLL for (int r = 0; r < R; r++) t[r] = _mm512_dpbusd_epi32(t[r], w, quad16(a[r].q + j * 4)); }
  __m512 d = half16(dp), mn = MIN ? half16(mp) : d;
  UNROLL for (int r = 0; r < R; r++) { __m512 da = _mm512_set1_ps(a[r].d), v = _mm512_load_ps(f + r * kOutputs);
    __m512i i = MIN ? t[r] : _mm512_sub_epi32(t[r], _mm512_set1_epi32(8 * a[r].sum));
    v = _mm512_fmadd_ps(_mm512_cvtepi32_ps(i), _mm512_mul_ps(d, da), v);
    if (MIN) v = _mm512_fmadd_ps(_mm512_mul_ps(da, _mm512_set1_ps((float)a[r].sum)), mn, v);
    _mm512_store_ps(f + r * kOutputs, v); }
}
template <int R> static INL void step(const TileQ80& B, const Activations32* a, float* f) {
  __m512i t[R]; UNROLL for (int r = 0; r < R; r++) t[r] = _mm512_setzero_si512();
  UNROLL for (int j = 0; j < 8; j++) { __m512i w = _mm512_loadu_si512(B.q[j]);
    UNROLL for (int r = 0; r < R; r++) t[r] = _mm512_dpbusd_epi32(t[r], w, quad16(a[r].q + j * 4)); }
  __m512 d = half16(B.d);
  UNROLL for (int r = 0; r < R; r++) { __m512 v = _mm512_load_ps(f + r * kOutputs); __m512i i = _mm512_sub_epi32(t[r], _mm512_set1_epi32(128 * a[r].sum));
    _mm512_store_ps(f + r * kOutputs, _mm512_fmadd_ps(_mm512_cvtepi32_ps(i), _mm512_mul_ps(d, _mm512_set1_ps(a[r].d)), v)); }
}
constexpr int ROWS = 8;
#else
#if defined(__AVXVNNI__)
static INL __m256i dot(__m256i t, __m256i w, __m256i v, bool) { return _mm256_dpbusd_avx_epi32(t, w, v); }
static INL __m256i scaled(__m256i t, __m256i s) { return _mm256_mullo_epi32(t, _mm256_srli_epi32(s, 16)); }              // s: the scale twice, 16 bits each
static INL __m256i scaled_signed(__m256i t, __m256i s) { return _mm256_mullo_epi32(t, _mm256_srai_epi32(s, 16)); }
static INL __m256i whole(__m256i t) { return t; }
#else
// vpmaddubsw: |15 * 127 * 2| * 8 < 32768 and |63 * 127 * 2| * 2 < 32768: nothing saturates
static INL __m256i dot(__m256i t, __m256i w, __m256i v, bool first) { __m256i p = _mm256_maddubs_epi16(w, v); if (first) return p; t = _mm256_add_epi16(t, p);
  asm("" : "+x"(t));   // GCC would otherwise reassociate the sums into a tree and spill every product
  return t; }
static INL __m256i scaled(__m256i t, __m256i s) { return _mm256_madd_epi16(t, s); }
static INL __m256i scaled_signed(__m256i t, __m256i s) { return _mm256_madd_epi16(t, s); }
static INL __m256i whole(__m256i t) { return _mm256_madd_epi16(t, _mm256_set1_epi16(1)); }
#endif
template <int R> static INL void step(const TileQ4K& B, const Activations256* a, float* f) {
  const __m256i low = _mm256_set1_epi8(15); __m256i acc[R][2];
  UNROLL for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
  for (int s = 0; s < 8; s++) {
    __m256i t[R][2]; UNROLL for (int r = 0; r < R; r++) t[r][0] = t[r][1] = _mm256_setzero_si256();
    UNROLL for (int j = 0; j < 8; j++) {
      __m256i x = load(B.q[s * 8 + j]), w0 = _mm256_and_si256(x, low), w1 = _mm256_and_si256(_mm256_srli_epi16(x, 4), low);
      UNROLL for (int r = 0; r < R; r++) { __m256i v = quad(a[r].q + s * 32 + j * 4); t[r][0] = dot(t[r][0], w0, v, j == 0); t[r][1] = dot(t[r][1], w1, v, j == 0); }
    }
    __m256i s0 = twice(B.scales[s]), s1 = twice(B.scales[s] + 8);
    UNROLL for (int r = 0; r < R; r++) { acc[r][0] = _mm256_add_epi32(acc[r][0], scaled(t[r][0], s0)); acc[r][1] = _mm256_add_epi32(acc[r][1], scaled(t[r][1], s1)); }
  }
  UNROLL for (int g = 0; g < 2; g++) {
    __m256i mn[4]; UNROLL for (int p = 0; p < 4; p++) mn[p] = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)B.mins[p][8 * g]));
    __m256 d = half8(B.d + 8 * g), dm = half8(B.dmin + 8 * g);
    UNROLL for (int r = 0; r < R; r++) {
      __m256i m = _mm256_madd_epi16(mn[0], quad((const int8_t*)a[r].sums32));
      UNROLL for (int p = 1; p < 4; p++) m = _mm256_add_epi32(m, _mm256_madd_epi16(mn[p], quad((const int8_t*)(a[r].sums32 + 2 * p))));
      __m256 da = _mm256_set1_ps(a[r].d), v = _mm256_load_ps(f + r * kOutputs + 8 * g);
      v = _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[r][g]), _mm256_mul_ps(d, da), v);
      _mm256_store_ps(f + r * kOutputs + 8 * g, _mm256_fnmadd_ps(_mm256_cvtepi32_ps(m), _mm256_mul_ps(dm, da), v));
    }
  }
}
template <int R> static INL void step(const TileQ6K& B, const Activations256* a, float* f) {
  const __m256i low = _mm256_set1_epi8(15), top = _mm256_set1_epi8(0x30); __m256i acc[R][2], mins[R][2];
  UNROLL for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = mins[r][0] = mins[r][1] = _mm256_setzero_si256();
  for (int p = 0; p < 8; p++) {   // 32 inputs: two groups of 16
    __m256i sc2[2]; UNROLL for (int c = 0; c < 2; c++) sc2[c] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)B.scales[p][8 * c]));
    UNROLL for (int g = 0; g < 2; g++) {
      __m256i sc[2]; UNROLL for (int c = 0; c < 2; c++) sc[c] = g ? _mm256_blend_epi16(sc2[c], _mm256_srli_epi32(sc2[c], 16), 0x55) : _mm256_blend_epi16(sc2[c], _mm256_slli_epi32(sc2[c], 16), 0xAA);
      UNROLL for (int h = 0; h < 2; h++) {
        int pair = p * 4 + g * 2 + h; __m256i x = load(B.high[pair]), l0 = load(B.low[pair * 2]), l1 = load(B.low[pair * 2 + 1]);
        __m256i w00 = _mm256_or_si256(_mm256_and_si256(l0, low), _mm256_and_si256(_mm256_slli_epi16(x, 4), top));
        __m256i w01 = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(l0, 4), low), _mm256_and_si256(_mm256_slli_epi16(x, 2), top));
        __m256i w10 = _mm256_or_si256(_mm256_and_si256(l1, low), _mm256_and_si256(x, top));
        __m256i w11 = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(l1, 4), low), _mm256_and_si256(_mm256_srli_epi16(x, 2), top));
        UNROLL for (int r = 0; r < R; r++) {
          __m256i v0 = quad(a[r].q + pair * 8), v1 = quad(a[r].q + pair * 8 + 4), z = _mm256_setzero_si256();
          acc[r][0] = _mm256_add_epi32(acc[r][0], scaled_signed(dot(dot(z, w00, v0, true), w10, v1, false), sc[0]));
          acc[r][1] = _mm256_add_epi32(acc[r][1], scaled_signed(dot(dot(z, w01, v0, true), w11, v1, false), sc[1]));
        }
      }
    }
    UNROLL for (int r = 0; r < R; r++) { __m256i b = quad((const int8_t*)(a[r].sums16 + 2 * p));
      mins[r][0] = _mm256_add_epi32(mins[r][0], _mm256_madd_epi16(sc2[0], b)); mins[r][1] = _mm256_add_epi32(mins[r][1], _mm256_madd_epi16(sc2[1], b)); }
  }
  UNROLL for (int g = 0; g < 2; g++) { __m256 d = half8(B.d + 8 * g);
    UNROLL for (int r = 0; r < R; r++) { __m256i v = _mm256_sub_epi32(acc[r][g], _mm256_slli_epi32(mins[r][g], 5)); float* o = f + r * kOutputs + 8 * g;
      _mm256_store_ps(o, _mm256_fmadd_ps(_mm256_cvtepi32_ps(v), _mm256_mul_ps(d, _mm256_set1_ps(a[r].d)), _mm256_load_ps(o))); } }
}
template <int R, bool MIN> static INL void step32(const uint8_t (*q)[32], const uint16_t* dp, const uint16_t* mp, const Activations32* a, float* f) {
  const __m256i low = _mm256_set1_epi8(15); __m256i t[R][2];
  UNROLL for (int r = 0; r < R; r++) t[r][0] = t[r][1] = _mm256_setzero_si256();
  UNROLL for (int j = 0; j < 8; j++) {
    __m256i x = load(q[j]), w0 = _mm256_and_si256(x, low), w1 = _mm256_and_si256(_mm256_srli_epi16(x, 4), low);
    UNROLL for (int r = 0; r < R; r++) { __m256i v = quad(a[r].q + j * 4); t[r][0] = dot(t[r][0], w0, v, j == 0); t[r][1] = dot(t[r][1], w1, v, j == 0); }
  }
  UNROLL for (int g = 0; g < 2; g++) { __m256 d = half8(dp + 8 * g), mn = MIN ? half8(mp + 8 * g) : d;
    UNROLL for (int r = 0; r < R; r++) { float* o = f + r * kOutputs + 8 * g; __m256 da = _mm256_set1_ps(a[r].d), v = _mm256_load_ps(o);
      __m256i i = whole(t[r][g]); if (!MIN) i = _mm256_sub_epi32(i, _mm256_set1_epi32(8 * a[r].sum));
      v = _mm256_fmadd_ps(_mm256_cvtepi32_ps(i), _mm256_mul_ps(d, da), v);
      if (MIN) v = _mm256_fmadd_ps(_mm256_mul_ps(da, _mm256_set1_ps((float)a[r].sum)), mn, v);
      _mm256_store_ps(o, v); } }
}
template <int R> static INL void step(const TileQ80& B, const Activations32* a, float* f) {
  __m256i t[R][2]; const __m256i offset = _mm256_set1_epi8(-128); UNROLL for (int r = 0; r < R; r++) t[r][0] = t[r][1] = _mm256_setzero_si256();
  UNROLL for (int j = 0; j < 8; j++) UNROLL for (int g = 0; g < 2; g++) { __m256i w = _mm256_xor_si256(load(B.q[j] + 32 * g), offset), top = _mm256_abs_epi8(w);
    UNROLL for (int r = 0; r < R; r++) { __m256i p = _mm256_maddubs_epi16(top, _mm256_sign_epi8(quad(a[r].q + j * 4), w)); t[r][g] = _mm256_add_epi32(t[r][g], _mm256_madd_epi16(p, _mm256_set1_epi16(1))); } }
  UNROLL for (int g = 0; g < 2; g++) { __m256 d = half8(B.d + 8 * g);
    UNROLL for (int r = 0; r < R; r++) { float* o = f + r * kOutputs + 8 * g; _mm256_store_ps(o, _mm256_fmadd_ps(_mm256_cvtepi32_ps(t[r][g]), _mm256_mul_ps(d, _mm256_set1_ps(a[r].d)), _mm256_load_ps(o))); } }
}
constexpr int ROWS = 4;
#endif
template <int R> static INL void step(const TileQ41& B, const Activations32* a, float* f) { step32<R, true>(B.q, B.d, B.m, a, f); }
template <int R> static INL void step(const TileQ40& B, const Activations32* a, float* f) { step32<R, false>(B.q, B.d, nullptr, a, f); }

template <int R, class B, class A> __attribute__((noinline)) static void rows(const B& b, const A* a, float* f) { step<R>(b, a, f); }
template <class B, class A> static INL void some(int r, const B& b, const A* a, float* f) {
  switch (r) { case 1: rows<1>(b, a, f); break; case 2: rows<2>(b, a, f); break; case 3: rows<3>(b, a, f); break; case 4: rows<4>(b, a, f); break;
    default:
#if defined(__AVX512VNNI__)
    switch (r) { case 5: rows<5>(b, a, f); break; case 6: rows<6>(b, a, f); break; case 7: rows<7>(b, a, f); break; default: rows<8>(b, a, f); }
#endif
    break; }
}
static INL void put(const float* f, float* y, int64_t stride, const float* bias, int64_t n, int64_t tile, int m) {
  int64_t left = n - tile * kOutputs; int w = left < kOutputs ? int(left) : kOutputs;
  for (int r = 0; r < m; r++) for (int c = 0; c < w; c++) y[r * stride + tile * kOutputs + c] = bias ? f[r * kOutputs + c] + bias[tile * kOutputs + c] : f[r * kOutputs + c];
}
template <class B, class A> static void run(const B* data, int64_t nb, const A* a, int m, float* y, int64_t stride, const float* bias, int64_t n, int64_t first, int64_t last) {
  alignas(64) float f[kRowBlock * kOutputs]; const int parts = (m + ROWS - 1) / ROWS;
  for (int64_t t = first; t < last; t++) {
    memset(f, 0, sizeof(float) * kOutputs * m); const B* b = data + t * nb;
    for (int64_t s = 0; s < nb; s++) {
      const char* ahead = (const char*)(b + s) + 16384;   // past the end of the last tile at most: a prefetch never faults
      for (size_t o = 0; o < sizeof(B); o += 64) _mm_prefetch(ahead + o, _MM_HINT_T0);
      for (int p = 0, r = 0; p < parts; p++) { int c = (m - r) / (parts - p); some(c, b[s], a + s * m + r, f + r * kOutputs); r += c; }
    }
    put(f, y, stride, bias, n, t, m);
  }
}
static void product(int32_t type, const uint8_t* tiles, int64_t n, int64_t k, const uint8_t* aq, int m, float* y, int64_t stride, const float* bias, int64_t first, int64_t last) {
  const int64_t nb = k / type_info(type)->inputs;
  switch (type) {
    case Q4_K: run((const TileQ4K*)tiles, nb, (const Activations256*)aq, m, y, stride, bias, n, first, last); break;
    case Q6_K: run((const TileQ6K*)tiles, nb, (const Activations256*)aq, m, y, stride, bias, n, first, last); break;
    case Q4_1: run((const TileQ41*)tiles, nb, (const Activations32*)aq, m, y, stride, bias, n, first, last); break;
    case Q4_0: run((const TileQ40*)tiles, nb, (const Activations32*)aq, m, y, stride, bias, n, first, last); break;
    case Q8_0: run((const TileQ80*)tiles, nb, (const Activations32*)aq, m, y, stride, bias, n, first, last); break;
  }
}
}  // namespace
}  // namespace edgespec
