// The choice of a path by what the processor and the operating system have.
#include <atomic>
#include <cstring>
#include "formats.h"

#if defined(__x86_64__)
#include <cpuid.h>

namespace edgespec {
namespace {
struct Registers { unsigned a, b, c, d; };
Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r = {};
  __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
  return r;
}
bool has_bits(unsigned value, unsigned bits) { return (value & bits) == bits; }
// The state that the operating system saves: 6 is SSE and AVX, 0xe0 AVX-512.
bool saves(unsigned state) {
  if (!has_bits(cpuid(1, 0).c, 1u << 27)) return false;  // OSXSAVE
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return has_bits(low, state);
}
}  // namespace

bool has_avx2() { return saves(6) && has_bits(cpuid(1, 0).c, 1u << 28 | 1u << 12 | 1u << 29) && has_bits(cpuid(7, 0).b, 1u << 5); }  // AVX, FMA, F16C; AVX2
bool has_avx_vnni() { return has_avx2() && has_bits(cpuid(7, 1).a, 1u << 4); }
bool has_avx512_vnni() {
  const Registers r = cpuid(7, 0);
  return has_avx2() && saves(0xe6) && has_bits(r.b, 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31) && has_bits(r.c, 1u << 11);  // F, DQ, BW, VL; VNNI
}
}  // namespace edgespec
#endif

namespace edgespec {
namespace {
const Path* const kPaths[] = {
#if defined(__x86_64__)
    &kAvx512, &kAvxVnni, &kAvx2,
#endif
    &kPortable};
std::atomic<const Path*> chosen;
}  // namespace

const Path& path_in_use() {
  const Path* path = chosen.load(std::memory_order_relaxed);
  if (path) return *path;
  for (const Path* p : kPaths) if (p->is_supported()) { path = p; break; }
  chosen.store(path, std::memory_order_relaxed);
  return *path;
}
bool choose_path(const char* name) {
  for (const Path* p : kPaths) if (!strcmp(p->name, name) && p->is_supported()) { chosen.store(p, std::memory_order_relaxed); return true; }
  return false;
}
}  // namespace edgespec
