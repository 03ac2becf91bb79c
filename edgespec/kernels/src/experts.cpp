// An operator of ONNX Runtime in the domain "edgespec":
//   Experts(x [..., K], logits [..., E], gate_bias? [E, F], down_bias? [E, K], up_bias? [E, F], scales? [E], gate, down, up?, shared? [..., K], preference? [E]) -> y [..., K]
// A row takes the `used` experts with the highest logits, the first of equal ones. Its result is the sum over these, in
// the order of their logits, of softmax(their logits) * scale * expert(x), an expert being down of the gate of gate(x) and
// up(x) (Path::quantise). With a preference it takes those with the highest sigmoid(logit) + preference, and their shares
// are sigmoid(logit) over the sum of these. `shared`, times the sigmoid of one more logit of a row, is added to that. Matrices are those of all experts one below the other, in tiles; without up, gate holds both of
// each expert side by side, with 2 F biases.
//
// Rows are grouped by expert, so a pass reads the tiles of every expert that one of its rows takes once (a pass of more
// than kBatch rows once for each so many). A row meets the same operations in the same order whatever rows are beside it.
#include "floats.h"
#include "operator.h"

namespace edgespec {
namespace {

constexpr int64_t kBatch = 512, kMostExperts = 1024, kMostUsed = 64, kMostSize = 1 << 24;
enum { kGateUp = 0, kDown = 1, kUp = 2, kMatrices = 3 };  // kGateUp: gate, or both
const char* const kNames[] = {"gate", "down", "up"};
constexpr size_t kFirstMatrix = 6, kShared = kFirstMatrix + kMatrices, kPreference = kShared + 1;

struct Matrix {
  int64_t type, outputs, inputs;  // of one expert
  const uint8_t* tiles;           // of constant initializers, else null
  const float* bias;              // [experts][outputs] or null
  int64_t expert_tiles() const { return outputs / kOutputs; }
  int64_t expert_bytes() const { return packed_bytes(int32_t(type), outputs, inputs); }
};
struct Experts {
  int64_t size, inner, experts, used, gate;
  bool has_up;  // as a matrix of its own
  bool has_shared, has_preference;
  int64_t num_logits() const { return experts + has_shared; }
  Matrix matrices[kMatrices];
};
OrtStatus* create_experts(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info, void** out) {
  Experts e = {};
  int64_t types[kMatrices];
  size_t count = 0, inputs;
  TRY(attribute(info, "K", &e.size));
  TRY(attribute(info, "F", &e.inner));
  TRY(attribute(info, "experts", &e.experts));
  TRY(attribute(info, "used", &e.used));
  TRY(attribute(info, "gate", &e.gate));
  TRY(attributes(info, "types", nullptr, &count));
  TRY(num_inputs(info, &inputs));
  e.has_up = count == 3;
  e.has_preference = inputs == kPreference + 1;
  e.has_shared = inputs == kShared + 1;  // no model has both
  if (e.size < 1 || e.size > kMostSize || e.size % kOutputs || e.inner < 1 || e.inner > kMostSize || e.inner % kOutputs || e.experts < 1 || e.experts > kMostExperts || e.used < 1 || e.used > e.experts || e.used > kMostUsed)
    return invalid("edgespec: Experts cannot use %lld of %lld experts of %lld x %lld; at most %lld of %lld, and sizes that 16 divides, are allowed", (long long)e.used, (long long)e.experts, (long long)e.inner, (long long)e.size, (long long)kMostUsed, (long long)kMostExperts);
  if (e.gate < kSilu || e.gate > kClamped) return invalid("edgespec: Experts has a gate %lld, 1 (silu), 2 (gelu) and 3 (clamped) are known", (long long)e.gate);
  if ((count != 2 && count != 3) || (inputs != kFirstMatrix + count && !e.has_shared && !e.has_preference)) return invalid("edgespec: Experts has %zu types and %zu inputs, expected 2 and 8, 3 and 9, 10 with a shared result, or 11 with a preference", count, inputs);
  TRY(attributes(info, "types", types, &count));
  e.matrices[kGateUp] = {types[kGateUp], e.has_up ? e.inner : 2 * e.inner, e.size, nullptr, nullptr};
  e.matrices[kDown] = {types[kDown], e.size, e.inner, nullptr, nullptr};
  if (e.has_up) e.matrices[kUp] = {types[kUp], e.inner, e.size, nullptr, nullptr};
  for (size_t i = 0; i < count; i++) {
    Matrix& m = e.matrices[i];
    const int64_t bytes = m.type == int32_t(m.type) ? packed_bytes(int32_t(m.type), e.experts * m.outputs, m.inputs) : -1;
    if (bytes < 0) return invalid("edgespec: Experts cannot hold %lld outputs x %lld inputs of type %lld", (long long)m.outputs, (long long)m.inputs, (long long)m.type);
    TRY(constant_tiles(info, kFirstMatrix + i, kNames[i], bytes, &m.tiles));
  }
  return keep(e, out);
}

struct Choice { int32_t expert; float weight; int64_t place; };
struct Pass {
  Experts e;
  const Path* path;
  const float *x, *logits, *scales, *shared, *preference;
  float* y;
  int64_t rows, active, block_rows, pieces;
  Choice* choices;       // [rows][used]
  int64_t* first;        // [experts + 1]: an expert's places, one for each row that takes it
  int32_t *row, *expert; // by place
  int32_t* active_experts;
  bool* is_uneven;       // by place
  struct Places {
    int64_t count;
    uint8_t* activations[kKinds];  // of x, then of what the gate gives
    float* results;                // gate and up, then an expert's result
  } all, rest;           // rest: what the codes of some, `rest_of`, leave, as in TiledMatMul
  int64_t* rest_of;      // ascending, so those of an expert are together
  int stage;             // of the products: 0 gate and up, 1 down
  int64_t inputs() const { return stage ? e.inner : e.size; }
  int64_t stride() const { return stage ? e.size : 2 * e.inner; }
  bool is_read(int64_t matrix) const { return stage ? matrix == kDown : matrix == kGateUp || (e.has_up && matrix == kUp); }
  int32_t expert_of(const Places& some, int64_t at) const { return expert[&some == &rest ? rest_of[at] : at]; }
  uint8_t* block(const Places& some, int kind, int64_t start) const { return some.activations[kind] + activation_bytes(kInputs[kind], inputs(), start); }
  // Calls f(start, size) for the blocks of an expert's places, the first of which is `at`; returns the next expert's first.
  template <class F> int64_t blocks(const Places& some, int64_t at, F f) const {
    int64_t end = at;
    while (end < some.count && expert_of(some, end) == expert_of(some, at)) end++;
    for (; at < end; at += block_rows) f(at, end - at < block_rows ? end - at : block_rows);
    return end;
  }
  bool needs(int kind) const {
    bool is_needed = false;
    for (int i = 0; i < kMatrices; i++) is_needed |= is_read(i) && kind_of(e.matrices[i].type) == kind;
    return is_needed;
  }
  const float* input_of(int64_t place) const { return stage ? all.results + place * 2 * e.inner : x + row[place] * e.size; }
};
float sigmoid(float x) { return 1.f / (1.f + exponential(-x)); }
void ORT_CALL choose(void* with, size_t number) {
  const Pass& s = *static_cast<const Pass*>(with);
  const float* logits = s.logits + int64_t(number) * s.e.num_logits();
  Choice* choices = s.choices + int64_t(number) * s.e.used;
  bool is_taken[kMostExperts] = {};
  float preferred[kMostExperts], top = 0, total = 0;
  if (s.preference) for (int64_t e = 0; e < s.e.experts; e++) preferred[e] = sigmoid(logits[e]) + s.preference[e];
  const float* order = s.preference ? preferred : logits;
  for (int64_t i = 0; i < s.e.used; i++) {
    int32_t best = -1;
    for (int32_t e = 0; e < s.e.experts; e++) if (!is_taken[e] && (best < 0 || order[e] > order[best])) best = e;
    is_taken[best] = true;
    top = i ? top : logits[best];
    choices[i] = {best, s.preference ? sigmoid(logits[best]) : exponential(logits[best] - top), 0};
    total += choices[i].weight;
  }
  for (int64_t i = 0; i < s.e.used; i++) choices[i].weight = choices[i].weight / total * (s.scales ? s.scales[choices[i].expert] : 1.f);
}
// Places by expert, an expert's in the order of the rows.
void group(Pass& s) {
  const int64_t count = s.rows * s.e.used;
  memset(s.first, 0, sizeof(int64_t) * size_t(s.e.experts + 1));
  for (int64_t i = 0; i < count; i++) s.first[s.choices[i].expert + 1]++;
  s.active = 0;
  for (int32_t e = 0; e < s.e.experts; e++) {
    if (s.first[e + 1]) s.active_experts[s.active++] = e;
    s.first[e + 1] += s.first[e];
  }
  for (int64_t i = 0; i < count; i++) {
    Choice& c = s.choices[i];
    c.place = s.first[c.expert]++;
    s.row[c.place] = int32_t(i / s.e.used);
    s.expert[c.place] = c.expert;
  }
  for (int64_t e = s.e.experts; e > 0; e--) s.first[e] = s.first[e - 1];
  s.first[0] = 0;
}
void ORT_CALL quantise_place(void* with, size_t number) {
  const Pass& s = *static_cast<const Pass*>(with);
  const int64_t place = int64_t(number), zero = s.first[s.expert[place]], left = s.first[s.expert[place] + 1];
  const int64_t start = zero + (place - zero) / s.block_rows * s.block_rows, size = left - start < s.block_rows ? left - start : s.block_rows;
  s.is_uneven[place] = false;
  for (int kind = 0; kind < kKinds; kind++)
    if (s.needs(kind) && s.path->quantise(kInputs[kind], s.stage ? int(s.e.gate) : kNoGate, s.input_of(place), s.inputs(), place - start, size, s.block(s.all, kind, start), nullptr)) s.is_uneven[place] = true;
}
// What the codes of uneven places leave.
OrtStatus* quantise_rest(Pass& s, Scratch* scratch) {
  int64_t size = 0, offset[kKinds];
  s.rest = {};
  for (int64_t place = 0; place < s.all.count; place++) if (s.is_uneven[place]) s.rest_of[s.rest.count++] = place;
  if (!s.rest.count) return nullptr;
  const int64_t whole = activation_bytes(1, s.inputs(), 1);  // one row's codes again, of which only what they leave is kept
  for (int kind = 0; kind < kKinds; kind++) if (s.needs(kind)) { offset[kind] = size; size += (activation_bytes(kInputs[kind], s.inputs(), s.rest.count) + 63) & ~63; }
  if (!scratch->get(size_t(size + 2 * whole) + sizeof(float) * size_t(s.rest.count * s.stride()))) return error(kFail, "edgespec: out of memory");
  uint8_t* again = scratch->data + size;
  float* left = reinterpret_cast<float*>(again + whole);
  s.rest.results = left + s.inputs();
  for (int kind = 0; kind < kKinds; kind++) if (s.needs(kind)) {
    s.rest.activations[kind] = scratch->data + offset[kind];
    for (int64_t at = 0; at < s.rest.count;) at = s.blocks(s.rest, at, [&](int64_t start, int64_t rows) {
      for (int64_t i = 0; i < rows; i++) {
        s.path->quantise(kInputs[kind], s.stage ? int(s.e.gate) : kNoGate, s.input_of(s.rest_of[start + i]), s.inputs(), 0, 1, again, left);
        s.path->quantise(kInputs[kind], kNoGate, left, s.inputs(), i, rows, s.block(s.rest, kind, start), nullptr);
      }
    });
  }
  return nullptr;
}
// The tiles begin..end of those that this stage reads of an expert, for its places from `at` on.
void multiply(const Pass& s, const Pass::Places& some, int64_t at, int64_t begin, int64_t end) {
  const int32_t expert = s.expert_of(some, at);
  s.blocks(some, at, [&](int64_t start, int64_t rows) {
    int64_t zero = 0, output = 0;
    for (int i = 0; i < kMatrices; i++) if (s.is_read(i)) {
      const Matrix& m = s.e.matrices[i];
      const int64_t first = begin > zero ? begin - zero : 0, last = end - zero < m.expert_tiles() ? end - zero : m.expert_tiles();
      const float* bias = m.bias && &some == &s.all ? m.bias + expert * m.outputs : nullptr;
      if (first < last) s.path->product(int32_t(m.type), m.tiles + expert * m.expert_bytes(), m.outputs, m.inputs, s.block(some, kind_of(m.type), start), int(rows), some.results + start * s.stride() + output, s.stride(), bias, first, last);
      zero += m.expert_tiles();
      output += m.outputs;
    }
  });
}
// One piece of the tiles that this stage reads, those of one expert after the other.
void ORT_CALL run_piece(void* with, size_t piece) {
  const Pass& s = *static_cast<const Pass*>(with);
  const int64_t each = s.stride() / kOutputs;
  const int64_t begin = s.active * each * int64_t(piece) / s.pieces, end = s.active * each * int64_t(piece + 1) / s.pieces;
  for (int64_t at = begin / each; at * each < end; at++) {
    const int32_t expert = s.active_experts[at];
    const int64_t from = begin > at * each ? begin - at * each : 0, to = end - at * each < each ? end - at * each : each;
    multiply(s, s.all, s.first[expert], from, to);
    int64_t rest = 0;
    while (rest < s.rest.count && s.expert_of(s.rest, rest) < expert) rest++;
    if (rest == s.rest.count || s.expert_of(s.rest, rest) != expert) continue;
    multiply(s, s.rest, rest, from, to);
    for (; rest < s.rest.count && s.expert_of(s.rest, rest) == expert; rest++) {
      float *y = s.all.results + s.rest_of[rest] * s.stride(), *more = s.rest.results + rest * s.stride();
      for (int64_t o = from * kOutputs; o < to * kOutputs; o++) y[o] += more[o];
    }
  }
}
void ORT_CALL add_row(void* with, size_t number) {
  const Pass& s = *static_cast<const Pass*>(with);
  const Choice* choices = s.choices + int64_t(number) * s.e.used;
  float* y = s.y + int64_t(number) * s.e.size;
  for (int64_t c = 0; c < s.e.used; c++) {
    const float *from = s.all.results + choices[c].place * s.e.size, weight = choices[c].weight;
    if (c) for (int64_t i = 0; i < s.e.size; i++) y[i] += weight * from[i];
    else for (int64_t i = 0; i < s.e.size; i++) y[i] = weight * from[i];
  }
  if (!s.shared) return;
  const float *from = s.shared + int64_t(number) * s.e.size, weight = sigmoid(s.logits[int64_t(number) * s.e.num_logits() + s.e.experts]);
  for (int64_t i = 0; i < s.e.size; i++) y[i] += weight * from[i];
}
OrtStatus* run_stage(Pass& s, int stage) {
  int64_t bytes = 0;
  s.stage = stage;
  s.all.count = s.rows * s.e.used;
  s.block_rows = s.inputs() > 4096 ? kRowBlock / 2 : kRowBlock;
  for (int i = 0; i < kMatrices; i++) if (s.is_read(i)) bytes += s.active * s.e.matrices[i].expert_bytes();
  // As in TiledMatMul; more pieces than there, as some experts have more rows than others.
  const int64_t tiles = s.active * s.stride() / kOutputs, most = tiles < 256 ? tiles : 256;
  s.pieces = bytes / 24576 < 1 ? 1 : bytes / 24576 < most ? bytes / 24576 : most;
  run_all(s.all.count * s.inputs() < 65536, quantise_place, s.all.count, &s);
  Scratch rest;
  TRY(quantise_rest(s, &rest));
  run_all(bytes / s.active / 8 * s.all.count < 12288, run_piece, s.pieces, &s);
  return nullptr;
}
OrtStatus* ORT_CALL compute_experts(void* self, OrtKernelContext* context) {
  Pass s = {};
  s.e = *static_cast<const Experts*>(self);
  s.path = &path_in_use();
  const Experts& e = s.e;
  Tensor x, logits, shared = {};
  TRY(read_floats(context, 0, "x", &x));
  TRY(read_floats(context, 1, "logits", &logits));
  if (!x.rank || x.dims[x.rank - 1] != e.size) return invalid("edgespec: Experts' x is %lld wide, expected %lld", (long long)(x.rank ? x.dims[x.rank - 1] : 0), (long long)e.size);
  const int64_t all = elements(x, x.rank - 1);
  if (!logits.rank || logits.dims[logits.rank - 1] != e.num_logits() || elements(logits, logits.rank - 1) != all) return invalid("edgespec: Experts' logits are not %lld rows of %lld", (long long)all, (long long)e.num_logits());
  if (e.has_shared) {
    TRY(read_floats(context, kShared, "shared", &shared));
    if (!shared.rank || shared.dims[shared.rank - 1] != e.size || elements(shared, shared.rank - 1) != all) return invalid("edgespec: Experts' shared result is not %lld rows of %lld", (long long)all, (long long)e.size);
    s.shared = static_cast<const float*>(shared.data);
  }
  for (size_t i = 0; i < kMatrices; i++) {
    Matrix& m = s.e.matrices[i];
    if (i == kUp && !e.has_up) continue;
    TRY(read_vector(context, 2 + i, kNames[i], e.experts * m.outputs, &m.bias));
    TRY(input_tiles(context, kFirstMatrix + i, kNames[i], e.experts * m.expert_bytes(), &m.tiles));
  }
  TRY(read_vector(context, 5, "scales", e.experts, &s.scales));
  if (e.has_preference) TRY(read_vector(context, kPreference, "preference", e.experts, &s.preference));
  OrtValue* y; void* p;
  TRY(output(context, 0, x.dims, x.rank, &y));
  TRY(data(y, &p));
  const int64_t batch = all < kBatch ? all : kBatch, places = batch * e.used, width = e.size > 2 * e.inner ? e.size : 2 * e.inner;
  bool is_used[kKinds] = {};
  for (int i = 0; i < kMatrices; i++) if (e.matrices[i].outputs) is_used[kind_of(e.matrices[i].type)] = true;
  Scratch scratch;
  for (Pieces pieces = {nullptr, 0}; all; pieces = {scratch.data, 0}) {
    pieces.take(&s.choices, places);
    pieces.take(&s.first, e.experts + 1);
    pieces.take(&s.active_experts, e.experts);
    pieces.take(&s.row, places);
    pieces.take(&s.expert, places);
    pieces.take(&s.is_uneven, places);
    pieces.take(&s.rest_of, places);
    pieces.take(&s.all.results, places * width);
    for (int kind = 0; kind < kKinds; kind++) if (is_used[kind]) pieces.take(&s.all.activations[kind], activation_bytes(kInputs[kind], e.size > e.inner ? e.size : e.inner, places));
    if (pieces.data) break;
    if (!scratch.get(size_t(pieces.size))) return error(kFail, "edgespec: out of memory");
  }
  s.x = static_cast<const float*>(x.data); s.logits = static_cast<const float*>(logits.data); s.y = static_cast<float*>(p);
  for (int64_t row = 0; row < all; row += batch) {
    s.rows = all - row < batch ? all - row : batch;
    run_all(s.rows * e.used * e.experts < 65536, choose, s.rows, &s);
    group(s);
    TRY(run_stage(s, 0));
    TRY(run_stage(s, 1));
    run_all(s.rows * e.used * e.size < 65536, add_row, s.rows, &s);
    s.x += s.rows * e.size; s.logits += s.rows * e.num_logits(); s.y += s.rows * e.size;
    if (s.shared) s.shared += s.rows * e.size;
  }
  return nullptr;
}

}  // namespace
const Operator kExpertsOperator = {"Experts", "ffFFFFttTFF", 1, create_experts, compute_experts};
}  // namespace edgespec
