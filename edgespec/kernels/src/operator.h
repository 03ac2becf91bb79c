// What all operators need: arguments that are checked, scratch memory, threads.
#pragma once
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include "onnxruntime.h"
#include "formats.h"
#include "threads.h"

namespace edgespec {
constexpr int kMaxRank = 8;
#define TRY(expression) if (OrtStatus* status = (expression)) return status

template <class T> T printable(T x) { return x; }
inline long long printable(int64_t x) { return x; }  // as %lld, on every system
template <class... Args> OrtStatus* invalid(const char* format, Args... args) {
  char text[256];
  snprintf(text, sizeof text, format, printable(args)...);
  return error(kInvalidArgument, text);
}
inline OrtStatus* out_of_memory() { return error(kFail, "edgespec: out of memory"); }

// A part of scratch memory: `count` values, and where their address goes.
struct Piece {
  void* out;
  int64_t bytes;
  template <class T> Piece(T** out, int64_t count) : out(out), bytes((count * int64_t(sizeof(T)) + 63) & ~int64_t(63)) {}
};
// Scratch memory of a run, lent by a few buffers that all kernels share: sessions may run at once, and what was used last is still in the
// cache.
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
  OrtStatus* get(std::initializer_list<Piece> pieces) {
    int64_t size = 0;
    for (const Piece& each : pieces) size += each.bytes;
    if (!get(size_t(size))) return out_of_memory();
    uint8_t* at = data;
    for (const Piece& each : pieces) { memcpy(each.out, &at, sizeof at); at += each.bytes; }
    return nullptr;
  }
  ~Scratch() { give_back(buffer); }
  static void give_back(Buffer* buffer) {
    for (auto& slot : slots) {
      Buffer* none = nullptr;
      if (!buffer || slot.compare_exchange_strong(none, buffer, std::memory_order_release)) return;
    }
    free(buffer);
  }
};

struct Tensor {
  const void* data;  // null: left out, or without elements
  int type;          // 0: left out
  size_t rank;
  int64_t dims[kMaxRank];
  const float* floats() const { return static_cast<const float*>(data); }
  int64_t width() const { return rank ? dims[rank - 1] : 0; }
  int64_t rows() const { return rank ? product(rank - 1) : 0; }  // of this width
  int64_t size() const { return product(rank); }
  int64_t product(size_t count) const {
    int64_t all = 1;
    for (size_t i = 0; i < count; i++) all *= dims[i];
    return all;
  }
};
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
inline OrtStatus* read(const OrtKernelContext* context, size_t at, const char* name, int type, Tensor* out) {
  const OrtValue* value;
  TRY(input(context, at, &value));
  *out = {};
  return value ? read(value, name, type, out) : nullptr;
}
inline OrtStatus* read_floats(const OrtKernelContext* context, size_t at, const char* name, Tensor* out) {
  return read(context, at, name, kTypeFloat, out);
}
// Null: left out.
inline OrtStatus* read_vector(const OrtKernelContext* context, size_t at, const char* name, int64_t size, const float** out) {
  Tensor t;
  TRY(read_floats(context, at, name, &t));
  if (t.type && t.size() != size) return invalid("edgespec: %s has %lld elements, expected %lld", name, t.size(), size);
  *out = t.floats();
  return nullptr;
}
struct Row { int32_t slot, position, cell, parent; };  // see attention.cpp
inline OrtStatus* read_rows(const OrtKernelContext* context, size_t at, const char* called, int64_t count, const Row** out) {
  Tensor rows;
  TRY(read(context, at, "rows", kTypeInt32, &rows));
  if (rows.size() != 4 * count)
    return invalid("edgespec: %s has %lld numbers of rows, expected 4 for each of %lld rows", called, rows.size(), count);
  *out = static_cast<const Row*>(rows.data);
  return nullptr;
}
// Output `at` in this shape; null: it has no name.
inline OrtStatus* open(OrtKernelContext* context, size_t at, const Tensor& shape, float** out) {
  static float nothing;  // of an output without elements
  OrtValue* value;
  void* p = nullptr;
  TRY(output(context, at, shape.dims, shape.rank, &value));
  if (value) TRY(data(value, &p));
  *out = value && !p ? &nothing : static_cast<float*>(p);
  return nullptr;
}
// An attribute, and where it goes; one that may be left out changes nothing then.
struct Attribute {
  const char* name;
  int64_t* whole;
  float* real;
  bool is_optional;
  Attribute(const char* name, int64_t* out, bool is_optional = false) : name(name), whole(out), real(nullptr), is_optional(is_optional) {}
  Attribute(const char* name, float* out, bool is_optional = false) : name(name), whole(nullptr), real(out), is_optional(is_optional) {}
};
inline OrtStatus* read_attributes(const OrtKernelInfo* info, std::initializer_list<Attribute> attributes) {
  for (const Attribute& each : attributes) {
    OrtStatus* bad = each.whole ? attribute(info, each.name, each.whole) : attribute(info, each.name, each.real);
    if (bad && !each.is_optional) return bad;
    if (bad) release(bad);
  }
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
  // What input `at` names.
  OrtStatus* find(const OrtKernelContext* context, size_t at, const char* called, const char* wanted, const T** out) {
    Tensor number;
    TRY(read(context, at, wanted, kTypeInt64, &number));
    if (number.size() == 1 && (*out = find(*static_cast<const int64_t*>(number.data)))) return nullptr;
    return invalid("edgespec: %s names %s that nobody holds", called, wanted);
  }
  int64_t add(T* made) {
    Lock lock(in_use);
    made->number = ++last; made->next = first;
    first = made;
    return last;
  }
  void drop(int64_t number) {
    Lock lock(in_use);
    for (T** each = &first; *each; each = &(*each)->next)
      if ((*each)->number == number) {
        T* gone = *each;
        *each = gone->next;
        free(gone);
        return;
      }
  }
};
// The tiles of input `at`: of a constant initializer when a kernel is made (`info`), else of a run (`context`), if `out` has none yet.
OrtStatus* constant_tiles(const OrtKernelInfo* info, size_t at, const char* name, int64_t bytes, const uint8_t** out);
OrtStatus* input_tiles(const OrtKernelContext* context, size_t at, const char* name, int64_t bytes, const uint8_t** out);
// Calls f(0..count - 1), in this thread alone where the work is smaller than what telling others costs.
template <class F> void run_all(bool is_small, int64_t count, F f) {
  if (is_small) for (int64_t i = 0; i < count; i++) f(i);
  else run_pieces([](void* with, size_t i) { (*static_cast<F*>(with))(int64_t(i)); }, count, &f);
}

// Constants of a node, kept for its life.
template <class Kernel> OrtStatus* keep(const Kernel& kernel, void** out) {
  if (!(*out = malloc(sizeof kernel))) return out_of_memory();
  memcpy(*out, &kernel, sizeof kernel);
  return nullptr;
}
// An operator. Inputs, a letter each: f floats, t tiles, i int32, n int64; in upper case what may be left out. Outputs are
// floats, the first of which is always there.
struct Operator : OrtCustomOp {
  const char *called, *inputs;
  size_t outputs;
  static const Operator* of(const OrtCustomOp* op) { return static_cast<const Operator*>(op); }
  Operator(const char* called, const char* inputs, size_t outputs, decltype(OrtCustomOp::create) create,
           decltype(OrtCustomOp::compute) compute)
      : OrtCustomOp(), called(called), inputs(inputs), outputs(outputs) {
    this->create = create; this->compute = compute;
    version = 16;
    provider = [](const OrtCustomOp*) -> const char* { return "CPUExecutionProvider"; };
    destroy = [](void* kernel) { free(kernel); };
    name = [](const OrtCustomOp* op) { return of(op)->called; };
    num_inputs = [](const OrtCustomOp* op) { return strlen(of(op)->inputs); };
    num_outputs = [](const OrtCustomOp* op) { return of(op)->outputs; };
    input_type = [](const OrtCustomOp* op, size_t i) -> int {
      const int letter = of(op)->inputs[i] | 32;
      return letter == 't' ? kTypeUint8 : letter == 'i' ? kTypeInt32 : letter == 'n' ? kTypeInt64 : kTypeFloat;
    };
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
