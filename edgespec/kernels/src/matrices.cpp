#include "matrices.h"
#include "floats.h"

namespace edgespec {
namespace {
// Tiles in memory that a program holds. In a graph 8 bytes with their number stand for them while its session is made,
// as ONNX Runtime would copy a weight that it is given in memory.
struct Held { int64_t number, bytes; const uint8_t* tiles; Held* next; };
Registry<Held> held;
}  // namespace

OrtStatus* read_tiles(const OrtValue* value, const char* name, int64_t bytes, const uint8_t** out) {
  Tensor t;
  TRY(read(value, name, kTypeUint8, &t));
  const int64_t given = t.size();
  *out = static_cast<const uint8_t*>(t.data);
  if (given == int64_t(sizeof(int64_t))) {
    int64_t number;
    memcpy(&number, t.data, sizeof number);
    const Held* found = held.find(number);
    if (!found || found->bytes != bytes)
      return invalid("edgespec: %s names tiles that nobody holds, or of another size than %lld bytes", name, bytes);
    *out = found->tiles;
  } else if (given != bytes) return invalid("edgespec: %s has %lld bytes, its type and size need %lld", name, given, bytes);
  return nullptr;
}
OrtStatus* Matrix::open(const OrtKernelInfo* info, const char* called, size_t at, const char* name, int64_t groups) {
  const int64_t all = type == int32_t(type) ? packed_bytes(int32_t(type), groups * outputs, inputs) : -1;
  if (all < 0) return invalid("edgespec: %s cannot hold %lld outputs x %lld inputs of type %lld", called, outputs, inputs, type);
  bytes = all / groups;
  kind = kind_of(type);
  int is_constant;
  const OrtValue* value;
  TRY(constant_input(info, at, &is_constant, &value));
  return is_constant ? edgespec::read_tiles(value, name, all, &tiles) : nullptr;
}
OrtStatus* Matrix::read_tiles(const OrtKernelContext* context, size_t at, const char* name, int64_t groups) {
  const OrtValue* value;
  if (tiles) return nullptr;
  TRY(input(context, at, &value));
  return edgespec::read_tiles(value, name, groups * bytes, &tiles);
}

// Codes of a place. With `left` [inputs] that gets what they leave.
bool Products::quantise(int kind, int64_t place, float* left) const {
  const int32_t own = group_of(all, place);
  const int64_t start = first[own] + (place - first[own]) / block_rows * block_rows, rows = first[own + 1] - start;
  const float* from = x + (row ? row[place] : place) * x_stride;
  return kernels->quantise(kInputs[kind], gate, from, inputs(), place - start, rows < block_rows ? rows : block_rows,
                           block(all, kind, start), left);
}
void Products::quantise(int64_t place) const {
  is_uneven[place] = false;
  for (int kind = 0; kind < kKinds; kind++) if (has_kind[kind] && quantise(kind, place, nullptr)) is_uneven[place] = true;
}
// Calls f(start, size) for the blocks of a group's places, the first of which is `at`; returns the next group's first.
template <class F> int64_t Products::for_blocks(const Places& some, int64_t at, F f) const {
  int64_t end = at;
  while (end < some.count && group_of(some, end) == group_of(some, at)) end++;
  for (; at < end; at += block_rows) f(at, end - at < block_rows ? end - at : block_rows);
  return end;
}
// Few rows are uneven, such as the first of a text, where one enormous value would cost its whole block the small ones.
OrtStatus* Products::quantise_rest(Scratch* scratch) {
  rest = {};
  for (int64_t place = 0; place < all.count; place++) if (is_uneven[place]) rest_of[rest.count++] = place;
  if (!rest.count) return nullptr;
  int64_t sizes[kKinds], outputs = 0;
  for (int kind = 0; kind < kKinds; kind++) sizes[kind] = has_kind[kind] ? activation_bytes(kInputs[kind], inputs(), rest.count) : 0;
  for (size_t i = 0; i < num_matrices; i++) outputs += rest.stride[i] = matrices[i].outputs;
  float *left, *y;
  TRY(scratch->get({{&left, inputs()}, {&y, rest.count * outputs},
                    {&rest.activations[0], sizes[0]}, {&rest.activations[1], sizes[1]}, {&rest.activations[2], sizes[2]}}));
  for (size_t i = 0; i < num_matrices; y += rest.count * matrices[i++].outputs) rest.y[i] = y;
  for (int kind = 0; kind < kKinds; kind++)
    for (int64_t at = 0; has_kind[kind] && at < rest.count;)
      at = for_blocks(rest, at, [&](int64_t start, int64_t rows) {
        for (int64_t i = 0; i < rows; i++) {
          quantise(kind, rest_of[start + i], left);
          kernels->quantise(kInputs[kind], kNoGate, left, inputs(), i, rows, block(rest, kind, start), nullptr);
        }
      });
  return nullptr;
}
// The tiles begin..end of all matrices' of a group, for its places from `at` on.
void Products::multiply(const Places& some, int64_t at, int64_t begin, int64_t end) const {
  const int32_t own = group_of(some, at);
  for_blocks(some, at, [&](int64_t start, int64_t rows) {
    int64_t zero = 0;
    for (size_t i = 0; i < num_matrices; zero += matrices[i++].num_tiles()) {
      const Matrix& m = matrices[i];
      const int64_t from = begin > zero ? begin - zero : 0, to = end - zero < m.num_tiles() ? end - zero : m.num_tiles();
      const float* bias = m.bias && &some == &all ? m.bias + own * m.outputs : nullptr;
      float* y = some.y[i] + start * some.stride[i];
      const uint8_t* activations = block(some, m.kind, start);
      if (from < to)
        kernels->product(int32_t(m.type), m.tiles + own * m.bytes, m.outputs, m.inputs, activations, int(rows), y, some.stride[i], bias,
                         from, to);
    }
  });
}
// Some of the tiles, those of one group after the other. For all its rows at once: a piece's weights stay in the second-level cache.
void Products::run_piece(int64_t piece) const {
  const int64_t whole_begin = num_groups * tiles * piece / pieces, whole_end = num_groups * tiles * (piece + 1) / pieces;
  for (int64_t number = whole_begin / tiles; number * tiles < whole_end; number++) {
    const int64_t start = number * tiles, begin = whole_begin > start ? whole_begin - start : 0;
    const int64_t end = whole_end - start < tiles ? whole_end - start : tiles;
    const int32_t own = groups[number];
    multiply(all, first[own], begin, end);
    int64_t at = 0, zero = 0;
    while (at < rest.count && group_of(rest, at) < own) at++;
    if (at < rest.count && group_of(rest, at) == own) multiply(rest, at, begin, end);
    for (size_t i = 0; i < num_matrices && (rest.count || cap > 0); zero += matrices[i++].num_tiles()) {
      const int64_t outputs = matrices[i].outputs, from = begin > zero ? (begin - zero) * kOutputs : 0;
      const int64_t to = (end - zero) * kOutputs < outputs ? (end - zero) * kOutputs : outputs;
      for (int64_t r = at; r < rest.count && group_of(rest, r) == own; r++) {
        float *y = all.y[i] + rest_of[r] * all.stride[i], *more = rest.y[i] + r * rest.stride[i];
        for (int64_t o = from; o < to; o++) y[o] += more[o];
      }
      if (cap > 0) for (int64_t p = first[own]; p < first[own + 1]; p++) edgespec::cap(cap, all.y[i] + p * all.stride[i] + from, to - from);
    }
  }
}
OrtStatus* Products::run() {
  int64_t bytes = 0, sizes[kKinds];
  tiles = 0;
  for (bool& each : has_kind) each = false;
  for (size_t i = 0; i < num_matrices; i++) {
    bytes += num_groups * matrices[i].bytes;
    tiles += matrices[i].num_tiles();
    has_kind[matrices[i].kind] = true;
  }
  block_rows = inputs() > 4096 ? kRowBlock / 2 : kRowBlock;  // activations of a block stay in the second-level cache, too
  for (int kind = 0; kind < kKinds; kind++) sizes[kind] = has_kind[kind] ? activation_bytes(kInputs[kind], inputs(), all.count) : 0;
  Scratch scratch, more;
  TRY(scratch.get({{&all.activations[0], sizes[0]}, {&all.activations[1], sizes[1]}, {&all.activations[2], sizes[2]},
                   {&is_uneven, all.count}, {&rest_of, all.count}}));
  // A piece reads 24 kB of weights at least, and there are enough of them for cores of unequal speed.
  const int64_t most = num_groups * tiles < most_pieces ? num_groups * tiles : most_pieces;
  pieces = bytes / 24576 < 1 ? 1 : bytes / 24576 < most ? bytes / 24576 : most;
  run_all(all.count * inputs() < 65536, all.count, [&](int64_t place) { quantise(place); });
  TRY(quantise_rest(&more));
  run_all(bytes / num_groups / 8 * all.count < 12288, pieces, [&](int64_t piece) { run_piece(piece); });
  return nullptr;
}
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
