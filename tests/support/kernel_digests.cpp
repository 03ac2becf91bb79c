// DIGESTS LIBRARY: prints a digest of all bits that a library of kernels computes from fixed numbers, a line for each
// path and operator; so that processors can be compared. DIGESTS LIBRARY path: only the path that is chosen.
// ONNX Runtime is not needed: what the operators call of it is stood in for here.
#include <dlfcn.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>
#include "formats.h"
#include "onnxruntime.h"

using std::map;
using std::string;
using std::vector;
using namespace edgespec;

struct OrtStatus { string text; };
struct OrtShape { int type; vector<int64_t> dims; };
struct OrtValue {
  OrtShape shape;
  vector<uint8_t> data;
};
struct OrtKernelInfo {
  map<string, vector<int64_t>> whole;
  map<string, float> real;
  size_t inputs, outputs;
};
struct OrtKernelContext {
  vector<const OrtValue*> inputs;
  vector<OrtValue> outputs;
};
struct OrtDomain { map<string, const OrtCustomOp*> operators; };

namespace {
OrtDomain domain;
void* library;

template <class Function> Function function(const char* name) {
  void* found = dlsym(library, name);
  if (!found) { fprintf(stderr, "%s is missing\n", name); exit(1); }
  return reinterpret_cast<Function>(found);
}
void check(OrtStatus* status) {
  if (status) { fprintf(stderr, "%s\n", status->text.c_str()); exit(1); }
}

// ---- what the operators call, at its place in the table
const OrtApi* make_api() {
  static OrtApi api;
  const auto put = [](int at, auto* f) { api.at[at] = reinterpret_cast<void*>(f); };
  for (int i = 0; i < 280; i++) put(i, +[] { fprintf(stderr, "a function that is not stood in for was called\n"); exit(1); });
  put(0, +[](int, const char* text) { return new OrtStatus{text}; });
  put(93, +[](OrtStatus* s) { delete s; });
  put(99, +[](OrtShape* s) { delete s; });
  put(26, +[](const char*, OrtDomain** out) { *out = &domain; return (OrtStatus*)nullptr; });
  put(27, +[](OrtDomain* d, const OrtCustomOp* op) { d->operators[op->name(op)] = op; return (OrtStatus*)nullptr; });
  put(28, +[](OrtSessionOptions*, OrtDomain*) { return (OrtStatus*)nullptr; });
  put(51, +[](OrtValue* v, void** out) { *out = v->data.data(); return (OrtStatus*)nullptr; });
  put(60, +[](const OrtShape* s, int* out) { *out = s->type; return (OrtStatus*)nullptr; });
  put(61, +[](const OrtShape* s, size_t* out) { *out = s->dims.size(); return (OrtStatus*)nullptr; });
  put(62, +[](const OrtShape* s, int64_t* out, size_t count) { for (size_t i = 0; i < count; i++) out[i] = s->dims[i]; return (OrtStatus*)nullptr; });
  put(65, +[](const OrtValue* v, OrtShape** out) { *out = new OrtShape(v->shape); return (OrtStatus*)nullptr; });
  put(85, +[](const OrtKernelInfo* i, const char* name, float* out) {
    if (!i->real.count(name)) return new OrtStatus{name};
    *out = i->real.at(name);
    return (OrtStatus*)nullptr;
  });
  put(86, +[](const OrtKernelInfo* i, const char* name, int64_t* out) {
    if (!i->whole.count(name)) return new OrtStatus{name};
    *out = i->whole.at(name)[0];
    return (OrtStatus*)nullptr;
  });
  put(89, +[](const OrtKernelContext* c, size_t* out) { *out = c->outputs.size(); return (OrtStatus*)nullptr; });
  put(90, +[](const OrtKernelContext* c, size_t at, const OrtValue** out) { *out = at < c->inputs.size() ? c->inputs[at] : nullptr; return (OrtStatus*)nullptr; });
  put(91, +[](OrtKernelContext* c, size_t at, const int64_t* dims, size_t rank, OrtValue** out) {
    *out = &c->outputs[at];
    size_t bytes = 4;
    for (size_t i = 0; i < rank; i++) bytes *= size_t(dims[i]);
    c->outputs[at] = {{kTypeFloat, {dims, dims + rank}}, vector<uint8_t>(bytes)};
    return (OrtStatus*)nullptr;
  });
  put(163, +[](const OrtKernelInfo* i, const char* name, int64_t* out, size_t* count) {
    const vector<int64_t>& found = i->whole.at(name);
    *count = found.size();
    for (size_t at = 0; out && at < found.size(); at++) out[at] = found[at];
    return (OrtStatus*)nullptr;
  });
  put(230, +[](const OrtKernelInfo* i, size_t* out) { *out = i->inputs; return (OrtStatus*)nullptr; });
  put(231, +[](const OrtKernelInfo* i, size_t* out) { *out = i->outputs; return (OrtStatus*)nullptr; });
  put(249, +[](const OrtKernelInfo*, size_t, int* is_constant, const OrtValue** out) { *is_constant = 0; *out = nullptr; return (OrtStatus*)nullptr; });
  put(274, +[](const OrtKernelContext*, void (*run)(void*, size_t), size_t count, size_t, void* with) { for (size_t i = 0; i < count; i++) run(with, i); return (OrtStatus*)nullptr; });
  return &api;
}
struct Operator {
  const OrtCustomOp* op;
  void* kernel;
  Operator(const char* name, const OrtKernelInfo& info) : op(domain.operators.at(name)) { check(op->create(op, nullptr, &info, &kernel)); }
  ~Operator() { op->destroy(kernel); }
  vector<OrtValue> run(const vector<const OrtValue*>& inputs, size_t outputs) const {
    OrtKernelContext context = {inputs, vector<OrtValue>(outputs)};
    check(op->compute(kernel, &context));
    return context.outputs;
  }
};

// ---- numbers
struct Random {
  uint64_t state;
  uint32_t next() {
    state ^= state << 13; state ^= state >> 7; state ^= state << 17;
    return uint32_t(state * 0x2545f4914f6cdd1d >> 32);
  }
  float uniform() { return float(int32_t(next()) >> 8) * 0x1p-23f; }  // -1..1
};
// Rows of sizes from 2^-20 to 2^10; some of zeros, with subnormals, and in part not finite.
vector<float> random_floats(Random& random, int64_t rows, int64_t width, bool is_strange) {
  vector<float> made(size_t(rows * width));
  for (int64_t r = 0; r < rows; r++) {
    float scale = 0x1p-20f;
    for (uint32_t n = random.next() % 31; n; n--) scale *= 2;
    if (is_strange && r == 4) scale = 0;
    if (is_strange && r == 5) scale = 0x1p-140f;
    for (int64_t i = 0; i < width; i++) made[size_t(r * width + i)] = random.uniform() * scale;
    if (is_strange && r == 6) made[size_t(r * width + 3)] = __builtin_inff();
    if (is_strange && r == 7) made[size_t(r * width + width / 2)] = __builtin_nanf("");
  }
  return made;
}
OrtValue value(const vector<float>& x, const vector<int64_t>& dims) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(x.data());
  return {{kTypeFloat, dims}, {bytes, bytes + 4 * x.size()}};
}
void set_half(uint8_t* p, uint32_t random) {
  const uint16_t half = uint16_t((random & 0x8000) | random % 0x2400);  // below 2^-6, subnormals among them
  memcpy(p, &half, 2);
}
vector<uint8_t> random_rows(Random& random, int32_t type, int64_t n, int64_t k) {
  const Format f = format(type);
  vector<uint8_t> rows(size_t(n * k / f.inputs * f.row_bytes));
  for (uint8_t& byte : rows) byte = uint8_t(random.next());
  if (f.is_float()) {  // all finite, below 4
    for (size_t i = size_t(f.row_bytes) - 1; i < rows.size(); i += size_t(f.row_bytes)) rows[i] &= 0xbf;
    return rows;
  }
  for (size_t at = 0; at < rows.size(); at += size_t(f.row_bytes)) {
    if (f.has_powers()) { rows[at] = uint8_t(100 + random.next() % 30); continue; }
    const size_t half = at + (type == Q2_K ? 80 : type == Q3_K ? 108 : type == Q6_K ? 208 : 0);
    set_half(&rows[half], random.next());
    if (f.has_mins) set_half(&rows[half + 2], random.next());
  }
  return rows;
}

// ---- digests (FNV-1a)
const char* path;
struct Digest {
  uint64_t hash = 0xcbf29ce484222325;
  void add(const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3;
  }
  // Processors differ in the bits of what is not a number.
  void add_floats(const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 4) {
      float x;
      memcpy(&x, static_cast<const uint8_t*>(data) + i, 4);
      if (x != x) add("nan", 4); else add(&x, 4);
    }
  }
  void print(const char* what, int64_t number, int64_t more) const { printf("%s %s %lld %lld %016llx\n", path, what, (long long)number, (long long)more, (unsigned long long)hash); }
};

constexpr int32_t kTypes[] = {F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS, MXFP4};
vector<uint8_t> tiles_of(Random& random, int32_t type, int64_t n, int64_t k) {
  vector<uint8_t> tiles(size_t(function<int64_t (*)(int32_t, int64_t, int64_t)>("edgespec_packed_bytes")(type, n, k)));
  const auto pack = function<int32_t (*)(int32_t, const uint8_t*, int64_t, int64_t, uint8_t*)>("edgespec_pack");
  if (pack(type, random_rows(random, type, n, k).data(), n, k, tiles.data())) exit(1);
  return tiles;
}
void products_and_lookups() {
  const auto product = function<int32_t (*)(int32_t, const uint8_t*, int64_t, int64_t, const float*, int64_t, float*, const float*, uint8_t*, int64_t, int64_t)>("edgespec_product");
  const auto lookup = function<int32_t (*)(int32_t, const uint8_t*, int64_t, int64_t, const int64_t*, int64_t, float*)>("edgespec_lookup");
  constexpr int64_t n = 37, k = 512, most = 9, ids[] = {0, 36, 17};
  Random random = {1};
  const vector<float> bias = random_floats(random, 1, n, false);
  for (const int32_t type : kTypes) {
    const vector<uint8_t> tiles = tiles_of(random, type, n, k);
    const vector<float> x = random_floats(random, most, k, true);
    alignas(64) static uint8_t scratch[most * (k + 16) * 4];
    for (const int64_t rows : {1, 3, 9}) {
      vector<float> y(size_t(rows * n));
      if (product(type, tiles.data(), n, k, x.data(), rows, y.data(), rows == 3 ? bias.data() : nullptr, scratch, 0, (n + 15) / 16)) exit(1);
      Digest digest;
      digest.add_floats(y.data(), 4 * y.size());
      digest.print("product", type, rows);
    }
    vector<float> y(3 * k);
    if (lookup(type, tiles.data(), n, k, ids, 3, y.data())) exit(1);
    Digest digest;
    digest.add_floats(y.data(), 4 * y.size());
    digest.print("lookup", type, 3);
  }
}
void gated_products() {
  Random random = {2};
  for (const int64_t gate : {kNoGate, kSilu, kGelu, kClamped}) {
    OrtKernelInfo info = {{{"K", {512}}, {"gate", {gate}}, {"types", {Q4_K, Q8_0, F16}}, {"outputs", {20, 33, 16}}}, {{"cap", gate == kGelu ? 30.f : 0.f}}, 5, 1};
    const Operator op("TiledMatMul", info);
    vector<OrtValue> weights;
    for (size_t i = 0; i < 3; i++) {
      const vector<uint8_t> tiles = tiles_of(random, int32_t(info.whole["types"][i]), info.whole["outputs"][i], 512);
      weights.push_back({{kTypeUint8, {int64_t(tiles.size())}}, tiles});
    }
    const int64_t width = gate ? 1024 : 512;
    const OrtValue x = value(random_floats(random, 20, width, false), {20, width}), y = op.run({&x, nullptr, &weights[0], &weights[1], &weights[2]}, 1)[0];
    Digest digest;
    digest.add_floats(y.data.data(), y.data.size());
    digest.print("gate", gate, 20);
  }
}
void experts() {
  constexpr int64_t size = 64, inner = 32, count = 7, rows = 90;
  Random random = {5};
  for (const int64_t gate : {kSilu, kGelu, kClamped}) {
    const bool has_up = gate != kGelu;
    vector<int64_t> types = {MXFP4, Q8_0};
    if (has_up) types.push_back(F32);
    const Operator op("Experts", {{{"K", {size}}, {"F", {inner}}, {"experts", {count}}, {"used", {3}}, {"gate", {gate}}, {"types", types}}, {}, 6 + types.size(), 1});
    const OrtValue x = value(random_floats(random, rows, size, false), {rows, size}), logits = value(random_floats(random, rows, count, false), {rows, count});
    const OrtValue first = value(random_floats(random, count, has_up ? inner : 2 * inner, false), {count, has_up ? inner : 2 * inner}), down = value(random_floats(random, count, size, false), {count, size}), scales = value(random_floats(random, 1, count, false), {count});
    const int64_t outputs[] = {has_up ? inner : 2 * inner, size, inner}, inputs[] = {size, inner, size};
    vector<OrtValue> weights;
    for (size_t i = 0; i < types.size(); i++) {
      const vector<uint8_t> tiles = tiles_of(random, int32_t(types[i]), count * outputs[i], inputs[i]);
      weights.push_back({{kTypeUint8, {int64_t(tiles.size())}}, tiles});
    }
    const OrtValue y = op.run({&x, &logits, &first, &down, nullptr, has_up ? nullptr : &scales, &weights[0], &weights[1], has_up ? &weights[2] : nullptr}, 1)[0];
    Digest digest;
    digest.add_floats(y.data.data(), y.data.size());
    digest.print("experts", gate, rows);
  }
}
void norms() {
  Random random = {3};
  for (const int64_t width : {64, 1000}) {
    const Operator op("Norm", {{}, {{"epsilon", 1e-6f}}, 3, 2});
    const OrtValue x = value(random_floats(random, 9, width, true), {9, width}), delta = value(random_floats(random, 9, width, false), {9, width});
    const OrtValue weight = value(random_floats(random, 1, width, false), {width});
    Digest digest;
    for (const OrtValue& y : op.run({&x, &weight, &delta}, 2)) digest.add_floats(y.data.data(), y.data.size());
    digest.print("norm", width, 9);
  }
}

struct Row { int32_t slot, position, cell, parent; };
// Two texts of 300 tokens, in passes of 1 to 200 rows, then a tree of both; a window, a cap, norms and sinks by turns.
void attention(int32_t type, int64_t variant) {
  constexpr int64_t heads = 4, kv_heads = 2, size = 64, chunks = 2, slots = 2, width = (heads + 2 * kv_heads) * size;
  const int32_t sizes[] = {32, int32_t(size), int32_t(size)};
  const int64_t bytes = function<int64_t (*)(int32_t, const int32_t*, int64_t, int64_t, int64_t)>("edgespec_cache_bytes")(type, sizes, 3, slots, chunks);
  vector<uint8_t> memory(size_t(bytes), 0);
  const int64_t number = function<int64_t (*)(uint8_t*, int32_t, const int32_t*, int64_t, int64_t, int64_t)>("edgespec_hold_cache")(memory.data(), type, sizes, 3, slots, chunks);
  Random random = {uint64_t(variant) + 4};
  const Operator op("Attention", {{{"heads", {heads}}, {"kv_heads", {kv_heads}}, {"head_size", {size}}, {"first_head", {1}}, {"window", {variant == 1 ? 90 : 0}}}, {{"scale", 0.125f}, {"cap", variant == 2 ? 5.f : 0.f}, {"epsilon", 1e-6f}}, 11, 1});
  const auto numbers = [&](int64_t rows, int64_t width) { return value(random_floats(random, rows, width, false), {rows, width}); };
  const OrtValue cosines = numbers(512, 24), sines = numbers(512, 24), v_norm = numbers(1, size), q_norm = numbers(1, size), k_norm = numbers(1, size), sinks = numbers(1, heads);
  const OrtValue cache = {{kTypeInt64, {1}}, {reinterpret_cast<const uint8_t*>(&number), reinterpret_cast<const uint8_t*>(&number) + 8}};
  const bool is_rotated = variant != 0, has_norms = variant == 3, has_sinks = variant == 2;
  const auto pass = [&](const vector<Row>& rows) {
    vector<float> joined;
    for (size_t i = 0; i < rows.size(); i++) for (int64_t at = 0; at < width; at++) joined.push_back(random.uniform() * (variant == 3 ? 8 : 1));
    const OrtValue q = value(joined, {int64_t(rows.size()), width});
    const auto* begin = reinterpret_cast<const uint8_t*>(rows.data());
    const OrtValue numbers = {{kTypeInt32, {int64_t(rows.size()), 4}}, {begin, begin + rows.size() * sizeof(Row)}};
    const OrtValue y = op.run({&q, nullptr, nullptr, &numbers, &cache, is_rotated ? &cosines : nullptr, is_rotated ? &sines : nullptr, has_norms ? &q_norm : nullptr, has_norms ? &k_norm : nullptr, has_sinks ? &sinks : nullptr, has_norms ? &v_norm : nullptr}, 1)[0];
    Digest digest;
    digest.add_floats(y.data.data(), y.data.size());
    digest.add(memory.data(), memory.size());
    digest.print(type == F16 ? "attention-f16" : "attention-q8_0", variant, int64_t(rows.size()));
  };
  vector<Row> rows;
  const auto chain = [&](int32_t slot, int32_t begin, int32_t end) { for (int32_t at = begin; at < end; at++) rows.push_back({slot, at, at, at == begin ? -1 : int32_t(rows.size()) - 1}); };
  const auto run = [&] { pass(rows); rows.clear(); };
  chain(0, 0, 200); run();
  chain(1, 0, 3); chain(0, 200, 201); run();
  chain(1, 3, 250); chain(0, 201, 250); run();
  for (int32_t slot = 0; slot < 2; slot++) {  // two branches and one of their root alone, across the chunks' border
    const int32_t first = int32_t(rows.size()), parents[] = {-1, 0, 0, 1, 2, 3, 4, 5, 6, -1, 8}, depths[] = {0, 1, 1, 2, 2, 3, 3, 4, 4, 0, 5};
    for (int32_t i = 0; i < 11; i++) rows.push_back({slot, 252 + depths[i] - 2, 252 + i - 2, parents[i] < 0 ? -1 : first + parents[i]});
  }
  run();
  function<void (*)(int64_t)>("edgespec_drop_cache")(number);
}
// Two texts in passes of 1 to 60 rows, some of which come again, then a tree of both.
void recurrences() {
  constexpr int64_t keys = 2, values = 4, size = 48, taps = 4, width = 70, channels = (2 * keys + values) * size, inner = values * size, seen = 2 * size + values * 32, result = values * 32;
  const int32_t sizes[] = {channels, taps, keys, values, size, size, width, 3, 0, 0, 0, 0, seen, taps, 1, values, size, 32};
  const int64_t floors[] = {INT64_MAX, 20};
  vector<uint8_t> memory(size_t(function<int64_t (*)(const int32_t*, int64_t, int64_t, int64_t)>("edgespec_state_bytes")(sizes, 3, 2, 24)));
  const int64_t number = function<int64_t (*)(uint8_t*, const int32_t*, int64_t, int64_t, int64_t, const int64_t*)>("edgespec_hold_states")(memory.data(), sizes, 3, 2, 24, floors);
  const Operator delta("DeltaNet", {{{"layer", {0}}, {"key_heads", {keys}}, {"value_heads", {values}}, {"size", {size}}, {"value_size", {size}}}, {{"epsilon", 1e-6f}}, 8, 1});
  const Operator mamba("Mamba2", {{{"layer", {2}}, {"key_heads", {1}}, {"value_heads", {values}}, {"size", {size}}, {"value_size", {32}}}, {}, 9, 1});
  const Operator conv("ShortConv", {{{"layer", {1}}}, {}, 4, 1});
  Random random = {5};
  const auto drawn = [&](int64_t rows, int64_t across) { return value(random_floats(random, rows, across, false), {rows, across}); };
  vector<float> falling(values, -0.3f);
  const OrtValue kernel = drawn(taps, channels), bias = drawn(1, values), rate = value(falling, {values}), norm = drawn(1, size), short_kernel = drawn(3, width), mamba_kernel = drawn(taps, seen), skip = drawn(1, values), shift = drawn(1, seen);
  OrtValue states = {{kTypeInt64, {1}}, vector<uint8_t>(8)};
  memcpy(states.data.data(), &number, 8);
  Digest digest;
  vector<Row> rows;
  const auto chain = [&](int32_t slot, int32_t begin, int32_t end) { for (int32_t at = begin; at < end; at++) rows.push_back({slot, at, at, at == begin ? -1 : int32_t(rows.size()) - 1}); };
  const auto run = [&] {
    const int64_t count = int64_t(rows.size());
    const OrtValue x = drawn(count, channels + inner), rates = drawn(count, 2 * values), parts = drawn(count, 3 * width), kqv = drawn(count, seen + result), times = drawn(count, values);
    OrtValue places = {{kTypeInt32, {count, 4}}, vector<uint8_t>(rows.size() * sizeof(Row))};
    memcpy(places.data.data(), rows.data(), places.data.size());
    for (const OrtValue& y : {delta.run({&x, &rates, &kernel, &bias, &rate, &norm, &places, &states}, 1)[0], conv.run({&parts, &short_kernel, &places, &states}, 1)[0], mamba.run({&kqv, &times, &mamba_kernel, &bias, &rate, &skip, &shift, &places, &states}, 1)[0]}) digest.add_floats(y.data.data(), y.data.size());
    rows.clear();
  };
  chain(0, 0, 60); run();
  chain(1, 0, 3); chain(0, 60, 61); run();
  chain(1, 3, 30); chain(0, 61, 70); run();
  chain(1, 25, 28); chain(0, 64, 65); run();
  for (int32_t slot = 0; slot < 2; slot++) {
    const int32_t first = int32_t(rows.size()), base = slot ? 28 : 65, parents[] = {-1, 0, 0, 1, 2, -1, 5}, depths[] = {0, 1, 1, 2, 2, 0, 1};
    for (int32_t i = 0; i < 7; i++) rows.push_back({slot, base + depths[i], base + i, parents[i] < 0 ? -1 : first + parents[i]});
  }
  run();
  digest.add_floats(memory.data(), memory.size());
  digest.print("recurrence", values, size);
  function<void (*)(int64_t)>("edgespec_drop_states")(number);
}
}  // namespace

int main(int count, char** words) {
  library = dlopen(words[1], RTLD_NOW);
  if (!library) { fprintf(stderr, "%s\n", dlerror()); return 1; }
  printf("path %s\n", function<const char* (*)()>("edgespec_path")());
  if (count > 2) return 0;
  const OrtApiBase base = {[](uint32_t) { return make_api(); }, nullptr};
  check(function<OrtStatus* (*)(OrtSessionOptions*, const OrtApiBase*)>("RegisterCustomOps")(nullptr, &base));
  for (const char* name : {"portable", "avx2", "avx-vnni", "avx512-vnni", "neon-dot", "neon-i8mm"}) {
    path = name;
    if (function<int32_t (*)(const char*)>("edgespec_choose_path")(name)) continue;
    products_and_lookups();
    gated_products();
    experts();
    norms();
    recurrences();
    for (const int32_t type : {F16, Q8_0}) for (int64_t variant = 0; variant < 4; variant++) attention(type, variant);
  }
  return 0;
}
