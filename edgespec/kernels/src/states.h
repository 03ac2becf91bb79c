// Running states of several texts: what recurrent layers keep of them instead of keys and values.
//
// A slot has for each layer a state S, made of the rows before position `start`, and a log of the rows from there on: what
// each of them adds to S. A pass takes from the log what is before its own first row, and logs its own rows instead of
// adding them. So a rejected row has never been in S: to drop it is to forget it, and what is kept has the bits that it
// has without drafts. S of a head is [value_size / 16][size][16]: for 16 of a value's numbers, each of the key's numbers.
// A row of the log is at its cell modulo the log's rows. The rows that a convolution reads before `start` are there, too.
#pragma once
#include <initializer_list>
#include "formats.h"

namespace edgespec {
constexpr int kMostTaps = 16, kMostLogged = 256;

// Sizes of a layer: inputs of its convolution (queries, keys, values), inputs that a result sees, heads, numbers of a key
// and of a value. Without heads it has the convolution alone.
struct StateShape {
  int32_t channels, taps, key_heads, value_heads, size, value_size;
  bool is_possible() const {
    if (channels < 1 || channels > 1 << 20 || taps < 2 || taps > kMostTaps) return false;
    if (!value_heads) return !key_heads && !size && !value_size;
    for (const int32_t each : {size, value_size}) if (each < 1 || each > 1024 || each % 16) return false;
    return key_heads > 0 && key_heads <= 4096 && value_heads > 0 && value_heads <= 4096 && value_heads % key_heads == 0 &&
           channels == 2 * keys() + values();
  }
  int64_t keys() const { return int64_t(key_heads) * size; }
  int64_t values() const { return int64_t(value_heads) * value_size; }
  int64_t state_floats() const { return values() * size; }
  int64_t row_floats() const { return (channels + keys() + values() + value_heads + 15) / 16 * 16; }
};

// A layer's part of a slot, in memory.
struct State {
  struct Header { int64_t start, end, unused[6]; };
  const StateShape* shape;
  uint8_t* memory;
  int64_t rows;  // of the log and before it

  static int64_t bytes(const StateShape& s, int64_t log) {
    return int64_t(sizeof(Header)) + 4 * (s.state_floats() + (log + s.taps - 1) * s.row_floats());
  }
  Header& header() const { return *reinterpret_cast<Header*>(memory); }
  float* head(int64_t h) const { return reinterpret_cast<float*>(memory + sizeof(Header)) + h * shape->size * shape->value_size; }
  float* inputs(int64_t cell) const { return head(0) + shape->state_floats() + cell % rows * shape->row_floats(); }
  float* keys(int64_t cell) const { return inputs(cell) + shape->channels; }
  float* deltas(int64_t cell) const { return keys(cell) + shape->keys(); }
  float* decays(int64_t cell) const { return deltas(cell) + shape->values(); }
};

// States in a program's memory, which graphs name by a number. `floors`, by slot: positions that stay in the log while there is room.
struct States {
  int64_t number;
  uint8_t* memory;
  int64_t slots, layers, log, slot_bytes;
  const int64_t* floors;
  StateShape* shapes;
  int64_t* starts;  // of the layers in a slot
  States* next;

  State at(int64_t slot, int64_t layer) const {
    return {shapes + layer, memory + slot * slot_bytes + starts[layer], log + shapes[layer].taps - 1};
  }
};

// A row's numbers for 16 times `columns` values of a head. What is written is beta * (value - taken * what S has of the
// key), and a result is what the query finds of that, and `skip` values.
struct Asked {
  const float *key, *query, *value;
  float decay, beta, overlap, taken, skip;  // overlap: query times key
};
struct Recurrence {
  int columns;  // of a head's state that are computed at once
  // Sum of inputs [taps][channels], in this order, times the kernel [taps][channels], and `shift` [channels] or null.
  void (*convolve)(const float* const* inputs, const float* kernel, const float* shift, int taps, int64_t channels, bool is_activated,
                   float* out);
  void (*to_unit)(float* x, int64_t size, float factor);
  float (*dot)(const float* x, const float* y, int64_t size);
  void (*rates)(const float* written, const float* times, const float* bias, const float* rate, int64_t heads, float* betas, float* decays);
  // to = decay * from + key * delta
  void (*add)(const float* from, float* to, int columns, int size, const float* key, float decay, const float* delta);
  void (*ask)(const float* state, int columns, int size, const Asked& row, float* delta, float* y);
};
}  // namespace edgespec
