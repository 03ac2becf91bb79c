// Kernels of one instruction set, which `Lanes` (declared by the including file) stands for.
//
// Lanes are 16 outputs: Bytes (codes, 4 inputs of each), Int and Float, Pair (2 int16 of each), Part (sums of products of up
// to capacity(max_code) quads, in less than 32 bits unless kWideParts), and what is done with them. At most kRows rows at a
// time, best kBestRows.
//
// Same bits everywhere: sums of integers are exact, and each row and output meets the same float operations in the same
// order, one fused multiply-add a block (two where there are mins), whatever rows are beside it and on every path.
#pragma once
#include <cmath>
#include <cstring>
#include <utility>
#include "floats.h"
#include "formats.h"

namespace edgespec {
namespace {

// ---- activations
// A row is uneven where a block's scale is more than so many times the mean of the others'. Of SmolLM2's products 5% are,
// of Gemma's 1%; with 24 hardly any are, and less is gained.
constexpr float kUneven = 12;
// Scale of a block, and 127 / its largest magnitude; no inverse if all codes are zeros.
INLINE float scale_of(const float* x, int inputs, float* inverse) {
  const uint32_t top = largest_bits(x, inputs);
  *inverse = 0;
  if (top >= 0x7f800000) return float_of_bits(0x7fc00000);  // not finite: NaN
  if (top < 0x0d800000) return 0;  // below 2^-100: 127 / top could overflow
  *inverse = 127.f / float_of_bits(top);
  return float_of_bits(top) / 127.f;
}
// What the codes of a block leave of it; nothing of what is not finite.
template <class Block> void leave(const float* x, const Block& a, int count, float* rest) {
  for (int i = 0; i < count; i++) rest[i] = a.d >= 0 ? x[i] - a.d * float(a.q[i]) : 0;
}
bool quantise(int inputs, int gate_kind, const float* x, int64_t k, int64_t row, int64_t rows, uint8_t* out, float* rest) {
  alignas(64) float gated[256];
  float largest = 0, all = 0;
  float inverse;
  int sums[2];
  const auto block_at = [&](int64_t at, int count) {
    if (!gate_kind) return x + at;
    gate(gate_kind, x + at, x + k + at, count, gated);
    return static_cast<const float*>(gated);
  };
  if (inputs == 256) {
    Activations256* a = reinterpret_cast<Activations256*>(out) + row;
    for (int64_t at = 0; at < k; at += 256, a += rows) {
      const float* block = block_at(at, 256);
      memset(a, 0, sizeof *a);
      a->d = scale_of(block, 256, &inverse);
      largest = a->d > largest ? a->d : largest;
      all += a->d;
      if (inverse != 0) for (int s = 0; s < 8; s++) {
        codes32(block + 32 * s, inverse, a->q + 32 * s, sums);
        for (int h = 0; h < 2; h++) { a->sums16[2 * s + h] = int16_t(sums[h]); a->minus32[2 * s + h] = -32 * sums[h]; }
        a->sums32[s] = int16_t(sums[0] + sums[1]);
      }
      if (rest) leave(block, *a, 256, rest + at);
    }
  } else if (inputs == 32) {
    Activations32* a = reinterpret_cast<Activations32*>(out) + row;
    for (int64_t at = 0; at < k; at += 32, a += rows) {
      const float* block = block_at(at, 32);
      memset(a, 0, sizeof *a);
      a->d = scale_of(block, 32, &inverse);
      largest = a->d > largest ? a->d : largest;
      all += a->d;
      if (inverse != 0) {
        codes32(block, inverse, a->q, sums);
        sums[0] += sums[1];
        a->offsets[0] = -8 * sums[0]; a->offsets[1] = -16 * sums[0]; a->offsets[2] = -128 * sums[0];
      }
      a->d_sum = a->d * (inverse != 0 ? float(sums[0]) : 0);
      if (rest) leave(block, *a, 32, rest + at);
    }
  } else if (gate_kind) gate(gate_kind, x, x + k, k, reinterpret_cast<float*>(out) + row * k);
  else memcpy(reinterpret_cast<float*>(out) + row * k, x, size_t(k) * 4);
  if (rest && inputs == 1) memset(rest, 0, size_t(k) * 4);
  return largest * float(k / inputs - 1) > kUneven * (all - largest);
}

// ---- products
// Codes of quad j of 32 inputs.
template <Type kType, int j> INLINE Lanes::Bytes codes(const uint8_t* planes) {
  constexpr Format f = format(kType);
  constexpr int low_mask = (1 << f.low) - 1, high_mask = ((1 << f.high) - 1) << f.low;
  Lanes::Bytes c = Lanes::shift<-(j * f.low % 8)>(Lanes::load(planes + j * f.low / 8 * 64));
  if constexpr (f.high)
    c = Lanes::join<low_mask, high_mask>(c, Lanes::shift<f.low - j * f.high % 8>(Lanes::load(planes + 64 * f.low + j * f.high / 8 * 64)));
  else if constexpr (f.low < 8) c = Lanes::mask<low_mask>(c);
  if constexpr (f.table != nullptr) c = Lanes::look_up(c, f.table);
  else if constexpr (f.is_signed()) c = Lanes::centre(c);
  return c;
}
// What a code stands for is this much less: nothing where the dot products take the codes of 8 bits as signed ones.
template <Type kType> constexpr int kOffset = format(kType).is_signed() && Lanes::kSignedCodes ? 0 : format(kType).offset;
template <class F, int... kJ> INLINE void unrolled(F f, std::integer_sequence<int, kJ...>) { (f(std::integral_constant<int, kJ>()), ...); }
template <int kCount, class F> INLINE void unrolled(F f) { unrolled(f, std::make_integer_sequence<int, kCount>()); }

// Codes of 32 inputs as `codes` gives them, a plane for each quad. Where so many parts of the rows meet a block that it pays,
// they are unpacked once for all: joining the bits of Q5_K takes as long as multiplying them with two rows.
constexpr int kUnpackedBytes = 8 * 64;
template <Type kType> constexpr bool is_unpacked(int parts) {
  constexpr Format f = format(kType);
  return f.low < 8 && parts >= (f.high || f.table ? 2 : 4);
}
template <Type kType> void unpack(const uint8_t* tile, int64_t blocks, uint8_t* out) {
  constexpr Format f = format(kType);
  for (int64_t b = 0; b < blocks; b++) for (int at = 0; at < f.inputs / 32; at++) {
    const uint8_t* planes = tile + b * f.tile_bytes() + f.planes_at() + at * f.plane_bytes();
    unrolled<8>([&](auto j) ALWAYS_INLINE { Lanes::store(out + j * 64, codes<kType, j>(planes)); });
    out += kUnpackedBytes;
  }
}
// Codes of quad j, from planes that are packed or not.
template <Type kType, bool kUnpacked, int j> INLINE Lanes::Bytes codes_at(const uint8_t* planes) {
  if constexpr (kUnpacked) return Lanes::load(planes + j * 64);
  else return codes<kType, j>(planes);
}

// Fetches what is kAhead further, a little with each part of the work: many at once would keep the loads of that work
// waiting. Into the second level: the first one is full of activations, and every line that is fetched into it drives one
// out. Past the end at worst: a prefetch never faults.
template <int kBytes>
INLINE void fetch_ahead(const uint8_t* from) {
  UNROLL for (int at = 0; at < kBytes; at += 64) __builtin_prefetch(from + Lanes::kAhead + at, 0, 2);
}

// Adds one super-block to `v`.
template <Type kType, int kRows, bool kUnpacked>
INLINE void add_super_block(const uint8_t* tile, const uint8_t* planes, const Activations256* a, Lanes::Float* v) {
  constexpr Format f = format(kType);
  constexpr int plane_bytes = kUnpacked ? kUnpackedBytes : f.plane_bytes();
  constexpr int groups32 = f.group / 32 ? 2 : 1;  // groups of 32 inputs that a pair of scales is for
  constexpr int capacity = Lanes::capacity(f.max_code()), quads = capacity < f.group / 4 ? capacity : f.group / 4;  // of a part
  constexpr int offset = kOffset<kType>;
  constexpr bool narrow = f.has_mins && f.max_code() * 127 * 4 * quads < 32768;  // parts fit 16 bits; scales have no sign
  constexpr bool starts_at_offset = offset == 32 && Lanes::kWideParts;  // else the offset is subtracted at the end
  const auto* scales = reinterpret_cast<const int8_t*>(tile + f.halves());
  Lanes::Int sum[kRows], other[kRows];
  UNROLL for (int r = 0; r < kRows; r++) sum[r] = other[r] = Lanes::zero();
  for (int p = 0; p < 8 / groups32; p++) {
    const Lanes::Pair pair = Lanes::load_pair(scales + 32 * p);
    const Lanes::Scale scale[2] = {Lanes::first(pair), Lanes::second(pair)};
    unrolled<groups32>([&](auto h) ALWAYS_INLINE {
      const int at = p * groups32 + h;  // group of 32 inputs
      fetch_ahead<f.tile_bytes() / 8>(tile + at * (f.tile_bytes() / 8));
      Lanes::Part part[kRows];
      unrolled<8>([&](auto j) ALWAYS_INLINE {
        const Lanes::Bytes c = codes_at<kType, kUnpacked, j>(planes + at * plane_bytes);
        if constexpr (starts_at_offset && j % quads == 0)
          UNROLL for (int r = 0; r < kRows; r++) part[r] = Lanes::broadcast(a[r].minus32[2 * at + j / 4]);
        constexpr bool is_first = j % quads == 0 && !starts_at_offset;
        UNROLL for (int r = 0; r < kRows; r++) part[r] = Lanes::dot<is_first, f.is_signed()>(part[r], c, a[r].q + 32 * at + 4 * j);
        if constexpr ((j + 1) % quads == 0) {
          const Lanes::Scale s = scale[groups32 == 2 ? h : j / 4];
          UNROLL for (int r = 0; r < kRows; r++) sum[r] = Lanes::add_scaled<narrow>(sum[r], part[r], s);
        }
      });
    });
  }
  if constexpr (f.has_mins || (offset && !starts_at_offset)) UNROLL for (int p = 0; p < 128 / f.group; p++) {
    const Lanes::Pair pair = Lanes::load_pair(scales + (f.has_mins ? f.scales() : 0) + 32 * p);
    UNROLL for (int r = 0; r < kRows; r++) other[r] = Lanes::add_pairs(other[r], pair, (f.group == 16 ? a[r].sums16 : a[r].sums32) + 2 * p);
  }
  const Lanes::Float d = Lanes::load_halves(tile), d_min = Lanes::load_halves(tile + (f.has_mins ? 32 : 0));
  UNROLL for (int r = 0; r < kRows; r++) {
    const Lanes::Float scale = Lanes::broadcast(a[r].d);
    if constexpr (offset && !starts_at_offset) sum[r] = Lanes::subtract_shifted<__builtin_ctz(offset | 256)>(sum[r], other[r]);
    v[r] = Lanes::fma(Lanes::to_float(sum[r]), Lanes::multiply(d, scale), v[r]);
    if constexpr (f.has_mins) v[r] = Lanes::fnma(Lanes::to_float(other[r]), Lanes::multiply(d_min, scale), v[r]);
  }
}

template <Type kType> INLINE Lanes::Float scales(const uint8_t* tile) {
  if constexpr (format(kType).has_powers()) return Lanes::load_powers(tile);
  else return Lanes::load_halves(tile);
}
// Adds one block of 32 inputs to `v`.
template <Type kType, int kRows, bool kUnpacked>
INLINE void add_block(const uint8_t* tile, const uint8_t* planes, const Activations32* a, Lanes::Float* v) {
  constexpr Format f = format(kType);
  constexpr int quads = Lanes::capacity(f.max_code()) < 8 ? Lanes::capacity(f.max_code()) : 8;  // of a part
  Lanes::Int sum[kRows];
  fetch_ahead<f.tile_bytes()>(tile);
  constexpr int which = f.offset == 8 ? 0 : f.offset == 16 ? 1 : 2;
  UNROLL for (int r = 0; r < kRows; r++) sum[r] = kOffset<kType> ? Lanes::broadcast(a[r].offsets[which]) : Lanes::zero();
  [[maybe_unused]] Lanes::Part part[kRows];
  unrolled<8>([&](auto j) ALWAYS_INLINE {
    const Lanes::Bytes c = codes_at<kType, kUnpacked, j>(planes);
    UNROLL for (int r = 0; r < kRows; r++) {
      if constexpr (Lanes::kWideParts) sum[r] = Lanes::dot<false, f.is_signed()>(sum[r], c, a[r].q + 4 * j);
      else part[r] = Lanes::dot<j % quads == 0, f.is_signed()>(part[r], c, a[r].q + 4 * j);
    }
    if constexpr (!Lanes::kWideParts && (j + 1) % quads == 0)
      UNROLL for (int r = 0; r < kRows; r++) sum[r] = Lanes::add_part<quads == 8 && !kOffset<kType>>(sum[r], part[r]);
  });
  const Lanes::Float d = scales<kType>(tile), min = Lanes::load_halves(tile + (f.has_mins ? 32 : 0));
  UNROLL for (int r = 0; r < kRows; r++) {
    v[r] = Lanes::fma(Lanes::to_float(sum[r]), Lanes::multiply(d, Lanes::broadcast(a[r].d)), v[r]);
    if constexpr (f.has_mins) v[r] = Lanes::fma(Lanes::broadcast(a[r].d_sum), min, v[r]);
  }
}

// Adds `blocks` blocks to the sums of kRows rows, [kRows][16]. `stride`: bytes from one block of activations to the next (floats: from row
// to row). `unpacked`: the codes of these blocks, if kUnpacked.
template <Type kType, bool kUnpacked, int kRows>
void step(const uint8_t* tile, const uint8_t* unpacked, int64_t blocks, const uint8_t* activations, int64_t stride, float* sums) {
  constexpr Format f = format(kType);
  Lanes::Float v[kRows];
  UNROLL for (int r = 0; r < kRows; r++) v[r] = Lanes::load_floats(sums + r * kOutputs);
  for (int64_t b = 0; b < blocks; b++) {
    const uint8_t *w = tile + b * f.tile_bytes(), *x = activations + b * stride;
    const uint8_t* planes = kUnpacked ? unpacked + b * (f.inputs / 32) * kUnpackedBytes : w + f.planes_at();
    if constexpr (f.is_super()) add_super_block<kType, kRows, kUnpacked>(w, planes, reinterpret_cast<const Activations256*>(x), v);
    else if constexpr (f.inputs == 32) add_block<kType, kRows, kUnpacked>(w, planes, reinterpret_cast<const Activations32*>(x), v);
    else {
      const Lanes::Float weights = Lanes::load_weights<kType>(w);
      UNROLL for (int r = 0; r < kRows; r++) v[r] =
          Lanes::fma(weights, Lanes::broadcast(reinterpret_cast<const float*>(activations + r * stride)[b]), v[r]);
    }
  }
  UNROLL for (int r = 0; r < kRows; r++) Lanes::store_floats(sums + r * kOutputs, v[r]);
}

using Step = void (*)(const uint8_t*, const uint8_t*, int64_t, const uint8_t*, int64_t, float*);
template <Type kType, bool kUnpacked, int kLeast, int... kMore> constexpr Step step_of(int rows, std::integer_sequence<int, kMore...>) {
  constexpr Step steps[] = {step<kType, kUnpacked, kLeast + kMore>...};
  return steps[rows - kLeast];
}
// One of several parts has at least half of the most rows.
template <Type kType> Step step_of(int rows, bool unpacked) {
  constexpr int least = Lanes::kRows > 1 ? Lanes::kRows / 2 : 1;
  if constexpr (is_unpacked<kType>(kRowBlock)) if (unpacked)
    return step_of<kType, true, least>(rows, std::make_integer_sequence<int, Lanes::kRows - least + 1>());
  return step_of<kType, false, 1>(rows, std::make_integer_sequence<int, Lanes::kRows>());
}

void put(const float* sums, int rows, float* y, int64_t stride, const float* bias, int count) {
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < count; c++) y[r * stride + c] = bias ? sums[r * kOutputs + c] + bias[c] : sums[r * kOutputs + c];
}

template <Type kType>
void product_of(const uint8_t* tiles, int64_t n, int64_t k, const uint8_t* activations, int rows, float* y, int64_t stride,
                const float* bias, int64_t first, int64_t last) {
  constexpr Format f = format(kType);
  const int least = (rows + Lanes::kRows - 1) / Lanes::kRows, best = rows / Lanes::kBestRows, parts = best > least ? best : least;
  const int64_t blocks = k / f.inputs, row_bytes = f.is_float() ? k * 4 : activation_bytes(f.inputs),
                block_bytes = f.is_float() ? 4 : rows * row_bytes;
  const int64_t chunk = parts == 1 ? blocks : f.is_super() ? 1 : f.is_float() ? 64 : 8;  // that all rows meet before the next
  const bool unpacked = is_unpacked<kType>(parts);
  alignas(64) float sums[kRowBlock * kOutputs];
  alignas(64) uint8_t planes[is_unpacked<kType>(kRowBlock) ? 8 * kUnpackedBytes : 1];
  for (int64_t t = first; t < last; t++) {
    memset(sums, 0, sizeof(float) * kOutputs * size_t(rows));
    for (int64_t b = 0; b < blocks; b += chunk) {
      const uint8_t* tile = tiles + (t * blocks + b) * f.tile_bytes();
      const int64_t count = blocks - b < chunk ? blocks - b : chunk;
      if constexpr (is_unpacked<kType>(kRowBlock)) if (unpacked) unpack<kType>(tile, count, planes);
      for (int p = 0, r = 0; p < parts; p++) {  // groups of rows as even as possible
        const int size = (rows - r) / (parts - p);
        const uint8_t* x = activations + b * block_bytes + r * row_bytes;
        step_of<kType>(size, unpacked)(tile, planes, count, x, f.is_float() ? row_bytes : block_bytes, sums + r * kOutputs);
        r += size;
      }
    }
    put(sums, rows, y + t * kOutputs, stride, bias ? bias + t * kOutputs : nullptr,
        n - t * kOutputs < kOutputs ? int(n - t * kOutputs) : kOutputs);
  }
}
void product(int32_t type, const uint8_t* tiles, int64_t n, int64_t k, const uint8_t* activations, int rows, float* y, int64_t stride,
             const float* bias, int64_t first, int64_t last) {
  with_type(type, [&](auto constant) { product_of<constant>(tiles, n, k, activations, rows, y, stride, bias, first, last); });
}

}  // namespace
}  // namespace edgespec
