// Two operators of ONNX Runtime in the domain "edgespec" (attention.cpp and experts.cpp have the others):
//   TiledMatMul(x [..., K], bias?, w0, w1?, w2?) -> y [..., sum of outputs] or one y [..., N] for each matrix
//   TiledLookup(ids [...], tiles) -> rows [..., K]
// Weights are uint8 tensors in the tile layout, used in place. Every size is checked before a kernel sees it.
#include "matrices.h"

namespace edgespec {
const OrtApi* ort;
namespace {
constexpr int64_t kBatch = 512;  // rows that are quantised before they are multiplied

// ---- TiledMatMul
const char* const kNames[] = {"w0", "w1", "w2"};
struct MatMul {
  int64_t k, gate, all_outputs;  // gate: x is [..., 2 k], see Path::quantise; all_outputs: of all matrices
  float cap;                     // y is cap * tanh(y / cap); 0: as it is
  size_t count;
  Matrix matrices[kMostMatrices];
};
OrtStatus* create_matmul(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info, void** out) {
  MatMul m = {};
  size_t types = 0, outputs = 0, node_inputs, node_outputs;
  int64_t each_type[kMostMatrices], each_outputs[kMostMatrices];
  TRY(read_attributes(info, {{"K", &m.k}, {"gate", &m.gate, true}, {"cap", &m.cap, true}}));
  if (m.gate < kNoGate || m.gate > kClamped)
    return invalid("edgespec: TiledMatMul has a gate %lld, 0, 1 (silu), 2 (gelu) and 3 (clamped) are known", m.gate);
  TRY(attributes(info, "types", nullptr, &types));
  TRY(attributes(info, "outputs", nullptr, &outputs));
  TRY(num_inputs(info, &node_inputs));
  TRY(num_outputs(info, &node_outputs));
  if (types < 1 || types > kMostMatrices || types != outputs)
    return invalid("edgespec: TiledMatMul has %zu types and %zu outputs, expected as many, 1 to %d", types, outputs, kMostMatrices);
  if (node_inputs != 2 + types)
    return invalid("edgespec: TiledMatMul has %zu inputs, expected x, bias and %zu matrices", node_inputs, types);
  if (node_outputs != 1 && node_outputs != types)
    return invalid("edgespec: TiledMatMul has %zu outputs, expected 1 or %zu", node_outputs, types);
  m.count = types;
  TRY(attributes(info, "types", each_type, &types));
  TRY(attributes(info, "outputs", each_outputs, &outputs));
  for (size_t i = 0; i < m.count; i++) {
    m.matrices[i] = {each_type[i], each_outputs[i], m.k, nullptr, nullptr, 0, 0};
    TRY(m.matrices[i].open(info, "TiledMatMul", 2 + i, kNames[i], 1));
    if (__builtin_add_overflow(m.all_outputs, each_outputs[i], &m.all_outputs))
      return invalid("edgespec: TiledMatMul has too many outputs");
  }
  return keep(m, out);
}
OrtStatus* ORT_CALL compute_matmul(void* self, OrtKernelContext* context) {
  const MatMul& m = *static_cast<const MatMul*>(self);
  int64_t first[2] = {};
  const int32_t group = 0;
  const float* bias;
  size_t separate;
  Tensor x;
  Products p = {};
  p.kernels = &kernels_in_use(); p.num_matrices = m.count; p.gate = int(m.gate); p.cap = m.cap;
  p.first = first; p.groups = &group; p.num_groups = 1; p.most_pieces = 64;
  p.x_stride = m.gate ? 2 * m.k : m.k;
  TRY(read_floats(context, 0, "x", &x));
  if (x.width() != p.x_stride) return invalid("edgespec: TiledMatMul's x has %lld inputs, expected %lld", x.width(), p.x_stride);
  p.x = x.floats();
  TRY(read_vector(context, 1, "TiledMatMul's bias", m.all_outputs, &bias));
  TRY(num_outputs(context, &separate));
  const int64_t rows = x.rows();
  for (size_t i = 0, at = 0; i < m.count; at += size_t(m.matrices[i++].outputs)) {
    Matrix& each = p.matrices[i] = m.matrices[i];
    TRY(each.read_tiles(context, 2 + i, kNames[i], 1));
    each.bias = bias ? bias + at : nullptr;
    x.dims[x.rank - 1] = p.all.stride[i] = separate > 1 ? each.outputs : m.all_outputs;
    if (separate == 1 && i) { p.all.y[i] = p.all.y[0] + at; continue; }
    TRY(open(context, i, x, &p.all.y[i]));
    if (!p.all.y[i]) return invalid("edgespec: TiledMatMul's output %zu has no name", i);
  }
  for (int64_t row = 0; row < rows; row += p.all.count) {
    p.all.count = first[1] = rows - row < kBatch ? rows - row : kBatch;
    TRY(p.run());
    p.x += p.all.count * p.x_stride;
    for (size_t i = 0; i < m.count; i++) p.all.y[i] += p.all.count * p.all.stride[i];
  }
  return nullptr;
}

// ---- TiledLookup
OrtStatus* create_lookup(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info, void** out) {
  Matrix m = {};
  TRY(read_attributes(info, {{"K", &m.inputs}, {"type", &m.type}, {"N", &m.outputs}}));
  TRY(m.open(info, "TiledLookup", 1, "tiles", 1));
  return keep(m, out);
}
OrtStatus* ORT_CALL compute_lookup(void* self, OrtKernelContext* context) {
  Matrix m = *static_cast<const Matrix*>(self);
  Tensor ids;
  float* y;
  TRY(read(context, 0, "ids", kTypeInt64, &ids));
  TRY(m.read_tiles(context, 1, "tiles", 1));
  if (ids.rank == kMaxRank) return invalid("edgespec: ids has %zu dimensions, at most %d are allowed", ids.rank, kMaxRank - 1);
  const int64_t count = ids.size();
  ids.dims[ids.rank++] = m.inputs;
  TRY(open(context, 0, ids, &y));
  if (!lookup(int32_t(m.type), m.tiles, m.outputs, m.inputs, static_cast<const int64_t*>(ids.data), count, y))
    return invalid("edgespec: TiledLookup has an id outside 0..%lld", m.outputs - 1);
  return nullptr;
}

const Operator kOperators[] = {
    {"TiledMatMul", "fFtTT", kMostMatrices, create_matmul, compute_matmul},
    {"TiledLookup", "nt", 1, create_lookup, compute_lookup},
};
}  // namespace
}  // namespace edgespec

extern "C" __attribute__((visibility("default"))) OrtStatus* ORT_CALL RegisterCustomOps(OrtSessionOptions* options,
                                                                                        const OrtApiBase* base) {
  using namespace edgespec;
  static OrtDomain* domain;  // kept for the process's life, as sessions refer to it
  ort = base->get_api(18);
  if (!domain) {
    OrtDomain* fresh;
    TRY(new_domain("edgespec", &fresh));
    for (const Operator& each : kOperators) TRY(add_operator(fresh, &each));
    for (const Operator& each : kAttentionOperators) TRY(add_operator(fresh, &each));
    for (const Operator& each : kRecurrentOperators) TRY(add_operator(fresh, &each));
    TRY(add_operator(fresh, &kExpertsOperator));
    domain = fresh;
  }
  return add_domain(options, domain);
}
