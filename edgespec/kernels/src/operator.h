// What all operators need: arguments that are checked, scratch memory, threads.
#pragma once
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include "onnxruntime.h"
#include "formats.h"
#include "threads.h"

namespace edgespec {
constexpr int kMaxRank = 8;
#define TRY(expression) if (OrtStatus* status = (expression)) return status

template <class... Args> OrtStatus* invalid(const char* format, Args... args) {
  char text[256];
  snprintf(text, sizeof text, format, args...);
  return error(kInvalidArgument, text);
}

// Scratch memory of a run, lent by a few buffers that all kernels share: sessions may run at once, and what was used last is still in the cache.
struct Scratch {
  static constexpr int kSlots = 32;
  struct Buffer { size_t size; };
  static inline std::atomic<Buffer*> slots[kSlots];
  Buffer* buffer = nullptr;
  uint8_t* data = nullptr;  // on 64 bytes

  // The first that is large enough; one that is not goes for a new one, so that there are never more than are in use at once.
  bool get(size_t size) {
    Buffer* small = nullptr;
    for (auto& slot : slots) {
      Buffer* found = slot.exchange(nullptr, std::memory_order_acquire);
      if (found && found->size >= size) { buffer = found; break; }
      if (found) { give_back(small); small = found; }
    }
    if (buffer) give_back(small);
    else {
      free(small);
      if (size > SIZE_MAX - 128 || !(buffer = static_cast<Buffer*>(malloc(size + 128)))) return false;
      buffer->size = size;
    }
    data = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(buffer + 1) + 63) & ~uintptr_t(63));
    return true;
  }
  ~Scratch() { give_back(buffer); }
  static void give_back(Buffer* buffer) {
    for (auto& slot : slots) { Buffer* none = nullptr; if (!buffer || slot.compare_exchange_strong(none, buffer, std::memory_order_release)) return; }
    free(buffer);
  }
};

// Memory of a step, taken in pieces: counted if `data` is null.
struct Pieces {
  uint8_t* data;
  int64_t size;
  template <class T> void take(T** out, int64_t count) {
    if (data) *out = reinterpret_cast<T*>(data + size);
    size += (count * int64_t(sizeof(T)) + 63) & ~int64_t(63);
  }
};
struct Tensor { const void* data; int type; size_t rank; int64_t dims[kMaxRank]; };
inline OrtStatus* read(const OrtValue* value, const char* name, int type, Tensor* out) {
  OrtShape* s;
  TRY(shape(value, &s));
  OrtStatus* bad = element_type(s, &out->type);
  if (!bad) bad = rank(s, &out->rank);
  if (!bad && out->rank <= kMaxRank) bad = dims(s, out->dims, out->rank);
  release(s);
  if (bad) return bad;
  if (out->type != type) return invalid("edgespec: %s has element type %d, expected %d", name, out->type, type);
  if (out->rank > kMaxRank) return invalid("edgespec: %s has %zu dimensions, at most %d are allowed", name, out->rank, kMaxRank);
  void* p;
  TRY(data(const_cast<OrtValue*>(value), &p));
  out->data = p;
  return nullptr;
}
inline int64_t elements(const Tensor& t, size_t rank) {
  int64_t count = 1;
  for (size_t i = 0; i < rank; i++) count *= t.dims[i];
  return count;
}
struct Row { int32_t slot, position, cell, parent; };  // see attention.cpp
inline OrtStatus* read_floats(const OrtKernelContext* context, size_t at, const char* name, Tensor* out) {
  const OrtValue* value;
  TRY(input(context, at, &value));
  out->data = nullptr;
  return value ? read(value, name, kTypeFloat, out) : nullptr;
}
inline OrtStatus* read_vector(const OrtKernelContext* context, size_t at, const char* name, int64_t size, const float** out) {
  Tensor t;
  const OrtValue* value;
  *out = nullptr;
  TRY(input(context, at, &value));
  if (!value) return nullptr;
  TRY(read(value, name, kTypeFloat, &t));
  if (elements(t, t.rank) != size) return invalid("edgespec: %s has %lld elements, expected %lld", name, (long long)elements(t, t.rank), (long long)size);
  *out = static_cast<const float*>(t.data);
  return nullptr;
}
// What a program holds in its memory, which graphs name by a number. `T` has `number` and `next`, and comes from malloc.
template <class T> class Registry {
  T* first = nullptr;
  int64_t last = 0;
  std::atomic_flag in_use = ATOMIC_FLAG_INIT;
  struct Lock {
    std::atomic_flag& flag;
    explicit Lock(std::atomic_flag& flag) : flag(flag) { while (flag.test_and_set(std::memory_order_acquire)) {} }
    ~Lock() { flag.clear(std::memory_order_release); }
  };

 public:
  const T* find(int64_t number) {
    Lock lock(in_use);
    for (const T* each = first; each; each = each->next) if (each->number == number) return each;
    return nullptr;
  }
  int64_t add(T* made) {
    Lock lock(in_use);
    made->number = ++last; made->next = first;
    first = made;
    return last;
  }
  void drop(int64_t number) {
    Lock lock(in_use);
    for (T** each = &first; *each; each = &(*each)->next) if ((*each)->number == number) { T* gone = *each; *each = gone->next; free(gone); return; }
  }
};
// The tiles of input `at`: of a constant initializer when a kernel is made (`info`), else of a run (`context`), if `out` has none yet.
OrtStatus* constant_tiles(const OrtKernelInfo* info, size_t at, const char* name, int64_t bytes, const uint8_t** out);
OrtStatus* input_tiles(const OrtKernelContext* context, size_t at, const char* name, int64_t bytes, const uint8_t** out);
inline void optional(OrtStatus* status) { if (status) release(status); }  // of an attribute that keeps its default
// In this thread where the work is smaller than what telling others costs.
template <class Run> void run_all(bool is_small, void(ORT_CALL* run)(void*, size_t), int64_t count, Run* with) {
  if (!is_small) return run_pieces(run, count, with);
  for (int64_t i = 0; i < count; i++) run(with, size_t(i));
}

// Constants of a node, kept for its life.
template <class Kernel> OrtStatus* keep(const Kernel& kernel, void** out) {
  if (!(*out = malloc(sizeof kernel))) return error(kFail, "edgespec: out of memory");
  memcpy(*out, &kernel, sizeof kernel);
  return nullptr;
}
// An operator. Inputs, a letter each: f floats, t tiles, i int32, n int64; in upper case what may be left out. Outputs are
// floats, the first of which is always there.
struct Operator : OrtCustomOp {
  const char *called, *inputs;
  size_t outputs;
  static const Operator* of(const OrtCustomOp* op) { return static_cast<const Operator*>(op); }
  Operator(const char* called, const char* inputs, size_t outputs, decltype(OrtCustomOp::create) create, decltype(OrtCustomOp::compute) compute) : OrtCustomOp(), called(called), inputs(inputs), outputs(outputs) {
    this->create = create; this->compute = compute;
    version = 16;
    provider = [](const OrtCustomOp*) -> const char* { return "CPUExecutionProvider"; };
    destroy = [](void* kernel) { free(kernel); };
    name = [](const OrtCustomOp* op) { return of(op)->called; };
    num_inputs = [](const OrtCustomOp* op) { return strlen(of(op)->inputs); };
    num_outputs = [](const OrtCustomOp* op) { return of(op)->outputs; };
    input_type = [](const OrtCustomOp* op, size_t i) -> int { const int letter = of(op)->inputs[i] | 32; return letter == 't' ? kTypeUint8 : letter == 'i' ? kTypeInt32 : letter == 'n' ? kTypeInt64 : kTypeFloat; };
    input_kind = [](const OrtCustomOp* op, size_t i) -> int { return of(op)->inputs[i] & 32 ? kRequired : kOptional; };
    output_type = [](const OrtCustomOp*, size_t) -> int { return kTypeFloat; };
    output_kind = [](const OrtCustomOp*, size_t i) -> int { return i ? kOptional : kRequired; };
    input_memory = [](const OrtCustomOp*, size_t) { return 0; };
    variadic_input_min = variadic_output_min = [](const OrtCustomOp*) { return 1; };
    variadic_input_same = variadic_output_same = [](const OrtCustomOp*) { return 0; };
  }
};
extern const Operator kAttentionOperators[2], kRecurrentOperators[3], kExpertsOperator;

}  // namespace edgespec
