// Weight types, their tiles, and activations.
//
// A tile holds 16 outputs x one block of inputs (256, 32, or 1). Its codes lie in planes of 64 bytes: byte 4 * output + i
// belongs to input 4 * quad + i, so that one broadcast of four activations meets all outputs. A plane has `low` bits of
// 8 / low quads side by side in each byte; types of 5, 6 or 3 bits have the upper bits in planes of their own. One tile is
// read and unpacked once for all rows of activations.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define ALWAYS_INLINE __attribute__((always_inline))
#define INLINE ALWAYS_INLINE inline
#define OP ALWAYS_INLINE static  // an operation of Lanes
#define UNROLL _Pragma("GCC unroll 16")

namespace edgespec {
namespace {  // each unit has its own: the linker must not pick one that was compiled for another instruction set

constexpr int kOutputs = 16;   // of a tile
constexpr int kRowBlock = 64;  // rows of activations that meet a tile while it is in the first-level cache

enum Type : int32_t {  // GGML's numbers
  F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11,
  Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23, BF16 = 30, MXFP4 = 39
};

// What the codes of IQ4_NL and IQ4_XS and those of MXFP4 (4-bit floats, doubled) stand for, plus 128.
constexpr uint8_t kIq4Values[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t kMxfp4Values[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};

struct Format {
  int inputs;      // of a block; 0: unknown type
  int row_bytes;   // of a block of one row in a GGUF
  int low, high;   // bits of a code in the lower and in the upper planes; low of F32, F16, BF16: bits of a weight
  int offset;      // weight = scale * (code - offset)
  int group;       // inputs that share one of a super-block's integer scales; 0: the block has one scale
  bool has_mins;   // weight = scale * code - min (super-blocks), scale * code + min (blocks of 32)
  const uint8_t* table;  // a code is a position in it; null: in none

  constexpr bool is_float() const { return inputs == 1; }
  constexpr bool is_super() const { return inputs == 256; }
  constexpr bool is_signed() const { return offset == 128; }  // codes of all 8 bits
  constexpr bool has_powers() const { return table == kMxfp4Values; }  // scales are powers of two: a byte, the exponent of a float
  constexpr int max_code() const { return is_signed() ? 255 : (1 << (low + high)) - 1; }
  // Tiles: halves of the scales [16], of the mins [16]; int8 scales, mins [groups / 2][16][2]; planes of 32 inputs each.
  constexpr int halves() const { return is_float() ? 0 : has_powers() ? kOutputs : kOutputs * 2 * (has_mins ? 2 : 1); }
  constexpr int scales() const { return is_super() ? inputs / group * kOutputs : 0; }
  constexpr int planes_at() const { return halves() + scales() * (has_mins ? 2 : 1); }
  constexpr int plane_bytes() const { return 64 * (low + high); }
  constexpr int tile_bytes() const { return is_float() ? low / 8 * kOutputs : planes_at() + inputs / 32 * plane_bytes(); }
};

constexpr Format format(int32_t type) {
  switch (type) {
    case F32: return {1, 4, 32, 0, 0, 0, false, nullptr};
    case F16: case BF16: return {1, 2, 16, 0, 0, 0, false, nullptr};
    case Q4_0: return {32, 18, 4, 0, 8, 0, false, nullptr};
    case Q4_1: return {32, 20, 4, 0, 0, 0, true, nullptr};
    case Q5_0: return {32, 22, 4, 1, 16, 0, false, nullptr};
    case Q5_1: return {32, 24, 4, 1, 0, 0, true, nullptr};
    case Q8_0: return {32, 34, 8, 0, 128, 0, false, nullptr};
    case IQ4_NL: return {32, 18, 4, 0, 128, 0, false, kIq4Values};
    case MXFP4: return {32, 17, 4, 0, 128, 0, false, kMxfp4Values};
    case Q2_K: return {256, 84, 2, 0, 0, 16, true, nullptr};
    case Q3_K: return {256, 110, 2, 1, 4, 16, false, nullptr};
    case Q4_K: return {256, 144, 4, 0, 0, 32, true, nullptr};
    case Q5_K: return {256, 176, 4, 1, 0, 32, true, nullptr};
    case Q6_K: return {256, 210, 4, 2, 32, 16, false, nullptr};
    case IQ4_XS: return {256, 136, 4, 0, 128, 32, false, kIq4Values};
    default: return {};
  }
}

// Calls f with the type as a constant. The type must be known.
template <Type kType> using TypeConstant = std::integral_constant<Type, kType>;
template <class F> auto with_type(int32_t type, F f) {
  switch (type) {
    case F16: return f(TypeConstant<F16>());
    case BF16: return f(TypeConstant<BF16>());
    case Q4_0: return f(TypeConstant<Q4_0>());
    case Q4_1: return f(TypeConstant<Q4_1>());
    case Q5_0: return f(TypeConstant<Q5_0>());
    case Q5_1: return f(TypeConstant<Q5_1>());
    case Q8_0: return f(TypeConstant<Q8_0>());
    case IQ4_NL: return f(TypeConstant<IQ4_NL>());
    case Q2_K: return f(TypeConstant<Q2_K>());
    case Q3_K: return f(TypeConstant<Q3_K>());
    case Q4_K: return f(TypeConstant<Q4_K>());
    case Q5_K: return f(TypeConstant<Q5_K>());
    case Q6_K: return f(TypeConstant<Q6_K>());
    case IQ4_XS: return f(TypeConstant<IQ4_XS>());
    case MXFP4: return f(TypeConstant<MXFP4>());
    default: return f(TypeConstant<F32>());
  }
}

// Activations of one row and block: value = d * q, |q| <= 127. A block with a value that is not finite has d = NaN, q = 0.
struct Activations256 {
  float d;
  int16_t sums32[8], sums16[16];  // of q
  int32_t minus32[16];            // -32 * sums16
  int8_t q[256];
};
struct Activations32 {
  float d, d_sum;      // d_sum = d * sum of q
  int32_t offsets[3];  // -8, -16, -128 times the sum of q
  int8_t q[32];
};
constexpr int64_t activation_bytes(int inputs) {
  return inputs == 256 ? sizeof(Activations256) : inputs == 32 ? sizeof(Activations32) : sizeof(float);
}

constexpr int64_t activation_bytes(int inputs, int64_t k, int64_t rows) { return k / inputs * rows * activation_bytes(inputs); }
// Kinds of activations: blocks of so many inputs.
constexpr int kKinds = 3, kInputs[kKinds] = {1, 32, 256};
constexpr int kind_of(int64_t type) { return format(int32_t(type)).inputs == 256 ? 2 : format(int32_t(type)).inputs == 32 ? 1 : 0; }

// ---- numbers of two bytes, at any address
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

enum { kNoGate = 0, kSilu = 1, kGelu = 2, kClamped = 3 };  // see `gate`

struct Attention;
struct Recurrence;

// One instruction set's kernels. All give the same bits.
struct Kernels {
  // Row `row` of a block of `rows` rows: x [k] -> activations [k / inputs][rows]; [rows][k] if inputs is 1. With a gate x is
  // [2 k], and what is quantised is the gate of its first half times its second. Returns whether the row is uneven: what its
  // codes leave, which goes to `rest` [k] (or null), is worth a second product.
  bool (*quantise)(int inputs, int gate, const float* x, int64_t k, int64_t row, int64_t rows, uint8_t* out, float* rest);
  // y [rows, stride] of the outputs of the tiles first..last; rows <= kRowBlock. y and bias (or null) begin at the matrix's
  // first output.
  void (*product)(int32_t type, const uint8_t* tiles, int64_t n, int64_t k, const uint8_t* activations, int rows, float* y, int64_t stride,
                  const float* bias, int64_t first, int64_t last);
  const Attention* attention;
  const Recurrence* recurrence;
};
const Kernels& kernels_in_use();
const char* path_in_use();
bool choose_path(const char* name);

int64_t packed_bytes(int32_t type, int64_t n, int64_t k);  // -1: unknown type or bad size

// Rows in a GGUF's layout -> tiles. False if a scale (or a weight of a float type) is not finite.
bool pack(int32_t type, const uint8_t* rows, int64_t num_rows, int64_t k, uint8_t* tiles);
// The same rows in Q4_0; k is a multiple of 32. False if a weight is not finite.
bool narrow(int32_t type, const uint8_t* rows, int64_t num_rows, int64_t k, uint8_t* out);
// Dequantised rows, with the roundings of ggml. False, and nothing written, if an id is out of range.
bool lookup(int32_t type, const uint8_t* tiles, int64_t n, int64_t k, const int64_t* ids, int64_t count, float* out);

}  // namespace edgespec
