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
// AVX, FMA, F16C; AVX2
bool has_avx2() {
  return saves(6) && has_bits(cpuid(1, 0).c, 1u << 28 | 1u << 12 | 1u << 29) && has_bits(cpuid(7, 0).b, 1u << 5);
}
bool has_avxvnni() { return has_avx2() && has_bits(cpuid(7, 1).a, 1u << 4); }
bool has_avx512() {
  const Registers r = cpuid(7, 0);
  return has_avx2() && saves(0xe6) && has_bits(r.b, 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31) &&
         has_bits(r.c, 1u << 11);  // F, DQ, BW, VL; VNNI
}
constexpr char avx2_name[] = "avx2", avxvnni_name[] = "avx-vnni", avx512_name[] = "avx512-vnni";
}  // namespace
}  // namespace edgespec
#elif defined(__aarch64__)
#if defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(_WIN32)
extern "C" __declspec(dllimport) int __stdcall IsProcessorFeaturePresent(unsigned long feature);
#else
#include <sys/auxv.h>
#endif

namespace edgespec {
namespace {
// `bit` of the auxiliary vector's word number `word`; `feature` of winnt.h; `name`: of what sysctl knows.
bool has([[maybe_unused]] unsigned long word, [[maybe_unused]] int bit, [[maybe_unused]] unsigned long feature,
         [[maybe_unused]] const char* name) {
#if defined(__APPLE__)
  int value = 0;
  size_t size = sizeof value;
  return !sysctlbyname(name, &value, &size, nullptr, 0) && value;
#elif defined(_WIN32)
  return IsProcessorFeaturePresent(feature);
#else
  return getauxval(word) >> bit & 1;
#endif
}
// AT_HWCAP, HWCAP_ASIMDDP; PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
bool has_neondot() {
  return has(16, 20, 43, "hw.optional.arm.FEAT_DotProd");
}
// AT_HWCAP2, HWCAP2_I8MM; PF_ARM_V82_I8MM_INSTRUCTIONS_AVAILABLE
bool has_neoni8mm() {
  return has_neondot() && has(26, 13, 66, "hw.optional.arm.FEAT_I8MM");
}
constexpr char neondot_name[] = "neon-dot", neoni8mm_name[] = "neon-i8mm";
}  // namespace
}  // namespace edgespec
#endif

// EDGESPEC_PATHS: PATH(its name) for each instruction set that the build's compiler knows, the best first.
namespace edgespec {
#define PATH(name) extern const Kernels name;
EDGESPEC_PATHS
PATH(portable)
#undef PATH
namespace {
bool has_portable() { return true; }
constexpr char portable_name[] = "portable";
#define PATH(name) {name##_name, has_##name, &name},
struct Path { const char* name; bool (*is_supported)(); const Kernels* kernels; };
const Path kPaths[] = {EDGESPEC_PATHS PATH(portable)};
std::atomic<const Path*> chosen;

const Path& path() {
  const Path* path = chosen.load(std::memory_order_relaxed);
  if (path) return *path;
  for (path = kPaths; !path->is_supported();) path++;
  chosen.store(path, std::memory_order_relaxed);
  return *path;
}
}  // namespace

const Kernels& kernels_in_use() { return *path().kernels; }
const char* path_in_use() { return path().name; }
bool choose_path(const char* name) {
  for (const Path& p : kPaths) if (!strcmp(p.name, name) && p.is_supported()) { chosen.store(&p, std::memory_order_relaxed); return true; }
  return false;
}
}  // namespace edgespec
