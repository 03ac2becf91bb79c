// The gated delta rule (Yang, Kautz and Hatamizadeh, 2024), Mamba-2 (Dao and Gu, 2024), whose rows do not depend on what S
// has, and short convolutions, for one instruction set (`Lanes`).
//
// Rows are added to a state one after another, and each sum is in order: a row's bits depend on the rows of its own branch
// alone, not on how they are cut into passes.
#pragma once
#include <cmath>
#include "attention.h"
#include "states.h"

namespace edgespec {
namespace {

// log(x) of x >= 1: Cephes' polynomial (S. L. Moshier).
INLINE float logarithm(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  int32_t power = int32_t(bits >> 23) - 126;
  float m = float_of_bits((bits & 0x7fffff) | 0x3f000000);  // 0.5..1
  if (m < 0.707106781f) { power--; m += m; }
  m -= 1.f;
  const float square = m * m, whole = float(power);
  float y = 7.0376836292e-2f;
  for (const float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f, 2.0000714765e-1f,
                        -2.4999993993e-1f, 3.3333331174e-1f})
    y = y * m + c;
  y = y * m * square + whole * -2.12194440e-4f - 0.5f * square;
  return m + y + whole * 0.693359375f;
}

void convolve(const float* const* inputs, const float* kernel, const float* shift, int taps, int64_t channels, bool is_activated,
              float* out) {
  for (int64_t i = 0; i < channels; i++) out[i] = inputs[0][i] * kernel[i];
  for (int t = 1; t < taps; t++) for (int64_t i = 0; i < channels; i++) out[i] += inputs[t][i] * kernel[t * channels + i];
  if (shift) for (int64_t i = 0; i < channels; i++) out[i] += shift[i];
  if (is_activated) for (int64_t i = 0; i < channels; i++) out[i] /= 1.f + exponential(-out[i]);
}
float dot(const float* x, const float* y, int64_t size) {
  float sums[kLanes] = {};
  for (int64_t at = 0; at < size; at += kLanes) for (int i = 0; i < kLanes; i++) sums[i] += x[at + i] * y[at + i];
  return sum_of(sums);
}
void to_unit(float* x, int64_t size, float factor) {
  const float scale = factor / sqrtf(dot(x, x, size) + 1e-6f);
  for (int64_t i = 0; i < size; i++) x[i] *= scale;
}
// Of each head how much is written, null: as much as time passes, and how much is kept. What is not a number stays that:
// processors differ in its bits.
void rates(const float* written, const float* times, const float* bias, const float* rate, int64_t heads, float* betas, float* decays) {
  for (int64_t h = 0; h < heads; h++) {
    const float x = times[h] + bias[h], passed = x > 20.f ? x : logarithm(1.f + exponential(x)), fading = rate[h] * passed;
    const float w = written ? written[h] : x;
    betas[h] = w != w ? w : written ? 1.f / (1.f + exponential(-w)) : passed;
    decays[h] = x == x && fading == fading ? exponential(fading) : x * fading;
  }
}

template <int kColumns> void add_columns(const float* from, float* to, int size, const float* key, float decay, const float* delta) {
  const Lanes::Float kept = Lanes::broadcast(decay);
  Lanes::Float d[kColumns];
  UNROLL for (int c = 0; c < kColumns; c++) d[c] = Lanes::load_floats(delta + c * kLanes);
  for (int i = 0; i < size; i++) UNROLL for (int c = 0; c < kColumns; c++) {
    const int64_t at = (int64_t(c) * size + i) * kLanes;
    Lanes::store_floats(to + at, Lanes::fma(Lanes::broadcast(key[i]), d[c], Lanes::multiply(kept, Lanes::load_floats(from + at))));
  }
}
template <int kColumns> void ask_columns(const float* state, int size, const Asked& row, float* delta, float* y) {
  const Lanes::Float none = Lanes::broadcast(0.f);
  Lanes::Float kept[kColumns], seen[kColumns];
  UNROLL for (int c = 0; c < kColumns; c++) kept[c] = seen[c] = none;
  for (int i = 0; i < size; i++) UNROLL for (int c = 0; c < kColumns; c++) {
    const Lanes::Float x = Lanes::load_floats(state + (int64_t(c) * size + i) * kLanes);
    kept[c] = Lanes::fma(Lanes::broadcast(row.key[i]), x, kept[c]);
    seen[c] = Lanes::fma(Lanes::broadcast(row.query[i]), x, seen[c]);
  }
  UNROLL for (int c = 0; c < kColumns; c++) {
    const Lanes::Float value = Lanes::load_floats(row.value + c * kLanes);
    const Lanes::Float d = Lanes::multiply(Lanes::broadcast(row.beta), Lanes::fnma(Lanes::broadcast(row.taken), kept[c], value));
    Lanes::store_floats(delta + c * kLanes, d);
    const Lanes::Float found = Lanes::fma(Lanes::broadcast(row.overlap), d, Lanes::multiply(Lanes::broadcast(row.decay), seen[c]));
    Lanes::store_floats(y + c * kLanes, Lanes::fma(Lanes::broadcast(row.skip), value, found));
  }
}
// Calls f(a constant) for parts of some columns, with the first column of each.
template <class F> void for_columns(int columns, F f) {
  constexpr int kAtOnce = at_once(2);
  int c = 0;
  for (; c + kAtOnce <= columns; c += kAtOnce) f(std::integral_constant<int, kAtOnce>(), c);
  for (; c < columns; c++) f(std::integral_constant<int, 1>(), c);
}
void add(const float* from, float* to, int columns, int size, const float* key, float decay, const float* delta) {
  for_columns(columns, [&](auto n, int c) {
    add_columns<n>(from + int64_t(c) * size * kLanes, to + int64_t(c) * size * kLanes, size, key, decay, delta + c * kLanes);
  });
}
void ask(const float* state, int columns, int size, const Asked& row, float* delta, float* y) {
  for_columns(columns, [&](auto n, int c) {
    Asked part = row;
    part.value += c * kLanes;
    ask_columns<n>(state + int64_t(c) * size * kLanes, size, part, delta + c * kLanes, y + c * kLanes);
  });
}

constexpr Recurrence kRecurrence = {at_once(2), convolve, to_unit, dot, rates, add, ask};

}  // namespace
}  // namespace edgespec
