// Numbers of two bytes, at any address.
#pragma once
#include <cstring>
#include "formats.h"

namespace edgespec {
namespace {
inline uint16_t bits16_at(const uint8_t* p) { uint16_t x; memcpy(&x, p, 2); return x; }
inline float float_of_bits(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }

inline float half_at(const uint8_t* p) {
  const uint32_t h = bits16_at(p), sign = (h & 0x8000) << 16, magnitude = h & 0x7fff;
  if (magnitude >= 0x7c00) return float_of_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13 | (magnitude > 0x7c00 ? 0x400000 : 0));
  const float f = magnitude < 0x400 ? float(magnitude) * 0x1p-24f : float_of_bits((magnitude << 13) + 0x38000000);
  return sign ? -f : f;
}
// To the nearest, ties to even, as processors do it.
inline uint16_t half_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (bits >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to infinity
  if (bits >= 0x38800000) return uint16_t(sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
  const float magnitude = float_of_bits(bits) + 0.5f;  // a unit in the last place of 0.5 is the smallest half's
  memcpy(&bits, &magnitude, 4);
  return uint16_t(sign | (bits - 0x3f000000));
}
template <Type type> float weight_at(const uint8_t* p, int64_t i) {
  if (type == F16) return half_at(p + 2 * i);
  if (type == BF16) return float_of_bits(uint32_t(bits16_at(p + 2 * i)) << 16);
  float f;
  memcpy(&f, p + 4 * i, 4);
  return f;
}
}  // namespace
}  // namespace edgespec
