// Keys and values of several texts, and what is computed from them.
//
// A cache has `slots`, one for a text each, of `chunks` of kChunk cells; a chunk holds all layers, so that memory is
// touched as a text grows. Within a chunk, for each head of each layer: its keys, then its values.
// Keys lie in blocks of 16 cells: for each of the head's size 16 cells side by side (F16: halves; Q8_0: codes, behind them
// a half-precision scale for 32 of the head's size and each cell). Values lie in columns of 16 of the head's size: for each
// cell 16 side by side (Q8_0: pairs of such columns of codes, and then a scale for each cell).
#pragma once
#include "formats.h"

namespace edgespec {
namespace {
constexpr int kChunk = 256, kLanes = 16;
constexpr int kResult = 16;  // floats before a result's sums: maximum and total of its weights
}  // namespace

constexpr bool holds(int32_t type, int64_t size) {
  return size > 0 && size <= 1024 && (type == F16 ? size % 16 == 0 : type == Q8_0 && size % 32 == 0);
}
// of a key or a value of a cell
constexpr int64_t vector_bytes(int32_t type, int64_t size) {
  return type == F16 ? 2 * size : size / 32 * 34;
}
constexpr int64_t key_block_bytes(int32_t type, int64_t size) { return kLanes * vector_bytes(type, size); }

struct Head { int size, rotary; float epsilon; };  // rotary: half of what is rotated

// Some queries (pairs of a row and a head) on the cells of a chunk.
struct Attend {
  int32_t type;
  int size, pairs;
  const uint8_t *keys, *values;
  int direct;  // cells from here on (a multiple of 16) are in the tails; kChunk: none
  const uint8_t *tail_keys, *tail_values;
  int tail_cells;
  const float* queries;    // [pairs][size]
  const int *begin, *end;  // the cells that each pair sees
  float cap;               // of scores: cap * tanh(score / cap); 0: none
  float *scores, *results; // [pairs][kChunk]; [pairs][stride]: maximum, total of weights, from kResult on sums of values
  int64_t stride;
};
struct Attention {
  void (*norm)(const float* x, const float* delta, const float* weight, float epsilon, int64_t width, float* out, float* sum);
  void (*gate)(int kind, const float* x, const float* up, int64_t count, float* out);
  void (*prepare)(const float* x, const Head& head, const float* weight, const float* cosines, const float* sines, float scale, float* out);
  void (*put)(int32_t type, int size, const float* key, const float* value, uint8_t* keys, uint8_t* values, int cell, int cells);
  void (*attend)(const Attend& a);
  void (*merge)(float* into, const float* from, int size, bool is_first);
  void (*finish)(const float* result, int size, const float* sink, const float* gate, float* out);
};

// A cache in a program's memory. A graph names it by a number.
struct Cache {
  int64_t number;
  uint8_t* memory;
  int32_t type;
  int64_t slots, chunks, heads, chunk_bytes;
  int32_t* sizes;     // of all layers' heads
  int64_t* starts;    // of their keys in a chunk
  Cache* next;

  uint8_t* keys(int64_t slot, int64_t chunk, int64_t head) const { return memory + (slot * chunks + chunk) * chunk_bytes + starts[head]; }
  uint8_t* values(int64_t slot, int64_t chunk, int64_t head) const {
    return keys(slot, chunk, head) + kChunk * vector_bytes(type, sizes[head]);
  }
};

}  // namespace edgespec
