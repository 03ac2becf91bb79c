// A GGUF's rows -> tiles, and rows of tiles -> floats. The layouts of blocks are those of ggml-common.h; the order of float
// operations is that of ggml's dequantize_row_*.
#include <cstring>
#include "formats.h"

namespace edgespec {

int64_t packed_bytes(int32_t type, int64_t n, int64_t k) {
  const Format f = format(type);
  int64_t size;
  if (!f.inputs || n < 1 || k < 1 || k % f.inputs) return -1;
  return __builtin_mul_overflow(n / kOutputs + (n % kOutputs != 0), k / f.inputs, &size) ||
                 __builtin_mul_overflow(size, f.tile_bytes(), &size)
             ? -1
             : size;
}

namespace {

// One block of one row: a code for each input, integer scales and mins of its groups, halves.
struct Block {
  alignas(16) uint8_t codes[256];
  int8_t scales[16], mins[16];
  const uint8_t *d, *min;  // in the GGUF, or the next
  uint8_t power;
};

void split_nibbles(const uint8_t* p, int count, uint8_t* low, uint8_t* high) {
  for (int i = 0; i < count; i++) { low[i] = p[i] & 15; high[i] = p[i] >> 4; }
}
// Bit i of the 32 bits at p -> bit 4 of code i: eight codes at a time.
void add_fifth_bits(const uint8_t* p, uint8_t* codes) {
  for (int i = 0; i < 4; i++) {
    uint64_t eight;
    memcpy(&eight, codes + 8 * i, 8);
    const uint64_t bit_in_each = p[i] * 0x0101010101010101u & 0x8040201008040201u;
    eight |= ((bit_in_each + 0x7f7f7f7f7f7f7f7fu) & 0x8080808080808080u) >> 3;
    memcpy(codes + 8 * i, &eight, 8);
  }
}
// 6-bit scales and mins of eight groups.
void scales_and_mins(const uint8_t* p, int8_t* scales, int8_t* mins) {
  for (int g = 0; g < 4; g++) {
    scales[g] = p[g] & 63; scales[g + 4] = int8_t((p[g + 8] & 15) | p[g] >> 6 << 4);
    mins[g] = p[g + 4] & 63; mins[g + 4] = int8_t(p[g + 8] >> 4 | p[g + 4] >> 6 << 4);
  }
}
template <Type type> void unpack(const uint8_t* p, Block* b) {
  uint8_t* c = b->codes;
  b->d = p; b->min = p + 2;
  if constexpr (type == Q4_0 || type == IQ4_NL) split_nibbles(p + 2, 16, c, c + 16);
  if constexpr (type == MXFP4) {
    split_nibbles(p + 1, 16, c, c + 16);
    b->power = p[0] ? p[0] - 1 : 0;  // of 2^(p[0] - 128); what is below the normal numbers becomes zero
    b->d = &b->power;
  }
  if constexpr (type == Q4_1) split_nibbles(p + 4, 16, c, c + 16);
  if constexpr (type == Q5_0) { split_nibbles(p + 6, 16, c, c + 16); add_fifth_bits(p + 2, c); }
  if constexpr (type == Q5_1) { split_nibbles(p + 8, 16, c, c + 16); add_fifth_bits(p + 4, c); }
  if constexpr (type == Q8_0) for (int i = 0; i < 32; i++) c[i] = p[2 + i] ^ 0x80;
  if constexpr (type == Q2_K || type == Q3_K) {
    const uint8_t* q = type == Q2_K ? p + 16 : p + 32;
    for (int g = 0; g < 8; g++) for (int i = 0; i < 32; i++) c[32 * g + i] = q[g / 4 * 32 + i] >> g % 4 * 2 & 3;
  }
  if constexpr (type == Q2_K) {
    for (int g = 0; g < 16; g++) { b->scales[g] = p[g] & 15; b->mins[g] = int8_t(p[g] >> 4); }
    b->d = p + 80; b->min = p + 82;
  }
  if constexpr (type == Q3_K) {
    for (int g = 0; g < 8; g++) for (int i = 0; i < 32; i++) c[32 * g + i] |= uint8_t((p[i] >> g & 1) << 2);
    const uint8_t* s = p + 96;
    for (int g = 0; g < 16; g++) b->scales[g] = int8_t(((g < 8 ? s[g] & 15 : s[g - 8] >> 4) | (s[8 + g % 4] >> g / 4 * 2 & 3) << 4) - 32);
    b->d = p + 108;
  }
  if constexpr (type == Q4_K || type == Q5_K) {
    const uint8_t* q = type == Q4_K ? p + 16 : p + 48;
    for (int g = 0; g < 8; g += 2) split_nibbles(q + 16 * g, 32, c + 32 * g, c + 32 * g + 32);
    scales_and_mins(p + 4, b->scales, b->mins);
  }
  if constexpr (type == Q5_K) for (int g = 0; g < 8; g++) for (int i = 0; i < 32; i++) c[32 * g + i] |= uint8_t((p[16 + i] >> g & 1) << 4);
  if constexpr (type == Q6_K) {
    for (int h = 0; h < 2; h++) {
      split_nibbles(p + 64 * h, 64, c + 128 * h, c + 128 * h + 64);
      for (int g = 0; g < 4; g++) for (int i = 0; i < 32; i++) c[128 * h + 32 * g + i] |= uint8_t((p[128 + 32 * h + i] >> 2 * g & 3) << 4);
    }
    memcpy(b->scales, p + 192, 16);
    b->d = p + 208;
  }
  if constexpr (type == IQ4_XS) {
    for (int g = 0; g < 8; g++) {
      split_nibbles(p + 8 + 16 * g, 16, c + 32 * g, c + 32 * g + 16);
      b->scales[g] = int8_t(((p[4 + g / 2] >> g % 2 * 4 & 15) | (bits16_at(p + 2) >> 2 * g & 3) << 4) - 32);
    }
  }
}

// Planes of `bits` bits a code, from bit `from` of the codes of 32 inputs.
template <int bits, int from> void write_planes(const Block* blocks, int group, uint8_t* planes) {
  constexpr int quads = 8 / bits;  // of a plane
  for (int p = 0; p < bits; p++) for (int c = 0; c < kOutputs; c++) {
    uint32_t all = 0;
    for (int j = 0; j < quads; j++) {
      uint32_t quad;
      memcpy(&quad, blocks[c].codes + 32 * group + 4 * (quads * p + j), 4);
      all |= (quad >> from & 0x01010101u * ((1u << bits) - 1)) << bits * j;
    }
    memcpy(planes + 64 * p + 4 * c, &all, 4);
  }
}
template <int bits> uint8_t read_planes(const uint8_t* planes, int output, int i) {
  const int quad = i / 4;
  return uint8_t(planes[quad * bits / 8 * 64 + 4 * output + i % 4] >> quad * bits % 8 & ((1 << bits) - 1));
}

bool is_finite(const uint8_t* half) { return (bits16_at(half) & 0x7c00) != 0x7c00; }

template <Type type> bool pack_floats(const uint8_t* rows, int64_t num_rows, int64_t k, uint8_t* tiles) {
  constexpr int size = format(type).row_bytes;
  bool finite = true;
  for (int64_t t = 0; t < num_rows; t += kOutputs, tiles += k * kOutputs * size) {
    const int count = num_rows - t < kOutputs ? int(num_rows - t) : kOutputs;
    if (count < kOutputs) memset(tiles, 0, size_t(k * kOutputs * size));
    for (int64_t at = 0; at < k; at += 32) for (int c = 0; c < count; c++) for (int64_t i = at; i < k && i < at + 32; i++) {
      const uint8_t* p = rows + ((t + c) * k + i) * size;
      memcpy(tiles + (i * kOutputs + c) * size, p, size);
      finite &= type == BF16  ? (bits16_at(p) & 0x7f80) != 0x7f80
                : type == F16 ? is_finite(p)
                              : (bits16_at(p + size - 2) & 0x7f80) != 0x7f80;
    }
  }
  return finite;
}
template <Type type> bool pack_blocks(const uint8_t* rows, int64_t num_rows, int64_t k, uint8_t* tiles) {
  constexpr Format f = format(type);
  const int64_t blocks = k / f.inputs;
  bool finite = true;
  static constexpr uint8_t kZeros[256] = {};
  Block block[kOutputs];
  for (int64_t t = 0; t < num_rows; t += kOutputs) for (int64_t b = 0; b < blocks; b++, tiles += f.tile_bytes()) {
    for (int c = 0; c < kOutputs; c++) {  // outputs beyond the last are zeros
      unpack<type>(t + c < num_rows ? rows + ((t + c) * blocks + b) * f.row_bytes : kZeros, block + c);
      constexpr int size = f.has_powers() ? 1 : 2;
      memcpy(tiles + size * c, block[c].d, size);
      finite &= size == 1 || is_finite(block[c].d);
      if constexpr (f.has_mins) { memcpy(tiles + 32 + 2 * c, block[c].min, 2); finite &= is_finite(block[c].min); }
      if constexpr (f.is_super()) for (int g = 0; g < f.inputs / f.group; g++) {
        uint8_t* pair = tiles + f.halves() + g / 2 * 32 + 2 * c + g % 2;
        pair[0] = uint8_t(block[c].scales[g]);
        if constexpr (f.has_mins) pair[f.scales()] = uint8_t(block[c].mins[g]);
      }
    }
    for (int g = 0; g < f.inputs / 32; g++) {
      uint8_t* planes = tiles + f.planes_at() + g * f.plane_bytes();
      write_planes<f.low, 0>(block, g, planes);
      if constexpr (f.high) write_planes<f.high, f.low>(block, g, planes + 64 * f.low);
    }
  }
  return finite;
}

template <Type type> void weights_of(const Block& b, float* y) {
  constexpr Format f = format(type);
  constexpr int group = f.is_super() ? f.group : f.inputs;
  const float d = f.has_powers() ? float_of_bits(uint32_t(*b.d) << 23) : half_at(b.d), min = f.has_mins ? half_at(b.min) : 0;
  for (int g = 0; g < f.inputs / group; g++) {
    const float scale = f.is_super() ? d * float(b.scales[g]) : d, least = f.is_super() && f.has_mins ? -(min * float(b.mins[g])) : min;
    for (int i = g * group; i < (g + 1) * group; i++) {
      y[i] = scale * float((f.table ? f.table[b.codes[i]] : b.codes[i]) - f.offset);
      if constexpr (f.has_mins) y[i] += least;
    }
  }
}
// Those of a block of a GGUF's row.
template <Type type> void decode(const uint8_t* p, float* y) {
  if constexpr (format(type).is_float()) *y = weight_at<type>(p, 0);
  else {
    Block b;
    unpack<type>(p, &b);
    weights_of<type>(b, y);
  }
}
// 32 weights -> a block of Q4_0: the one that is farthest from zero becomes -8. Returns whether all are finite.
bool write_q4_0(const float* x, uint8_t* block) {
  float high[8] = {}, low[8] = {}, none[8] = {};
  for (int i = 0; i < 32; i += 8) for (int j = 0; j < 8; j++) {
    high[j] = x[i + j] > high[j] ? x[i + j] : high[j];
    low[j] = x[i + j] < low[j] ? x[i + j] : low[j];
    none[j] += x[i + j] * 0.f;  // unless it is not finite
  }
  for (int j = 1; j < 8; j++) {
    high[0] = high[j] > high[0] ? high[j] : high[0];
    low[0] = low[j] < low[0] ? low[j] : low[0];
    none[0] += none[j];
  }
  const float d = (high[0] > -low[0] ? high[0] : low[0]) / -8.f, inverse = d != 0 ? 1.f / d : 0;
  const uint16_t half = half_of(d);
  memcpy(block, &half, 2);
  uint8_t codes[32];
  for (int i = 0; i < 32; i++) { const float q = x[i] * inverse + 8.5f; codes[i] = uint8_t(q < 15.f ? q : 15.f); }
  for (int i = 0; i < 16; i++) block[2 + i] = uint8_t(codes[i] | codes[16 + i] << 4);
  return none[0] == 0 && is_finite(block);
}

template <Type type> void look_up_row(const uint8_t* tile, int output, int64_t blocks, float* y) {
  constexpr Format f = format(type);
  for (int64_t at = 0; at < blocks; at++, tile += f.tile_bytes(), y += f.inputs) {
    if constexpr (f.is_float()) *y = weight_at<type>(tile, output);
    else {
      Block b;
      b.d = tile + (f.has_powers() ? 1 : 2) * output; b.min = tile + 32 + 2 * output;
      for (int g = 0; g < f.scales() / kOutputs; g++) {
        const uint8_t* pair = tile + f.halves() + g / 2 * 32 + 2 * output + g % 2;
        b.scales[g] = int8_t(pair[0]);
        if constexpr (f.has_mins) b.mins[g] = int8_t(pair[f.scales()]);
      }
      for (int i = 0; i < f.inputs; i++) {
        const uint8_t* planes = tile + f.planes_at() + i / 32 * f.plane_bytes();
        b.codes[i] = read_planes<f.low>(planes, output, i % 32);
        if constexpr (f.high != 0) b.codes[i] |= uint8_t(read_planes<f.high>(planes + 64 * f.low, output, i % 32) << f.low);
      }
      weights_of<type>(b, y);
    }
  }
}

}  // namespace

bool pack(int32_t type, const uint8_t* rows, int64_t num_rows, int64_t k, uint8_t* tiles) {
  return with_type(type, [&](auto constant) {
    if constexpr (format(constant).is_float()) return pack_floats<constant>(rows, num_rows, k, tiles);
    else return pack_blocks<constant>(rows, num_rows, k, tiles);
  });
}
bool narrow(int32_t type, const uint8_t* rows, int64_t num_rows, int64_t k, uint8_t* out) {
  return with_type(type, [&](auto constant) {
    constexpr Format f = format(constant);
    bool finite = true;
    float weights[256];
    for (int64_t i = 0; i < num_rows * k; i += f.inputs) {
      const int at = int(i % 256);
      decode<constant>(rows + i / f.inputs * f.row_bytes, weights + at);
      for (int b = (at + f.inputs) % 32 ? 256 : at / 32 * 32; b < at + f.inputs; b += 32, out += 18) finite &= write_q4_0(weights + b, out);
    }
    return finite;
  });
}
bool lookup(int32_t type, const uint8_t* tiles, int64_t n, int64_t k, const int64_t* ids, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i++) if (ids[i] < 0 || ids[i] >= n) return false;
  const int64_t blocks = k / format(type).inputs, tile_bytes = blocks * format(type).tile_bytes();
  with_type(type, [&](auto constant) {
    for (int64_t i = 0; i < count; i++)
      look_up_row<constant>(tiles + ids[i] / kOutputs * tile_bytes, int(ids[i] % kOutputs), blocks, out + i * k);
  });
  return true;
}
}  // namespace edgespec
