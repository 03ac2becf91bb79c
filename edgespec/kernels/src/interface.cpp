// The C interface (for ctypes), packing, lookup, and the choice of a path by what the processor has.
#include <cstring>
#include "tiles.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace edgespec {
extern const Path kAvx2, kAvxVnni, kAvx512;
namespace {
bool usable(const Path* p) {
  __builtin_cpu_init();
  if (p == &kAvx512) return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  if (p == &kAvxVnni) return false;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
const Path* const kPaths[] = {&kAvx512, &kAvxVnni, &kAvx2};
const Path* chosen = nullptr;

void scale_min(int j, const uint8_t* q, uint8_t& s, uint8_t& m) {
  if (j < 4) { s = q[j] & 63; m = q[j + 4] & 63; }
  else { s = (q[j + 4] & 0xF) | ((q[j - 4] >> 6) << 4); m = (q[j + 4] >> 4) | ((q[j] >> 6) << 4); }
}
float half(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = h & 0x7fff, bits; float f;
  if (magnitude >= 0x7c00) { bits = sign | 0x7f800000 | (magnitude & 0x3ff) << 13; memcpy(&f, &bits, 4); return f; }
  if (magnitude < 0x400) { f = float(magnitude) * 5.9604644775390625e-8f; return sign ? -f : f; }
  bits = sign | ((magnitude << 13) + 0x38000000); memcpy(&f, &bits, 4); return f;
}
bool finite(const uint8_t* p) { uint16_t h; memcpy(&h, p, 2); return (h & 0x7c00) != 0x7c00; }
}  // namespace

const Path* path_in_use() {
  if (!chosen) for (const Path* p : kPaths) if (usable(p)) { chosen = p; break; }
  return chosen;
}
int64_t packed_bytes(int32_t type, int64_t n, int64_t k) {
  const TypeInfo* i = type_info(type); int64_t size;
  if (!i || n < 1 || k < 1 || k % i->inputs) return -1;
  return __builtin_mul_overflow(n / kOutputs + (n % kOutputs != 0), k / i->inputs, &size) || __builtin_mul_overflow(size, i->tile_bytes, &size) ? -1 : size;
}
int64_t activation_bytes(int32_t type, int64_t k, int64_t rows) {
  const TypeInfo* i = type_info(type); return k / i->inputs * rows * i->activation_bytes;
}

static int pack(int32_t type, const uint8_t* raw, int64_t n, int64_t k, uint8_t* out) {
  const TypeInfo& info = *type_info(type); const int64_t nb = k / info.inputs; bool bad = false;
  memset(out, 0, size_t(packed_bytes(type, n, k)));
  for (int64_t col = 0; col < n; col++) for (int64_t b = 0; b < nb; b++) {
    const uint8_t* p = raw + (col * nb + b) * info.row_bytes;
    uint8_t* o = out + ((col / kOutputs) * nb + b) * info.tile_bytes;
    const int c = int(col % kOutputs), g = c / 8, cc = c % 8;
    bad |= !finite(type == Q6_K ? p + 208 : p) || ((type == Q4_K || type == Q4_1) && !finite(p + 2));
    auto put4 = [&](uint8_t (*q)[32], int i, uint8_t v) { q[i / 4][cc * 4 + i % 4] |= uint8_t(v << (4 * g)); };
    if (type == Q4_K) {
      TileQ4K& B = *(TileQ4K*)o; memcpy(&B.d[c], p, 2); memcpy(&B.dmin[c], p + 2, 2);
      for (int s = 0; s < 8; s++) { uint8_t sc, mn; scale_min(s, p + 4, sc, mn); B.scales[s][c] = sc; B.mins[s / 2][c][s % 2] = mn; }
      for (int i = 0; i < 256; i++) { uint8_t v = p[16 + i / 64 * 32 + i % 32]; put4(B.q, i, i % 64 < 32 ? v & 15 : v >> 4); }
    } else if (type == Q6_K) {
      TileQ6K& B = *(TileQ6K*)o; memcpy(&B.d[c], p + 208, 2);
      for (int s = 0; s < 16; s++) B.scales[s / 2][c][s % 2] = int8_t(p[192 + s]);
      for (int i = 0; i < 256; i++) {
        int half = i / 128, r = i % 128, l = r % 32, quarter = r / 32;
        uint8_t low = p[half * 64 + l + (quarter & 1 ? 32 : 0)]; low = quarter >= 2 ? low >> 4 : low & 15;
        uint8_t high = (p[128 + half * 32 + l] >> (2 * quarter)) & 3;
        put4(B.low, i, low); B.high[i / 8][cc * 4 + i % 4] |= uint8_t(high << (2 * g + 4 * (i / 4 % 2)));
      }
    } else if (type == Q4_1) {
      TileQ41& B = *(TileQ41*)o; memcpy(&B.d[c], p, 2); memcpy(&B.m[c], p + 2, 2);
      for (int i = 0; i < 32; i++) { uint8_t v = p[4 + i % 16]; put4(B.q, i, i < 16 ? v & 15 : v >> 4); }
    } else if (type == Q4_0) {
      TileQ40& B = *(TileQ40*)o; memcpy(&B.d[c], p, 2);
      for (int i = 0; i < 32; i++) { uint8_t v = p[2 + i % 16]; put4(B.q, i, i < 16 ? v & 15 : v >> 4); }
    } else {
      TileQ80& B = *(TileQ80*)o; memcpy(&B.d[c], p, 2);
      for (int i = 0; i < 32; i++) B.q[i / 4][c * 4 + i % 4] = uint8_t(p[2 + i] + 128);
    }
  }
  return bad;
}
bool lookup(int32_t type, const uint8_t* tiles, int64_t n, int64_t k, const int64_t* ids, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i++) if (ids[i] < 0 || ids[i] >= n) return false;
  const TypeInfo& info = *type_info(type); const int64_t nb = k / info.inputs;
  for (int64_t i = 0; i < count; i++) for (int64_t b = 0; b < nb; b++) {
    const uint8_t* t = tiles + ((ids[i] / kOutputs) * nb + b) * info.tile_bytes;
    const int c = int(ids[i] % kOutputs), g = c / 8, cc = c % 8; float* y = out + i * k + b * info.inputs;
    auto get4 = [&](const uint8_t (*q)[32], int i) { return (q[i / 4][cc * 4 + i % 4] >> (4 * g)) & 15; };
    if (type == Q4_K) {
      const TileQ4K& B = *(const TileQ4K*)t; float d = half(B.d[c]), m = half(B.dmin[c]);
      for (int i = 0; i < 256; i++) y[i] = (d * B.scales[i / 32][c]) * float(get4(B.q, i)) - m * B.mins[i / 64][c][i / 32 % 2];
    } else if (type == Q6_K) {
      const TileQ6K& B = *(const TileQ6K*)t; float d = half(B.d[c]);
      for (int i = 0; i < 256; i++) y[i] = (d * B.scales[i / 32][c][i / 16 % 2]) * float(get4(B.low, i) + 16 * ((B.high[i / 8][cc * 4 + i % 4] >> (2 * g + 4 * (i / 4 % 2))) & 3) - 32);
    } else if (type == Q4_1) {
      const TileQ41& B = *(const TileQ41*)t; float d = half(B.d[c]), m = half(B.m[c]); for (int i = 0; i < 32; i++) y[i] = d * float(get4(B.q, i)) + m;
    } else if (type == Q4_0) {
      const TileQ40& B = *(const TileQ40*)t; float d = half(B.d[c]); for (int i = 0; i < 32; i++) y[i] = d * float(get4(B.q, i) - 8);
    } else {
      const TileQ80& B = *(const TileQ80*)t; float d = half(B.d[c]); for (int i = 0; i < 32; i++) y[i] = d * float(B.q[i / 4][c * 4 + i % 4] - 128);
    }
  }
  return true;
}
}  // namespace edgespec

using namespace edgespec;

EXPORT int32_t edgespec_abi_version() { return 1; }
EXPORT const char* edgespec_path() { const Path* p = path_in_use(); return p ? p->name : "none"; }
EXPORT int32_t edgespec_choose_path(const char* name) {
  for (const Path* p : kPaths) if (!strcmp(p->name, name) && usable(p)) { chosen = p; return 0; }
  return -1;
}
EXPORT int64_t edgespec_packed_bytes(int32_t type, int64_t n, int64_t k) { return packed_bytes(type, n, k); }
EXPORT int32_t edgespec_pack(int32_t type, const uint8_t* rows, int64_t num_rows, int64_t k, uint8_t* tiles) {
  return packed_bytes(type, num_rows, k) < 0 ? -1 : pack(type, rows, num_rows, k, tiles);
}
EXPORT int32_t edgespec_lookup(int32_t type, const uint8_t* tiles, int64_t n, int64_t k, const int64_t* ids, int64_t count, float* out) {
  return packed_bytes(type, n, k) < 0 || !lookup(type, tiles, n, k, ids, count, out) ? -1 : 0;
}
EXPORT int64_t edgespec_scratch_bytes(int32_t type, int64_t k, int64_t m) {
  return packed_bytes(type, 1, k) < 0 || m < 1 ? -1 : activation_bytes(type, k, m < kRowBlock ? m : kRowBlock);
}
EXPORT int32_t edgespec_product(int32_t type, const uint8_t* tiles, int64_t n, int64_t k, const float* x, int64_t m, float* y, const float* bias, uint8_t* scratch, int64_t first_tile, int64_t last_tile) {
  const Path* path = path_in_use();
  if (packed_bytes(type, n, k) < 0 || !path || m < 1 || first_tile < 0 || last_tile > (n - 1) / kOutputs + 1) return -1;
  for (int64_t r = 0; r < m; r += kRowBlock) {
    int rows = int(m - r < kRowBlock ? m - r : kRowBlock);
    path->quantise(type_info(type)->inputs, x + r * k, k, rows, scratch);
    path->product(type, tiles, n, k, scratch, rows, y + r * n, n, bias, first_tile, last_tile);
  }
  return 0;
}
