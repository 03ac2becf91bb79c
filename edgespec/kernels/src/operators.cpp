// Two operators of ONNX Runtime in the domain "edgespec" (attention.cpp and experts.cpp have the others):
//   TiledMatMul(x [..., K], bias?, w0, w1?, w2?) -> y [..., sum of outputs] or one y [..., N] for each matrix
//   TiledLookup(ids [...], tiles) -> rows [..., K]
// Weights are uint8 tensors in the tile layout, used in place. Every size is checked before a kernel sees it.
#include "floats.h"
#include "operator.h"

namespace edgespec {
const OrtApi* ort;
namespace {

constexpr int kMatrices = 3;
constexpr int64_t kBatch = 512;  // rows that are quantised before they are multiplied

// Tiles in memory that a program holds. In a graph 8 bytes with their number stand for them while its session is made,
// as ONNX Runtime would copy a weight that it is given in memory.
struct Held { int64_t number, bytes; const uint8_t* tiles; Held* next; };
Registry<Held> held;

OrtStatus* read_tiles(const OrtValue* value, const char* name, int64_t bytes, const uint8_t** out) {
  Tensor t;
  TRY(read(value, name, kTypeUint8, &t));
  const int64_t given = elements(t, t.rank);
  *out = static_cast<const uint8_t*>(t.data);
  if (given == int64_t(sizeof(int64_t))) {
    int64_t number;
    memcpy(&number, t.data, sizeof number);
    const Held* found = held.find(number);
    if (!found || found->bytes != bytes) return invalid("edgespec: %s names tiles that nobody holds, or of another size than %lld bytes", name, (long long)bytes);
    *out = found->tiles;
  } else if (given != bytes) return invalid("edgespec: %s has %lld bytes, its type and size need %lld", name, (long long)given, (long long)bytes);
  return nullptr;
}
}  // namespace

OrtStatus* constant_tiles(const OrtKernelInfo* info, size_t at, const char* name, int64_t bytes, const uint8_t** out) {
  int constant;
  const OrtValue* value;
  TRY(constant_input(info, at, &constant, &value));
  return constant ? read_tiles(value, name, bytes, out) : nullptr;
}
OrtStatus* input_tiles(const OrtKernelContext* context, size_t at, const char* name, int64_t bytes, const uint8_t** out) {
  const OrtValue* value;
  if (*out) return nullptr;
  TRY(input(context, at, &value));
  return read_tiles(value, name, bytes, out);
}

namespace {
// ---- TiledMatMul
const char* const kNames[] = {"x", "bias", "w0", "w1", "w2"};
struct MatMul {
  int64_t k, gate, all_outputs;  // gate: x is [..., 2 k], see Path::quantise; all_outputs: of all matrices
  float cap;                     // y is cap * tanh(y / cap); 0: as it is
  size_t count;
  int64_t types[kMatrices], outputs[kMatrices], bytes[kMatrices];
  const uint8_t* tiles[kMatrices];  // of constant initializers, else null
};
OrtStatus* create_matmul(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info, void** out) {
  MatMul m = {};
  size_t types = 0, outputs = 0, node_inputs, node_outputs;
  TRY(attribute(info, "K", &m.k));
  optional(attribute(info, "gate", &m.gate));
  optional(attribute(info, "cap", &m.cap));
  if (m.gate < kNoGate || m.gate > kClamped) return invalid("edgespec: TiledMatMul has a gate %lld, 0, 1 (silu), 2 (gelu) and 3 (clamped) are known", (long long)m.gate);
  TRY(attributes(info, "types", nullptr, &types));
  TRY(attributes(info, "outputs", nullptr, &outputs));
  TRY(num_inputs(info, &node_inputs));
  TRY(num_outputs(info, &node_outputs));
  if (types < 1 || types > kMatrices || types != outputs) return invalid("edgespec: TiledMatMul has %zu types and %zu outputs, expected as many, 1 to %d", types, outputs, kMatrices);
  if (node_inputs != 2 + types) return invalid("edgespec: TiledMatMul has %zu inputs, expected x, bias and %zu matrices", node_inputs, types);
  if (node_outputs != 1 && node_outputs != types) return invalid("edgespec: TiledMatMul has %zu outputs, expected 1 or %zu", node_outputs, types);
  m.count = types;
  TRY(attributes(info, "types", m.types, &types));
  TRY(attributes(info, "outputs", m.outputs, &outputs));
  for (size_t i = 0; i < m.count; i++) {
    if (m.types[i] != int32_t(m.types[i]) || (m.bytes[i] = packed_bytes(int32_t(m.types[i]), m.outputs[i], m.k)) < 0) return invalid("edgespec: TiledMatMul cannot hold %lld outputs x %lld inputs of type %lld", (long long)m.outputs[i], (long long)m.k, (long long)m.types[i]);
    if (__builtin_add_overflow(m.all_outputs, m.outputs[i], &m.all_outputs)) return invalid("edgespec: TiledMatMul has too many outputs");
    TRY(constant_tiles(info, 2 + i, kNames[2 + i], m.bytes[i], &m.tiles[i]));
  }
  return keep(m, out);
}

struct Run {
  struct Rows {
    int64_t count;
    uint8_t* activations[kKinds];  // null: not needed
    const float* bias;
    float* y[kMatrices];
    int64_t stride[kMatrices];
  };
  const MatMul* m;
  const Path* path;
  const float* x;
  const uint8_t* tiles[kMatrices];
  int64_t first_tile[kMatrices + 1], block_rows, pieces;
  Rows rows;  // of this batch
  Rows rest;  // what the codes of some of them, `rest_of`, leave: 15 bits instead of 8
  int64_t rest_of[kBatch];
  bool is_uneven[kBatch];

  int64_t inputs() const { return m->gate ? 2 * m->k : m->k; }
  int64_t rows_of_block(const Rows& all, int64_t row) const { return all.count - row < block_rows ? all.count - row : block_rows; }
  uint8_t* block(const Rows& all, int kind, int64_t row) const { return all.activations[kind] + activation_bytes(kInputs[kind], m->k, row); }
  // Codes of row `row` of `to`. With `left` [k] that gets what they leave.
  bool quantise(int kind, int gate, const float* from, const Rows& to, int64_t row, float* left) const {
    const int64_t start = row / block_rows * block_rows;
    return path->quantise(kInputs[kind], gate, from, m->k, row - start, rows_of_block(to, start), block(to, kind, start), left);
  }
  void multiply(const Rows& some, int64_t begin, int64_t end) const;
};
void ORT_CALL quantise_row(void* with, size_t row) {
  Run& run = *static_cast<Run*>(with);
  run.is_uneven[row] = false;
  for (int kind = 0; kind < kKinds; kind++)
    if (run.rows.activations[kind] && run.quantise(kind, int(run.m->gate), run.x + int64_t(row) * run.inputs(), run.rows, int64_t(row), nullptr)) run.is_uneven[row] = true;
}
// Where activations of `rows` rows lie, one kind after another. Returns the bytes of them all.
int64_t place(const MatMul& m, int64_t rows, int64_t* offset) {
  int64_t size = 0;
  for (int kind = 0; kind < kKinds; kind++) offset[kind] = -1;
  for (size_t i = 0; i < m.count; i++) {
    const int kind = kind_of(m.types[i]);
    if (offset[kind] < 0) { offset[kind] = size; size += (activation_bytes(kInputs[kind], m.k, rows) + 63) & ~63; }
  }
  return size;
}
// Few rows are uneven, such as the first of a text, where one enormous value would cost its whole block the small ones.
OrtStatus* quantise_rest(Run* run, Scratch* scratch) {
  const MatMul& m = *run->m;
  int64_t offset[kKinds], count = 0;
  for (int64_t row = 0; row < run->rows.count; row++) if (run->is_uneven[row]) run->rest_of[count++] = row;
  run->rest = {};
  run->rest.count = count;
  if (!count) return nullptr;
  const int64_t size = place(m, count, offset);
  if (!scratch->get(size_t(size) + size_t(m.k + count * m.all_outputs) * sizeof(float))) return error(kFail, "edgespec: out of memory");
  float* left = reinterpret_cast<float*>(scratch->data + size);
  for (size_t i = 0, at = 0; i < m.count; at += size_t(m.outputs[i++])) { run->rest.y[i] = left + m.k + at; run->rest.stride[i] = m.all_outputs; }
  for (int kind = 0; kind < kKinds; kind++) if (offset[kind] >= 0) {
    run->rest.activations[kind] = scratch->data + offset[kind];
    for (int64_t i = 0; i < count; i++) {
      run->quantise(kind, int(m.gate), run->x + run->rest_of[i] * run->inputs(), run->rows, run->rest_of[i], left);
      run->quantise(kind, kNoGate, left, run->rest, i, nullptr);
    }
  }
  return nullptr;
}
// The tiles begin..end of all the matrices' tiles, for some rows.
void Run::multiply(const Rows& some, int64_t begin, int64_t end) const {
  for (int64_t row = 0; row < some.count; row += block_rows) for (size_t i = 0, at = 0; i < m->count; at += size_t(m->outputs[i++])) {
    const int64_t zero = first_tile[i], first = begin > zero ? begin : zero, last = end < first_tile[i + 1] ? end : first_tile[i + 1];
    if (first < last) path->product(int32_t(m->types[i]), tiles[i], m->outputs[i], m->k, block(some, kind_of(m->types[i]), row), int(rows_of_block(some, row)), some.y[i] + row * some.stride[i], some.stride[i], some.bias ? some.bias + at : nullptr, first - zero, last - zero);
  }
}
// One piece of the tiles, for all rows: its weights stay in the second-level cache.
void ORT_CALL run_piece(void* with, size_t piece) {
  const Run& run = *static_cast<const Run*>(with);
  const MatMul& m = *run.m;
  const int64_t all = run.first_tile[m.count], begin = all * int64_t(piece) / run.pieces, end = all * int64_t(piece + 1) / run.pieces;
  run.multiply(run.rows, begin, end);
  if (run.rest.count) run.multiply(run.rest, begin, end);
  for (size_t i = 0; i < m.count; i++) {
    const int64_t zero = run.first_tile[i], first = begin > zero ? (begin - zero) * kOutputs : 0, last = (end - zero) * kOutputs < m.outputs[i] ? (end - zero) * kOutputs : m.outputs[i];
    for (int64_t r = 0; r < run.rest.count; r++) {
      float* y = run.rows.y[i] + run.rest_of[r] * run.rows.stride[i];
      for (int64_t o = first; o < last; o++) y[o] += run.rest.y[i][r * m.all_outputs + o];
    }
    if (m.cap > 0) for (int64_t r = 0; r < run.rows.count; r++) cap(m.cap, run.rows.y[i] + r * run.rows.stride[i] + first, last - first);
  }
}
OrtStatus* ORT_CALL compute_matmul(void* self, OrtKernelContext* context) {
  const MatMul& m = *static_cast<const MatMul*>(self);
  Run run = {};
  run.m = &m; run.path = &path_in_use();
  Tensor x;
  TRY(read_floats(context, 0, "x", &x));
  if (!x.rank || x.dims[x.rank - 1] != run.inputs()) return invalid("edgespec: TiledMatMul's x has %lld inputs, expected %lld", (long long)(x.rank ? x.dims[x.rank - 1] : 0), (long long)run.inputs());
  TRY(read_vector(context, 1, "TiledMatMul's bias", m.all_outputs, &run.rows.bias));
  size_t separate;
  TRY(num_outputs(context, &separate));
  int64_t work = 0;
  for (size_t i = 0, at = 0; i < m.count; at += size_t(m.outputs[i++])) {
    run.tiles[i] = m.tiles[i];
    TRY(input_tiles(context, 2 + i, kNames[2 + i], m.bytes[i], &run.tiles[i]));
    run.first_tile[i + 1] = run.first_tile[i] + (m.outputs[i] + kOutputs - 1) / kOutputs;
    run.rows.stride[i] = separate > 1 ? m.outputs[i] : m.all_outputs;
    work += m.bytes[i];
    if (separate > 1 || i == 0) {
      OrtValue* y; void* p;
      x.dims[x.rank - 1] = run.rows.stride[i];
      TRY(output(context, i, x.dims, x.rank, &y));
      if (!y) return invalid("edgespec: TiledMatMul's output %zu has no name", i);
      TRY(data(y, &p));
      run.rows.y[i] = static_cast<float*>(p);
    } else run.rows.y[i] = run.rows.y[0] + at;
  }
  const int64_t rows = elements(x, x.rank - 1), batch = rows < kBatch ? rows : kBatch;
  run.block_rows = m.k > 4096 ? kRowBlock / 2 : kRowBlock;  // activations of a block stay in the second-level cache, too
  int64_t offset[kKinds];
  const int64_t size = place(m, batch, offset);
  Scratch scratch;
  if (rows && !scratch.get(size_t(size))) return error(kFail, "edgespec: out of memory");
  for (int kind = 0; kind < kKinds; kind++) run.rows.activations[kind] = offset[kind] < 0 ? nullptr : scratch.data + offset[kind];
  // A piece reads 24 kB of weights at least, and there are enough of them for cores of unequal speed.
  const int64_t tiles = run.first_tile[m.count], most = tiles < 64 ? tiles : 64;
  run.pieces = work / 24576 < 1 ? 1 : work / 24576 < most ? work / 24576 : most;
  run.x = static_cast<const float*>(x.data);
  for (int64_t row = 0; row < rows; row += batch) {
    const int64_t count = run.rows.count = rows - row < batch ? rows - row : batch;
    run_all(count * m.k < 65536, quantise_row, count, &run);
    Scratch rest;
    TRY(quantise_rest(&run, &rest));
    run_all(work / 8 * count < 12288, run_piece, run.pieces, &run);
    run.x += count * run.inputs();
    for (size_t i = 0; i < m.count; i++) run.rows.y[i] += run.rows.stride[i] * count;
  }
  return nullptr;
}

// ---- TiledLookup
struct Lookup { int64_t k, type, n, bytes; const uint8_t* tiles; };
OrtStatus* create_lookup(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info, void** out) {
  Lookup l = {};
  TRY(attribute(info, "K", &l.k));
  TRY(attribute(info, "type", &l.type));
  TRY(attribute(info, "N", &l.n));
  if (l.type != int32_t(l.type) || (l.bytes = packed_bytes(int32_t(l.type), l.n, l.k)) < 0) return invalid("edgespec: TiledLookup cannot hold %lld rows of %lld values of type %lld", (long long)l.n, (long long)l.k, (long long)l.type);
  TRY(constant_tiles(info, 1, "tiles", l.bytes, &l.tiles));
  return keep(l, out);
}
OrtStatus* ORT_CALL compute_lookup(void* self, OrtKernelContext* context) {
  const Lookup& l = *static_cast<const Lookup*>(self);
  const uint8_t* tiles = l.tiles;
  Tensor ids;
  const OrtValue* value;
  TRY(input(context, 0, &value));
  TRY(read(value, "ids", kTypeInt64, &ids));
  TRY(input_tiles(context, 1, "tiles", l.bytes, &tiles));
  if (ids.rank == kMaxRank) return invalid("edgespec: ids has %zu dimensions, at most %d are allowed", ids.rank, kMaxRank - 1);
  const int64_t count = elements(ids, ids.rank);
  ids.dims[ids.rank] = l.k;
  OrtValue* y; void* p;
  TRY(output(context, 0, ids.dims, ids.rank + 1, &y));
  TRY(data(y, &p));
  if (!lookup(int32_t(l.type), tiles, l.n, l.k, static_cast<const int64_t*>(ids.data), count, static_cast<float*>(p))) return invalid("edgespec: TiledLookup has an id outside 0..%lld", (long long)l.n - 1);
  return nullptr;
}

const Operator kOperators[] = {
    {"TiledMatMul", "fFtTT", kMatrices, create_matmul, compute_matmul},
    {"TiledLookup", "nt", 1, create_lookup, compute_lookup},
};
}  // namespace
}  // namespace edgespec

// The number of `bytes` of tiles for `read_tiles`, 0 if there is no memory. They must outlive all sessions made with it.
extern "C" __attribute__((visibility("default"))) int64_t edgespec_hold(const uint8_t* tiles, int64_t bytes) {
  using namespace edgespec;
  Held* kept = static_cast<Held*>(malloc(sizeof(Held)));
  if (!kept) return 0;
  *kept = {0, bytes, tiles, nullptr};
  return held.add(kept);
}
// Forgets a number; sessions that were made with it go on reading the tiles.
extern "C" __attribute__((visibility("default"))) void edgespec_drop(int64_t number) { edgespec::held.drop(number); }

extern "C" __attribute__((visibility("default"))) OrtStatus* ORT_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
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
