// Weights in tiles: 16 outputs x one block of inputs, side by side so that four consecutive inputs of eight outputs are
// 32 consecutive bytes. One tile is read and unpacked once for all rows of activations that meet it.
#pragma once
#include <cstddef>
#include <cstdint>

namespace edgespec {

constexpr int kOutputs = 16;   // outputs of a tile
constexpr int kRowBlock = 64;  // rows of activations that meet a tile together

enum Type : int32_t { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23, BF16 = 30 };  // GGML's numbers

struct TileQ4K { uint16_t d[16], dmin[16]; uint8_t scales[8][16]; uint8_t mins[4][16][2]; uint8_t q[64][32]; };
struct TileQ6K { uint16_t d[16]; int8_t scales[8][16][2]; uint8_t low[64][32]; uint8_t high[32][32]; uint8_t pad[32]; };
struct TileQ41 { uint16_t d[16], m[16]; uint8_t q[8][32]; };
struct TileQ40 { uint16_t d[16]; uint8_t q[8][32]; };
struct TileQ80 { uint16_t d[16]; uint8_t q[8][64]; };  // codes + 128

struct alignas(64) Activations256 { float d; int16_t sums32[8]; int16_t sums16[16]; int8_t pad[12]; int8_t q[256]; };
struct alignas(8) Activations32 { float d; int32_t sum; int8_t q[32]; };

struct TypeInfo { int64_t inputs, row_bytes, tile_bytes, activation_bytes; };  // of one block
inline const TypeInfo* type_info(int32_t type) {
  static const TypeInfo q4k = {256, 144, sizeof(TileQ4K), sizeof(Activations256)}, q6k = {256, 210, sizeof(TileQ6K), sizeof(Activations256)};
  static const TypeInfo q41 = {32, 20, sizeof(TileQ41), sizeof(Activations32)}, q40 = {32, 18, sizeof(TileQ40), sizeof(Activations32)}, q80 = {32, 34, sizeof(TileQ80), sizeof(Activations32)};
  switch (type) { case Q4_K: return &q4k; case Q6_K: return &q6k; case Q4_1: return &q41; case Q4_0: return &q40; case Q8_0: return &q80; default: return nullptr; }
}

// One instruction set's kernels.
struct Path {
  const char* name;
  // Rows of x [rows, k] -> blocks of activations [k / block][rows].
  void (*quantise)(int64_t block, const float* x, int64_t k, int64_t rows, uint8_t* out);
  // Tiles first..last of y [rows, stride] = activations x weights + bias (or null); y and bias begin at the matrix's first output.
  void (*product)(int32_t type, const uint8_t* tiles, int64_t n, int64_t k, const uint8_t* activations, int rows, float* y, int64_t stride, const float* bias, int64_t first, int64_t last);
};
const Path* path_in_use();

int64_t packed_bytes(int32_t type, int64_t n, int64_t k);  // -1: unknown type, bad size
int64_t activation_bytes(int32_t type, int64_t k, int64_t rows);
bool lookup(int32_t type, const uint8_t* tiles, int64_t n, int64_t k, const int64_t* ids, int64_t count, float* out);

}  // namespace edgespec
