// Attention over a cache of keys and values, for one instruction set (`Lanes`, as in products.h).
//
// Same bits everywhere: a score is one sum over the head's size in order, a result one sum over the cells in order. Cells
// lie in chunks of kChunk; a row's chunks are computed apart and merged in order. So a row's bits depend on its own cells
// only: not on the rows beside it, on which cells of a tree hold them, nor on how chunks are shared out among threads.
#pragma once
#include <cmath>
#include <cstring>
#include "cache.h"
#include "floats.h"
#include "formats.h"

namespace edgespec {
namespace {

// A head of a query or of a key: normed if there is a weight, rotated if there are angles (Su et al., 2021; halves), scaled.
void prepare(const float* x, const Head& h, const float* weight, const float* cosines, const float* sines, float scale, float* out) {
  const float inverse = weight ? inverse_root_mean_square(x, h.size, h.epsilon) : 1.f;
  if (weight) for (int i = 0; i < h.size; i++) out[i] = x[i] * inverse * weight[i];
  else memcpy(out, x, sizeof(float) * size_t(h.size));
  if (cosines) for (int i = 0; i < h.rotary; i++) {
    const float a = out[i], b = out[i + h.rotary];
    out[i] = a * cosines[i] - b * sines[i];
    out[i + h.rotary] = b * cosines[i] + a * sines[i];
  }
  if (scale != 1.f) for (int i = 0; i < h.size; i++) out[i] *= scale;
}

// ---- the cache
// Codes of 8 bits and their scale, as ggml's Q8_0.
void codes_of(const float* x, int8_t* codes, uint8_t* scale) {
  int sums[2];
  const uint32_t top = largest_bits(x, 32);
  const float largest = float_of_bits(top);
  const uint16_t half = half_of(top >= 0x7f800000 ? float_of_bits(0x7fc00000) : largest / 127.f);
  memcpy(scale, &half, 2);
  if (top < 0x0d800000 || top >= 0x7f800000) memset(codes, 0, 32);  // below 2^-100, as `scale_of`
  else codes32(x, 127.f / largest, codes, sums);
}
// Writes one cell of a chunk.
void put(int32_t type, int size, const float* key, const float* value, uint8_t* keys, uint8_t* values, int cell, int cells) {
  const int block = cell / kLanes, lane = cell % kLanes;
  for (int start = 0; start < size; start += 32) {
    const int count = size - start < 32 ? size - start : 32;
    if (type == F16) {
      alignas(64) uint16_t halves[32];
      for (int i = 0; i < count; i += kLanes)
        Lanes::store_halves(reinterpret_cast<uint8_t*>(halves + i), Lanes::load_floats(key + start + i));
      uint8_t* to = keys + (int64_t(block) * size + start) * kLanes * 2 + lane * 2;
      for (int i = 0; i < count; i++) memcpy(to + i * kLanes * 2, halves + i, 2);
      for (int i = 0; i < count; i += kLanes)
        Lanes::store_halves(values + (int64_t(start + i) / kLanes * cells + cell) * kLanes * 2, Lanes::load_floats(value + start + i));
    } else {
      int8_t codes[32];
      uint8_t* in = keys + int64_t(block) * key_block_bytes(type, size);
      codes_of(key + start, codes, in + size * kLanes + start / 32 * kLanes * 2 + lane * 2);
      for (int i = 0; i < 32; i++) in[(start + i) * kLanes + lane] = uint8_t(codes[i]);
      uint8_t* group = values + int64_t(start / 32) * 34 * cells;
      codes_of(value + start, codes, group + 32 * cells + 2 * cell);
      for (int half = 0; half < 2; half++) memcpy(group + (half * cells + cell) * kLanes, codes + half * kLanes, kLanes);
    }
  }
}
// What scores and results are sums of: vectors of 16 floats by `k` (of 16 cells by the head's size; of 16 of the head's
// size by cells), for vector number `at` of them. Nothing is fetched ahead by itself, as vectors are pages apart.
template <int32_t kType> struct Keys {
  static constexpr bool kAdds = false;
  const uint8_t* data; int size;
  INLINE const uint8_t* place(int at, int k) const {
    return data + int64_t(at) * key_block_bytes(kType, size) + k * kLanes * (kType == F16 ? 2 : 1);
  }
  INLINE Lanes::Float vector(int at, int k) const {
    if constexpr (kType == F16) return Lanes::load_halves(place(at, k));
    else return Lanes::multiply(Lanes::load_codes(place(at, k)), Lanes::load_halves(place(at, size) + k / 32 * kLanes * 2));
  }
};
template <int32_t kType> struct Values {
  static constexpr bool kAdds = true;
  const uint8_t* data; int cells;
  INLINE const uint8_t* place(int at, int k) const {
    return data + (kType == F16 ? (int64_t(at) * cells + k) * kLanes * 2 : int64_t(at / 2) * 34 * cells + (at % 2 * cells + k) * kLanes);
  }
  INLINE Lanes::Float vector(int at, int k) const {
    if constexpr (kType == F16) return Lanes::load_halves(place(at, k));
    else
      return Lanes::multiply(Lanes::load_codes(place(at, k)),
                             Lanes::broadcast_half(data + int64_t(at / 2) * 34 * cells + 32 * cells + 2 * k));
  }
};

// Adds factors [pair][k] times vectors for k in begin..end, in order, to sums [pair][16] (or to nothing) of kAt vectors from `at` on.
template <int kPairs, int kAt, class Vectors>
void accumulate(const Vectors& vectors, int at, int begin, int end, const float* factors, int64_t stride, float* sums,
                int64_t sums_stride) {
  Lanes::Float v[kPairs][kAt];
  UNROLL for (int p = 0; p < kPairs; p++) UNROLL for (int i = 0; i < kAt; i++) v[p][i] =
      Vectors::kAdds ? Lanes::load_floats(sums + p * sums_stride + i * kLanes) : Lanes::broadcast(0.f);
  for (int k = begin; k < end; k++) {
    Lanes::Float x[kAt];
    UNROLL for (int i = 0; i < kAt; i++) {
      __builtin_prefetch(vectors.place(at + i + kAt, k));
      x[i] = vectors.vector(at + i, k);
    }
    UNROLL for (int p = 0; p < kPairs; p++) {
      const Lanes::Float factor = Lanes::broadcast(factors[p * stride + k]);
      UNROLL for (int i = 0; i < kAt; i++) v[p][i] = Lanes::fma(factor, x[i], v[p][i]);
    }
  }
  UNROLL for (int p = 0; p < kPairs; p++) UNROLL for (int i = 0; i < kAt; i++)
      Lanes::store_floats(sums + p * sums_stride + i * kLanes, v[p][i]);
}
template <class Vectors> using Accumulate = void (*)(const Vectors&, int, int, int, const float*, int64_t, float*, int64_t);
constexpr int at_once(int pairs) { return Lanes::kSums / pairs >= 4 ? 4 : Lanes::kSums / pairs >= 2 ? 2 : 1; }
template <class Vectors, int... kPairs> Accumulate<Vectors> accumulate_of(int pairs, bool one, std::integer_sequence<int, kPairs...>) {
  static constexpr Accumulate<Vectors> several[] = {accumulate<kPairs + 1, at_once(kPairs + 1), Vectors>...},
                                       single[] = {accumulate<kPairs + 1, 1, Vectors>...};
  return one ? single[pairs - 1] : several[pairs - 1];
}
// The same for the vectors first..last.
template <class Vectors>
void accumulate_all(const Vectors& vectors, int first, int last, int pairs, int begin, int end, const float* factors, int64_t stride,
                    float* sums, int64_t sums_stride) {
  const int step = at_once(pairs);
  for (int at = first, next; at < last && begin < end; at = next) {
    const bool one = at + step > last;
    next = at + (one ? 1 : step);
    accumulate_of<Vectors>(pairs, one, std::make_integer_sequence<int, Lanes::kPairs>())(vectors, at, begin, end, factors, stride,
                                                                                         sums + (at - first) * kLanes, sums_stride);
  }
}
// exp(scores - their maximum) of a pair in place; maximum and sum to its result.
void soften(const Attend& a, int pair) {
  float *scores = a.scores + int64_t(pair) * kChunk, *result = a.results + pair * a.stride;
  const int begin = a.begin[pair], end = a.end[pair], low = begin / kLanes * kLanes, high = (end + kLanes - 1) / kLanes * kLanes;
  if (a.cap > 0) cap(a.cap, scores + low, high - low);
  for (int i = low; i < begin; i++) scores[i] = -INFINITY;
  for (int i = end; i < high; i++) scores[i] = -INFINITY;
  float tops[kLanes], sums[kLanes] = {}, top = -INFINITY;
  Lanes::Float highest = Lanes::broadcast(top);
  for (int at = low; at < high; at += kLanes) highest = Lanes::larger(Lanes::load_floats(scores + at), highest);
  Lanes::store_floats(tops, highest);
  for (int i = 0; i < kLanes; i++) top = tops[i] > top ? tops[i] : top;
  for (int at = low; at < high; at += kLanes) for (int i = 0; i < kLanes; i++) {
    const float e = exponential(scores[at + i] - top);
    scores[at + i] = e;
    sums[i] += e;
  }
  result[0] = top;
  result[1] = sum_of(sums);
}
constexpr int kStep = at_once(Lanes::kPairs);  // vectors that all pairs meet while they are in the first-level cache
template <int32_t kType> void attend_to(const Attend& a) {
  const int parts = (a.pairs + Lanes::kPairs - 1) / Lanes::kPairs;
  const auto for_groups = [&](auto f) {  // of pairs, as even as possible
    for (int part = 0, first = 0, pairs; part < parts; part++, first += pairs) f(first, pairs = (a.pairs - first) / (parts - part));
  };
  int low = kChunk, high = 0;
  for (int p = 0; p < a.pairs; p++) { low = a.begin[p] < low ? a.begin[p] : low; high = a.end[p] > high ? a.end[p] : high; }
  low = low / kLanes * kLanes; high = (high + kLanes - 1) / kLanes * kLanes;
  // The cells from..to, those before a.direct in the chunk: f(where they are, the cell that begins there, cells there, from, to).
  const auto in_both = [&](const uint8_t* data, const uint8_t* tail, int from, int to, auto f) {
    f(data, 0, kChunk, from, to < a.direct ? to : a.direct);
    f(tail, a.direct, a.tail_cells, from > a.direct ? from : a.direct, to);
  };
  in_both(a.keys, a.tail_keys, low, high, [&](const uint8_t* data, int zero, int, int from, int to) {
    for (int cell = from; cell < to; cell += kStep * kLanes) for_groups([&](int first, int pairs) {
      const int last = cell + kStep * kLanes < to ? cell + kStep * kLanes : to;
      const float* queries = a.queries + int64_t(first) * a.size;
      float* scores = a.scores + int64_t(first) * kChunk + cell;
      accumulate_all(Keys<kType>{data, a.size}, (cell - zero) / kLanes, (last - zero) / kLanes, pairs, 0, a.size, queries, a.size, scores,
                     kChunk);
    });
  });
  for (int p = 0; p < a.pairs; p++) {
    soften(a, p);
    memset(a.results + p * a.stride + kResult, 0, sizeof(float) * size_t(a.size));
  }
  for (int at = 0, last; at < a.size / kLanes; at = last) for_groups([&](int first, int pairs) {
    last = at + kStep < a.size / kLanes ? at + kStep : a.size / kLanes;
    const auto add = [&](int pair, int count, int from, int to) {
      in_both(a.values, a.tail_values, from, to, [&](const uint8_t* data, int zero, int cells, int from, int to) {
        const float* weights = a.scores + int64_t(pair) * kChunk + zero;
        float* sums = a.results + pair * a.stride + kResult + at * kLanes;
        accumulate_all(Values<kType>{data, cells}, at, last, count, from - zero, to - zero, weights, kChunk, sums, a.stride);
      });
    };
    int begin = 0, end = kChunk;  // of the cells that all of them see
    for (int p = first; p < first + pairs; p++) { begin = a.begin[p] > begin ? a.begin[p] : begin; end = a.end[p] < end ? a.end[p] : end; }
    const bool is_shared = begin < end;
    for (int p = first; p < first + pairs; p++) add(p, 1, a.begin[p], is_shared ? begin : a.end[p]);
    add(first, pairs, begin, end);
    for (int p = first; is_shared && p < first + pairs; p++) add(p, 1, end, a.end[p]);
  });
}
void attend(const Attend& a) { a.type == F16 ? attend_to<F16>(a) : attend_to<Q8_0>(a); }

// Adds a chunk's result to that of the chunks before it.
void merge(float* into, const float* from, int size, bool is_first) {
  if (is_first) { memcpy(into, from, sizeof(float) * size_t(size + kResult)); return; }
  const float top = into[0] > from[0] ? into[0] : from[0], old = exponential(into[0] - top), fresh = exponential(from[0] - top);
  into[0] = top;
  into[1] = into[1] * old + from[1] * fresh;
  for (int i = kResult; i < kResult + size; i++) into[i] = into[i] * old + from[i] * fresh;
}
// The mean of the values, times the sigmoid of `gate` (or null); `sink` (or null): a score of its own without a value.
void finish(const float* result, int size, const float* sink, const float* gate, float* out) {
  float factor = 1.f, total = result[1];
  if (sink) {
    const float top = result[0] > *sink ? result[0] : *sink;
    factor = exponential(result[0] - top);
    total = total * factor + exponential(*sink - top);
  }
  for (int i = 0; i < size; i++) out[i] = result[kResult + i] * factor / total;
  if (gate) for (int i = 0; i < size; i++) out[i] /= 1.f + exponential(-gate[i]);
}

constexpr Attention kAttention = {norm, gate, prepare, put, attend, merge, finish};

}  // namespace
}  // namespace edgespec
