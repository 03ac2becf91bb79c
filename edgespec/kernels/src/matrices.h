// Products of rows with matrices of tiles, as the operators of weights need them.
//
// Rows have `places`, those of a group (an expert) side by side. A matrix is those of all groups one below the other, and
// a place meets its group's. So the tiles of every group that has places are read once. A row meets the same operations
// in the same order whatever rows are beside it.
#pragma once
#include "operator.h"

namespace edgespec {
constexpr int kMostMatrices = 3;

struct Matrix {
  int64_t type, outputs, inputs;  // of one group
  const uint8_t* tiles;           // of constant initializers, else null
  const float* bias;              // [groups][outputs] or null
  int64_t bytes;                  // of a group's tiles
  int kind;                       // of activations
  int64_t num_tiles() const { return (outputs + kOutputs - 1) / kOutputs; }
  // Checks the type and the sizes, and takes the tiles of input `at` if they are constant.
  OrtStatus* open(const OrtKernelInfo* info, const char* called, size_t at, const char* name, int64_t groups);
  OrtStatus* read_tiles(const OrtKernelContext* context, size_t at, const char* name, int64_t groups);
};

struct Places {
  int64_t count;
  uint8_t* activations[kKinds];
  float* y[kMostMatrices];
  int64_t stride[kMostMatrices];
};
struct Products {
  const Kernels* kernels;
  Matrix matrices[kMostMatrices];
  size_t num_matrices;
  int gate;
  float cap;       // y is cap * tanh(y / cap); 0: as it is
  const float* x;  // a place's begins at x_stride times its row
  int64_t x_stride;
  const int32_t *row, *group;  // by place, groups ascending; null: the place itself, 0
  const int64_t* first;        // [groups + 1]: first places
  const int32_t* groups;       // those that have places
  int64_t num_groups, most_pieces;
  Places all;
  OrtStatus* run();

 private:
  Places rest;  // what the codes of some, `rest_of`, leave: 15 bits instead of 8
  int64_t *rest_of, block_rows, pieces, tiles;
  bool *is_uneven, has_kind[kKinds];

  int64_t inputs() const { return matrices[0].inputs; }
  int32_t group_of(const Places& some, int64_t at) const { return group ? group[&some == &rest ? rest_of[at] : at] : 0; }
  uint8_t* block(const Places& some, int kind, int64_t start) const {
    return some.activations[kind] + activation_bytes(kInputs[kind], inputs(), start);
  }
  bool quantise(int kind, int64_t place, float* left) const;
  void quantise(int64_t place) const;
  OrtStatus* quantise_rest(Scratch* scratch);
  template <class F> int64_t for_blocks(const Places& some, int64_t at, F f) const;
  void multiply(const Places& some, int64_t at, int64_t begin, int64_t end) const;
  void run_piece(int64_t piece) const;
};
}  // namespace edgespec
