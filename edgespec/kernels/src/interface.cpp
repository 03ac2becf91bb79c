// The C interface, for ctypes. Pointers are trusted, sizes are not: a negative result means that they were refused.
#include "formats.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace edgespec;

EXPORT int32_t edgespec_abi_version() { return 5; }
EXPORT const char* edgespec_path() { return path_in_use(); }
// 0 if this processor has that path.
EXPORT int32_t edgespec_choose_path(const char* name) { return choose_path(name) ? 0 : -1; }
EXPORT int64_t edgespec_packed_bytes(int32_t type, int64_t n, int64_t k) { return packed_bytes(type, n, k); }
// Consecutive rows -> consecutive tiles; a multiple of 16 rows unless they are the matrix's last ones. 1: a scale is not finite.
EXPORT int32_t edgespec_pack(int32_t type, const uint8_t* rows, int64_t num_rows, int64_t k, uint8_t* tiles) {
  if (packed_bytes(type, num_rows, k) < 0) return -1;
  return pack(type, rows, num_rows, k, tiles) ? 0 : 1;
}
// Rows of a GGUF -> the same in Q4_0. 1: a weight is not finite.
EXPORT int32_t edgespec_narrow(int32_t type, const uint8_t* rows, int64_t num_rows, int64_t k, uint8_t* out) {
  if (packed_bytes(type, num_rows, k) < 0 || k % 32) return -1;
  return narrow(type, rows, num_rows, k, out) ? 0 : 1;
}
EXPORT int32_t edgespec_lookup(int32_t type, const uint8_t* tiles, int64_t n, int64_t k, const int64_t* ids, int64_t count, float* out) {
  return packed_bytes(type, n, k) < 0 || count < 0 || !lookup(type, tiles, n, k, ids, count, out) ? -1 : 0;
}
EXPORT int64_t edgespec_scratch_bytes(int32_t type, int64_t k, int64_t m) {
  return packed_bytes(type, 1, k) < 0 || m < 1 ? -1 : activation_bytes(format(type).inputs, k, m < kRowBlock ? m : kRowBlock);
}
// y [m, n] of the outputs of the tiles first_tile..last_tile = x [m, k] times the matrix + bias [n] (or null), in this thread.
EXPORT int32_t edgespec_product(int32_t type, const uint8_t* tiles, int64_t n, int64_t k, const float* x, int64_t m, float* y,
                                const float* bias, uint8_t* scratch, int64_t first_tile, int64_t last_tile) {
  if (packed_bytes(type, n, k) < 0 || m < 1 || first_tile < 0 || last_tile > (n - 1) / kOutputs + 1) return -1;
  const Kernels& path = kernels_in_use();
  for (int64_t start = 0; start < m; start += kRowBlock) {
    const int rows = int(m - start < kRowBlock ? m - start : kRowBlock);
    for (int r = 0; r < rows; r++) path.quantise(format(type).inputs, kNoGate, x + (start + r) * k, k, r, rows, scratch, nullptr);
    path.product(type, tiles, n, k, scratch, rows, y + start * n, n, bias, first_tile, last_tile);
  }
  return 0;
}
