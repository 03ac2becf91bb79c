// An operator of ONNX Runtime in the domain "edgespec":
//   Experts(x [..., K], logits [..., E], gate_bias? [E, F], down_bias? [E, K], up_bias? [E, F], scales? [E], gate, down, up?, shared? [...,
//   K], preference? [E]) -> y [..., K]
// A row takes the `used` experts with the highest logits, the first of equal ones. Its result is the sum over these, in
// the order of their logits, of softmax(their logits) * scale * expert(x), an expert being down of the gate of gate(x) and
// up(x) (Path::quantise). With a preference it takes those with the highest sigmoid(logit) + preference, and their shares
// are sigmoid(logit) over the sum of these. `shared`, times the sigmoid of one more logit of a row, is added to that. Matrices are those of
// all experts one below the other, in tiles; without up, gate holds both of each expert side by side, with 2 F biases.
//
// Rows are grouped by expert, so a pass reads the tiles of every expert that one of its rows takes once (a pass of more
// than kBatch rows once for each so many).
#include "floats.h"
#include "matrices.h"

namespace edgespec {
namespace {

constexpr int64_t kBatch = 512, kMostExperts = 1024, kMostUsed = 64, kMostSize = 1 << 24;
enum { kGateUp = 0, kDown = 1, kUp = 2 };  // kGateUp: gate, or both
const char* const kNames[] = {"gate", "down", "up"};
constexpr size_t kFirstMatrix = 6, kShared = kFirstMatrix + kMostMatrices, kPreference = kShared + 1;

struct Experts {
  int64_t size, inner, experts, used, gate;
  bool has_up;  // as a matrix of its own
  bool has_shared, has_preference;
  int64_t num_logits() const { return experts + has_shared; }
  Matrix matrices[kMostMatrices];
};
OrtStatus* create_experts(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info, void** out) {
  Experts e = {};
  int64_t types[kMostMatrices];
  size_t count = 0, inputs;
  TRY(read_attributes(info, {{"K", &e.size}, {"F", &e.inner}, {"experts", &e.experts}, {"used", &e.used}, {"gate", &e.gate}}));
  TRY(attributes(info, "types", nullptr, &count));
  TRY(num_inputs(info, &inputs));
  e.has_up = count == 3;
  e.has_preference = inputs == kPreference + 1;
  e.has_shared = inputs == kShared + 1;  // no model has both
  if (e.size < 1 || e.size > kMostSize || e.size % kOutputs || e.inner < 1 || e.inner > kMostSize || e.inner % kOutputs || e.experts < 1 ||
      e.experts > kMostExperts || e.used < 1 || e.used > e.experts || e.used > kMostUsed)
    return invalid(
        "edgespec: Experts cannot use %lld of %lld experts of %lld x %lld; at most %lld of %lld, and sizes that 16 divides, are allowed",
        e.used, e.experts, e.inner, e.size, kMostUsed, kMostExperts);
  if (e.gate < kSilu || e.gate > kClamped)
    return invalid("edgespec: Experts has a gate %lld, 1 (silu), 2 (gelu) and 3 (clamped) are known", e.gate);
  if ((count != 2 && count != 3) || (inputs != kFirstMatrix + count && !e.has_shared && !e.has_preference))
    return invalid(
        "edgespec: Experts has %zu types and %zu inputs, expected 2 and 8, 3 and 9, 10 with a shared result, or 11 with a preference",
        count, inputs);
  TRY(attributes(info, "types", types, &count));
  const int64_t outputs[] = {e.has_up ? e.inner : 2 * e.inner, e.size, e.inner};
  for (size_t i = 0; i < count; i++) {
    e.matrices[i] = {types[i], outputs[i], i == kDown ? e.inner : e.size, nullptr, nullptr, 0, 0};
    TRY(e.matrices[i].open(info, "Experts", kFirstMatrix + i, kNames[i], e.experts));
  }
  return keep(e, out);
}

struct Choice { int32_t expert; float weight; int64_t place; };
struct Pass {
  Experts e;
  const float *x, *logits, *scales, *shared, *preference;
  float *y, *results;     // results, by place: gate and up, then an expert's result
  int64_t rows, active;
  Choice* choices;        // [rows][used]
  int64_t* first;         // [experts + 1]: an expert's places, one for each row that takes it
  int32_t *row, *expert;  // by place
  int32_t* active_experts;
};
float sigmoid(float x) { return 1.f / (1.f + exponential(-x)); }
void choose(const Pass& s, int64_t row) {
  const float* logits = s.logits + row * s.e.num_logits();
  Choice* choices = s.choices + row * s.e.used;
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
void add_row(const Pass& s, int64_t row) {
  const Choice* choices = s.choices + row * s.e.used;
  float* y = s.y + row * s.e.size;
  for (int64_t c = 0; c < s.e.used; c++) {
    const float *from = s.results + choices[c].place * s.e.size, weight = choices[c].weight;
    if (c) for (int64_t i = 0; i < s.e.size; i++) y[i] += weight * from[i];
    else for (int64_t i = 0; i < s.e.size; i++) y[i] = weight * from[i];
  }
  if (!s.shared) return;
  const float *from = s.shared + row * s.e.size, weight = sigmoid(s.logits[row * s.e.num_logits() + s.e.experts]);
  for (int64_t i = 0; i < s.e.size; i++) y[i] += weight * from[i];
}
// Gate and up of all places, or down of what these gave, into its place.
OrtStatus* run_stage(const Pass& s, bool is_down) {
  const Experts& e = s.e;
  Products p = {};
  p.kernels = &kernels_in_use(); p.most_pieces = 256;  // many, as some experts have more rows than others
  p.first = s.first; p.group = s.expert; p.groups = s.active_experts; p.num_groups = s.active;
  p.all.count = s.rows * e.used;
  if (is_down) {
    p.x = s.results; p.x_stride = 2 * e.inner; p.gate = int(e.gate);
    p.matrices[p.num_matrices++] = e.matrices[kDown];
  } else {
    p.x = s.x; p.x_stride = e.size; p.row = s.row;
    p.matrices[p.num_matrices++] = e.matrices[kGateUp];
    if (e.has_up) p.matrices[p.num_matrices++] = e.matrices[kUp];
  }
  for (size_t i = 0; i < p.num_matrices; i++) {
    p.all.y[i] = s.results + (i ? e.inner : 0);
    p.all.stride[i] = is_down ? e.size : 2 * e.inner;
  }
  return p.run();
}
OrtStatus* ORT_CALL compute_experts(void* self, OrtKernelContext* context) {
  Pass s = {};
  s.e = *static_cast<const Experts*>(self);
  const Experts& e = s.e;
  Tensor x, logits, shared = {};
  TRY(read_floats(context, 0, "x", &x));
  TRY(read_floats(context, 1, "logits", &logits));
  if (x.width() != e.size) return invalid("edgespec: Experts' x is %lld wide, expected %lld", x.width(), e.size);
  const int64_t all = x.rows();
  if (logits.width() != e.num_logits() || logits.rows() != all)
    return invalid("edgespec: Experts' logits are not %lld rows of %lld", all, e.num_logits());
  if (e.has_shared) {
    TRY(read_floats(context, kShared, "shared", &shared));
    if (shared.width() != e.size || shared.rows() != all)
      return invalid("edgespec: Experts' shared result is not %lld rows of %lld", all, e.size);
  }
  for (size_t i = 0; i < (e.has_up ? 3 : 2); i++) {
    Matrix& m = s.e.matrices[i];
    TRY(read_vector(context, 2 + i, kNames[i], e.experts * m.outputs, &m.bias));
    TRY(m.read_tiles(context, kFirstMatrix + i, kNames[i], e.experts));
  }
  TRY(read_vector(context, 5, "scales", e.experts, &s.scales));
  if (e.has_preference) TRY(read_vector(context, kPreference, "preference", e.experts, &s.preference));
  s.x = x.floats(); s.logits = logits.floats(); s.shared = shared.floats();
  TRY(open(context, 0, x, &s.y));
  const int64_t batch = all < kBatch ? all : kBatch, places = batch * e.used, width = e.size > 2 * e.inner ? e.size : 2 * e.inner;
  Scratch scratch;
  if (!all) return nullptr;
  TRY(scratch.get({{&s.choices, places}, {&s.first, e.experts + 1}, {&s.active_experts, e.experts},
                   {&s.row, places}, {&s.expert, places}, {&s.results, places * width}}));
  for (int64_t row = 0; row < all; row += batch) {
    s.rows = all - row < batch ? all - row : batch;
    run_all(s.rows * e.used * e.experts < 65536, s.rows, [&](int64_t row) { choose(s, row); });
    group(s);
    TRY(run_stage(s, false));
    TRY(run_stage(s, true));
    run_all(s.rows * e.used * e.size < 65536, s.rows, [&](int64_t row) { add_row(s, row); });
    s.x += s.rows * e.size; s.logits += s.rows * e.num_logits(); s.y += s.rows * e.size;
    if (s.shared) s.shared += s.rows * e.size;
  }
  return nullptr;
}

}  // namespace
const Operator kExpertsOperator = {"Experts", "ffFFFFttTFF", 1, create_experts, compute_experts};
}  // namespace edgespec
