// Plain C++ on floats that compilers may vectorise: as multiplications and additions are not contracted, that changes no bit.
#pragma once
#include <cmath>
#include <cstring>
#include "formats.h"

namespace edgespec {
namespace {

// exp(x): Cephes' polynomial (S. L. Moshier), 1.5 units in the last place; 0 below -87.
INLINE float exponential(float x) {
  const float at = x > 88.f ? 88.f : x, whole = (at * 1.44269504f + 12582912.f) - 12582912.f;
  const float r = (at - whole * 0.693359375f) - whole * -2.12194440e-4f;
  float y = 1.9875691500e-4f * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = (y * r * r + r) + 1.f;
  const float magic = whole + 12582912.f;
  uint32_t power, bits;
  memcpy(&power, &magic, 4);
  memcpy(&bits, &y, 4);
  bits += (power - 0x4b400000u) << 23;
  memcpy(&y, &bits, 4);
  return x < -87.f ? 0.f : y;
}
// Sum of 16 lanes, always in the same order.
INLINE float sum_of(const float* x) {
  float eight[8], four[4];
  for (int i = 0; i < 8; i++) eight[i] = x[i] + x[i + 8];
  for (int i = 0; i < 4; i++) four[i] = eight[i] + eight[i + 4];
  return (four[0] + four[2]) + (four[1] + four[3]);
}
INLINE float inverse_root_mean_square(const float* x, int64_t width, float epsilon) {
  float sums[16] = {};
  int64_t at = 0;
  for (; at + 16 <= width; at += 16) for (int i = 0; i < 16; i++) sums[i] += x[at + i] * x[at + i];
  for (int i = 0; at + i < width; i++) sums[i] += x[at + i] * x[at + i];
  return 1.f / sqrtf(sum_of(sums) / float(width) + epsilon);
}

// RMSNorm (Zhang and Sennrich, 2019) of x, or of x + delta, which goes to `sum`. x, delta and sum are [width].
void norm(const float* x, const float* delta, const float* weight, float epsilon, int64_t width, float* out, float* sum) {
  if (delta) {
    for (int64_t i = 0; i < width; i++) sum[i] = x[i] + delta[i];
    x = sum;
  }
  const float inverse = inverse_root_mean_square(x, width, epsilon);
  for (int64_t i = 0; i < width; i++) out[i] = x[i] * inverse * weight[i];
}
// silu(gate) * up, or the approximation of gelu by tanh: x * sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3), or
// gpt-oss's: x * sigmoid(1.702 x) * (up + 1), where x is 7 at most and up within -7..7.
void gate(int kind, const float* x, const float* up, int64_t count, float* out) {
  if (kind == kSilu) for (int64_t i = 0; i < count; i++) out[i] = x[i] / (1.f + exponential(-x[i])) * up[i];
  else if (kind == kGelu)
    for (int64_t i = 0; i < count; i++)
      out[i] = x[i] / (1.f + exponential(-1.5957691216f * (x[i] + 0.044715f * x[i] * x[i] * x[i]))) * up[i];
  else for (int64_t i = 0; i < count; i++) {
    const float g = x[i] > 7.f ? 7.f : x[i], u = up[i] > 7.f ? 7.f : up[i] < -7.f ? -7.f : up[i];
    out[i] = g / (1.f + exponential(-1.702f * g)) * (u + 1.f);
  }
}

// limit * tanh(x / limit) in place.
INLINE void cap(float limit, float* x, int64_t count) {
  for (int64_t i = 0; i < count; i++) x[i] = limit * (1.f - 2.f / (exponential(2.f / limit * x[i]) + 1.f));
}

}  // namespace
}  // namespace edgespec
