// Operators of ONNX Runtime in the domain "edgespec", over running states (states.h):
//   DeltaNet(x [..., n, queries, keys, values, gates of the result], rates [..., n, 2 * value_heads], kernel [taps, channels],
//     bias [value_heads], rate [value_heads], norm [size], rows [n, 4], states [1]) -> y [..., n, value_heads * size]
//   Mamba2(x [..., n, keys, queries, values, gates of the result], rates [..., n, value_heads], kernel [taps, channels],
//     bias [value_heads], rate [value_heads], skip [value_heads], shift [channels], rows [n, 4], states [1])
//     -> y [..., n, value_heads * value_size]
//   ShortConv(x [..., n, 3 * width], kernel [taps, width], rows [n, 4], states [1]) -> y [..., n, width]
// Rows are those of attention.cpp, and those of a slot have cells one after another from their first position on. The
// key of a value's head is that of its number modulo the key's heads, as llama.cpp's files have them.
#include <cmath>
#include <cstring>
#include "cache.h"
#include "operator.h"
#include "states.h"

namespace edgespec {
namespace {
Registry<States> all_states;

// Adds what the log has at `cell` to 16 times `columns` of a head's values.
void add_logged(const Recurrence& kernels, const State& s, int64_t head, int64_t column, int columns, int64_t cell, const float* from,
                float* to) {
  const int64_t size = s.shape->size;
  kernels.add(from, to, columns, int(size), s.keys(cell) + head % s.shape->key_heads * size, s.decays(cell)[head],
              s.deltas(cell) + head * s.shape->value_size + column * kLanes);
}
// Adds what the log has at `cell` to a copy of S.
void add_all(const State& s, int64_t cell, float* copy) {
  const int64_t block = s.shape->size * kLanes;
  for (int64_t h = 0; h < s.shape->value_heads; h++)
    for (int64_t column = 0; column < s.shape->value_size / kLanes; column++, copy += block)
      add_logged(*kernels_in_use().recurrence, s, h, column, 1, cell, copy, copy);
}

struct Layer {
  int64_t number, key_heads, value_heads, size, value_size;  // number: of the states'
  float epsilon;
  bool is_delta;
  const char* name() const { return is_delta ? "DeltaNet" : "Mamba2"; }
  StateShape shape(int32_t taps) const {
    return {int32_t(2 * key_heads * size + value_heads * value_size),
            taps,
            int32_t(key_heads),
            int32_t(value_heads),
            int32_t(size),
            int32_t(value_size)};
  }
};
// The rows of one text. S is at position `start` and will be at `settled`, which is beyond `base` where not all rows fit the log.
struct Part { int64_t first, last, base, start, settled; State state; };
struct Step {
  Layer layer;
  const Recurrence* kernels;
  const Attention* others;
  const States* states;
  const StateShape* shape;
  const Row* rows;
  int64_t count, num_parts, x_width, inner;
  const float *x, *gates, *kernel, *shift, *bias, *rate, *norm, *skip;
  float *y, *mixed, *betas, *decays, *overlaps, *deltas;
  const float* inputs;  // of the convolution, those of a row input_stride apart
  int64_t input_stride;
  Part* parts;
  int32_t* part_of;
  std::atomic<bool> out_of_memory;

  const float* input_of(int64_t row) const { return inputs + row * input_stride; }
  int64_t key_width() const { return layer.key_heads * layer.size; }
  float* query(int64_t row, int64_t head) const {
    return mixed + row * shape->channels + !layer.is_delta * key_width() + head * layer.size;
  }
  float* key(int64_t row, int64_t head) const { return mixed + row * shape->channels + layer.is_delta * key_width() + head * layer.size; }
};

// The convolution of a row, over the rows of its branch.
bool mix(const Step& s, int64_t row) {
  const Part& part = s.parts[s.part_of[row]];
  const int taps = s.shape->taps;
  const float *inputs[kMostTaps], *zeros = nullptr;
  Scratch scratch;
  if (s.rows[row].position < taps - 1) {  // the text begins within what it sees
    if (!scratch.get(size_t(s.shape->channels) * 4)) return false;
    zeros = static_cast<const float*>(memset(scratch.data, 0, size_t(s.shape->channels) * 4));
  }
  int64_t at = row;
  for (int t = taps - 1; t >= 0; t--) {
    const int64_t cell = s.rows[row].position - (taps - 1 - t);
    inputs[t] = at >= 0 ? s.input_of(at) : cell >= 0 ? part.state.inputs(cell) : zeros;
    if (at >= 0) at = s.rows[at].parent;
  }
  s.kernels->convolve(inputs, s.kernel, s.shift, taps, s.shape->channels, s.layer.value_heads, s.mixed + row * s.shape->channels);
  return true;
}
void mix_row(Step& s, int64_t row) {
  const int64_t size = s.layer.size, heads = s.layer.value_heads;
  if (!mix(s, row)) { s.out_of_memory = true; return; }
  for (int64_t h = 0; h < s.layer.key_heads; h++) {
    float* query = s.query(row, h);
    if (s.layer.is_delta) {
      s.kernels->to_unit(query, size, 1.f / sqrtf(float(size)));
      s.kernels->to_unit(s.key(row, h), size, 1.f);
    }
    s.overlaps[row * s.layer.key_heads + h] = s.kernels->dot(query, s.key(row, h), size);
  }
  const float* gates = s.gates + row * (1 + s.layer.is_delta) * heads;
  s.kernels->rates(s.layer.is_delta ? gates : nullptr, gates + s.layer.is_delta * heads, s.bias, s.rate, heads, s.betas + row * heads,
                   s.decays + row * heads);
}

// Some of a head's values for the rows of a text; `copy`: room for a state with rows that may be dropped.
struct Columns {
  const Step& s;
  const Part& part;
  int64_t head, first;
  int count;
  float *state, *copy;
  const float* now;

  int64_t key_head() const { return head % s.layer.key_heads; }
  int64_t value_at(int64_t row) const { return row * s.inner + head * s.layer.value_size + first * kLanes; }
  void add_row(int64_t row, float* to) {
    s.kernels->add(now, to, count, int(s.layer.size), s.key(row, key_head()), s.decays[row * s.layer.value_heads + head],
                   s.deltas + value_at(row));
    now = to;
  }
  // To the state behind `row`, -1: before the pass.
  void go_to(int64_t row) {
    now = state;
    for (int64_t cell = part.settled; cell < part.base; cell++) {
      add_logged(*s.kernels, part.state, head, first, count, cell, now, copy);
      now = copy;
    }
    int32_t path[kMostLogged];
    int depth = 0;
    for (; row >= 0; row = s.rows[row].parent) path[depth++] = int32_t(row);
    while (depth) add_row(path[--depth], copy);
  }
  void ask(int64_t row) {
    const int64_t heads = s.layer.value_heads;
    const float decay = s.decays[row * heads + head];
    const Asked asked = {s.key(row, key_head()),
                         s.query(row, key_head()),
                         s.mixed + row * s.shape->channels + 2 * s.key_width() + value_at(row) - row * s.inner,
                         decay,
                         s.betas[row * heads + head],
                         s.overlaps[row * s.layer.key_heads + key_head()],
                         s.layer.is_delta ? decay : 0.f,
                         s.skip ? s.skip[head] : 0.f};
    s.kernels->ask(now, count, int(s.layer.size), asked, s.deltas + value_at(row), s.y + value_at(row));
  }
  void run() {
    if (!part.base) memset(state, 0, size_t(count * s.layer.size * kLanes) * 4);
    for (int64_t cell = part.start; cell < part.settled && cell < part.base; cell++)
      add_logged(*s.kernels, part.state, head, first, count, cell, state, state);
    int64_t at = -2;
    for (int64_t row = part.first; row < part.last; at = row++) {
      if (s.rows[row].parent != at) go_to(s.rows[row].parent);
      else add_row(at, at - part.first < part.settled - part.base ? state : copy);
      ask(row);
    }
  }
};
void run_head(Step& s, const Part& part, int64_t head) {
  const int64_t size = s.layer.size, values = s.layer.value_size;
  const int columns = s.kernels->columns;
  Scratch scratch;
  if (!scratch.get(size_t(columns * size * kLanes) * 4)) { s.out_of_memory = true; return; }
  for (int64_t first = 0; first < values / kLanes; first += columns) {
    const int count = int(values / kLanes - first < columns ? values / kLanes - first : columns);
    Columns{s, part, head, first, count, part.state.head(head) + first * size * kLanes, reinterpret_cast<float*>(scratch.data), nullptr}
        .run();
  }
  alignas(64) float normed[1024];
  for (int64_t row = part.first; row < part.last; row++) {
    float* y = s.y + row * s.inner + head * values;
    if (s.norm) s.others->norm(y, nullptr, s.norm, s.layer.epsilon, values, normed, nullptr);
    else memcpy(normed, y, size_t(values) * 4);
    s.others->gate(kSilu, s.x + row * s.x_width + s.shape->channels + head * values, normed, values, y);
  }
}
void log_row(const Step& s, int64_t row) {
  const int64_t heads = s.layer.value_heads;
  const Part& part = s.parts[s.part_of[row]];
  const State& state = part.state;
  if (part.last - row > state.rows) return;  // another row takes its place
  const int64_t cell = s.rows[row].cell;
  memcpy(state.inputs(cell), s.input_of(row), size_t(s.shape->channels) * 4);
  if (!heads) return;
  memcpy(state.keys(cell), s.key(row, 0), size_t(s.key_width()) * 4);
  memcpy(state.deltas(cell), s.deltas + row * s.inner, size_t(s.inner) * 4);
  memcpy(state.decays(cell), s.decays + row * heads, size_t(heads) * 4);
}
void short_row(Step& s, int64_t row) {
  const int64_t width = s.shape->channels;
  if (!mix(s, row)) { s.out_of_memory = true; return; }
  for (int64_t i = 0; i < width; i++) s.y[row * width + i] = s.x[row * s.x_width + width + i] * s.mixed[row * width + i];
}

// The parts of the pass, checked against the states. Their number, if `parts` is null.
OrtStatus* divide(Step* s, const char* name, Part* parts) {
  s->num_parts = 0;
  for (int64_t first = 0, last; first < s->count; first = last) {
    const Row& root = s->rows[first];
    for (last = first; last < s->count && s->rows[last].slot == root.slot; last++) {
      const Row& r = s->rows[last];
      const bool follows = r.parent < 0 ? r.parent == -1 && r.position == root.position
                                        : r.parent >= first && r.parent < last && s->rows[r.parent].position + 1 == r.position;
      if (r.slot < 0 || r.slot >= s->states->slots || root.position < 0 || r.cell != root.position + (last - first) || !follows)
        return invalid(
            "edgespec: %s has a row %lld (slot %d, position %d, cell %d, parent %d) outside %lld slots, or away from its parent or its "
            "place",
            name, last, r.slot, r.position, r.cell, r.parent, s->states->slots);
    }
    if (!parts) { s->num_parts++; continue; }
    const State state = s->states->at(root.slot, s->layer.number);
    const State::Header header = state.header();
    Part part = {first, last, root.position, root.position ? header.start : 0, 0, state};
    if (part.base && (header.start < 0 || header.start > part.base || header.end < part.base || part.base - header.start > s->states->log))
      return invalid("edgespec: %s has a row %lld at position %lld of a text whose state reaches %lld to %lld", name, first, part.base,
                     header.start, header.end);
    const int64_t floor = s->states->floors[root.slot], wanted = floor < part.base ? floor : part.base,
                  least = part.base + (last - first) - s->states->log;
    part.settled = wanted > part.start ? wanted : part.start;
    if (part.settled < least) part.settled = least;
    for (int64_t row = first; row < last; row++) {
      if (part.settled > part.base && row > first && s->rows[row].parent != row - 1)
        return invalid("edgespec: %s has %lld rows with branches, its states keep %lld", name, (last - first), s->states->log);
      s->part_of[row] = int32_t(s->num_parts);
    }
    for (int64_t i = 0; i < s->num_parts; i++)
      if (parts[i].state.memory == state.memory) return invalid("edgespec: %s has rows of slot %d apart", name, root.slot);
    parts[s->num_parts++] = part;
  }
  return nullptr;
}
OrtStatus* read_places(const OrtKernelContext* context, size_t at, const char* name, const StateShape& wanted, Step* s) {
  TRY(read_rows(context, at, name, s->count, &s->rows));
  TRY(all_states.find(context, at + 1, name, "states", &s->states));
  if (s->layer.number < 0 || s->layer.number >= s->states->layers)
    return invalid("edgespec: %s is layer %lld of states of %lld layers", name, s->layer.number, s->states->layers);
  s->shape = s->states->shapes + s->layer.number;
  if (memcmp(s->shape, &wanted, sizeof wanted))
    return invalid("edgespec: %s is layer %lld of states, which has other sizes", name, s->layer.number);
  return divide(s, name, nullptr);
}
// Reads the kernel [taps, channels].
OrtStatus* read_kernel(const OrtKernelContext* context, size_t at, int64_t channels, Step* s, StateShape* wanted) {
  Tensor kernel;
  TRY(read_floats(context, at, "kernel", &kernel));
  if (kernel.rank != 2 || kernel.dims[1] != channels || kernel.dims[0] > kMostTaps)
    return invalid("edgespec: a kernel is not [2 to %d, %lld]", kMostTaps, channels);
  s->kernel = kernel.floats();
  wanted->channels = int32_t(channels); wanted->taps = int32_t(kernel.dims[0]);
  return nullptr;
}
void settle(const Step& s) {
  for (int64_t i = 0; i < s.num_parts; i++)
    s.parts[i].state.header() = {s.parts[i].settled, s.parts[i].base + s.parts[i].last - s.parts[i].first, {}};
}

// ---- DeltaNet and Mamba2, whose norm is a node of its own
OrtStatus* create_delta(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info, void** out) {
  Layer l = {};
  size_t inputs;
  TRY(num_inputs(info, &inputs));
  l.is_delta = inputs == 8;
  TRY(read_attributes(info, {{"layer", &l.number}, {"key_heads", &l.key_heads}, {"value_heads", &l.value_heads},
                             {"size", &l.size}, {"value_size", &l.value_size}, {"epsilon", &l.epsilon, !l.is_delta}}));
  bool fits = true;
  for (const int64_t each : {l.key_heads, l.value_heads, l.size, l.value_size}) fits &= each > 0 && each <= 4096;
  if (!fits || (l.is_delta && l.size != l.value_size) || !l.shape(2).is_possible())
    return invalid("edgespec: %s cannot have %lld heads of size %lld for %lld heads of keys of %lld", l.name(), l.value_heads, l.value_size,
                   l.key_heads, l.size);
  return keep(l, out);
}
OrtStatus* ORT_CALL compute_delta(void* self, OrtKernelContext* context) {
  Step s = {};
  const Layer& l = s.layer = *static_cast<const Layer*>(self);
  s.kernels = kernels_in_use().recurrence; s.others = kernels_in_use().attention;
  Tensor x, gates;
  TRY(read_floats(context, 0, "x", &x));
  TRY(read_floats(context, 1, "rates", &gates));
  StateShape wanted = l.shape(0);
  s.inner = wanted.values();
  const int64_t channels = wanted.channels, rates = (1 + l.is_delta) * l.value_heads;
  s.x_width = s.input_stride = channels + s.inner;
  if (x.width() != s.x_width) return invalid("edgespec: %s's x is %lld wide, expected %lld", l.name(), x.width(), s.x_width);
  s.count = x.rows();
  if (!gates.data || gates.size() != rates * s.count)
    return invalid("edgespec: %s's rates are not %lld rows of %lld", l.name(), s.count, rates);
  TRY(read_kernel(context, 2, channels, &s, &wanted));
  TRY(read_vector(context, 3, "bias", l.value_heads, &s.bias));
  TRY(read_vector(context, 4, "rate", l.value_heads, &s.rate));
  TRY(read_vector(context, 5, l.is_delta ? "norm" : "skip", l.is_delta ? l.size : l.value_heads, l.is_delta ? &s.norm : &s.skip));
  if (!l.is_delta) TRY(read_vector(context, 6, "shift", channels, &s.shift));
  TRY(read_places(context, 7 - l.is_delta, l.name(), wanted, &s));
  s.x = x.floats(); s.gates = gates.floats();
  s.inputs = s.x;
  x.dims[x.rank - 1] = s.inner;
  TRY(open(context, 0, x, &s.y));
  Scratch scratch;
  TRY(scratch.get({{&s.mixed, s.count * channels}, {&s.betas, s.count * l.value_heads}, {&s.decays, s.count * l.value_heads},
                   {&s.overlaps, s.count * l.key_heads}, {&s.deltas, s.count * s.inner}, {&s.part_of, s.count}, {&s.parts, s.num_parts}}));
  TRY(divide(&s, l.name(), s.parts));
  run_all(s.count * channels < 32768, s.count, [&](int64_t row) { mix_row(s, row); });
  if (s.out_of_memory) return out_of_memory();
  run_all((s.count + s.num_parts) * s.inner * l.size < 100000, s.num_parts * l.value_heads,
          [&](int64_t head) { run_head(s, s.parts[head / l.value_heads], head % l.value_heads); });
  if (s.out_of_memory) return out_of_memory();
  run_all(s.count * channels < 65536, s.count, [&](int64_t row) { log_row(s, row); });
  settle(s);
  return nullptr;
}

// ---- ShortConv
OrtStatus* create_short(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info, void** out) {
  Layer l = {};
  TRY(read_attributes(info, {{"layer", &l.number}}));
  return keep(l, out);
}
OrtStatus* ORT_CALL compute_short(void* self, OrtKernelContext* context) {
  Step s = {};
  s.layer = *static_cast<const Layer*>(self);
  s.kernels = kernels_in_use().recurrence;
  Tensor x;
  TRY(read_floats(context, 0, "x", &x));
  s.x_width = x.width();
  const int64_t width = s.input_stride = s.x_width / 3;
  if (width < 1 || s.x_width % 3 || width > 1 << 20)
    return invalid("edgespec: ShortConv's x is %lld wide, expected three times a width", s.x_width);
  s.count = x.rows();
  s.x = x.floats();
  StateShape wanted = {};
  TRY(read_kernel(context, 1, width, &s, &wanted));
  TRY(read_places(context, 2, "ShortConv", wanted, &s));
  x.dims[x.rank - 1] = width;
  TRY(open(context, 0, x, &s.y));
  Scratch scratch;
  float* gated;
  TRY(scratch.get({{&gated, s.count * width}, {&s.mixed, s.count * width}, {&s.part_of, s.count}, {&s.parts, s.num_parts}}));
  s.inputs = gated;
  TRY(divide(&s, "ShortConv", s.parts));
  const bool is_small = s.count * width < 65536;
  run_all(is_small, s.count, [&](int64_t row) {
    const float* x = s.x + row * s.x_width;
    for (int64_t i = 0; i < width; i++) gated[row * width + i] = x[i] * x[2 * width + i];
  });
  run_all(is_small, s.count, [&](int64_t row) { short_row(s, row); });
  if (s.out_of_memory) return out_of_memory();
  run_all(is_small, s.count, [&](int64_t row) { log_row(s, row); });
  settle(s);
  return nullptr;
}
}  // namespace
const Operator kRecurrentOperators[] = {
    {"DeltaNet", "ffffffin", 1, create_delta, compute_delta},
    {"Mamba2", "fffffffin", 1, create_delta, compute_delta},
    {"ShortConv", "ffin", 1, create_short, compute_short},
};
}  // namespace edgespec

#define EXPORT extern "C" __attribute__((visibility("default")))
using namespace edgespec;

// Bytes of states of `layers` layers of these sizes (six numbers each); -1 if there cannot be any.
EXPORT int64_t edgespec_state_bytes(const int32_t* sizes, int64_t layers, int64_t slots, int64_t log) {
  int64_t slot = 0, bytes;
  if (layers < 1 || layers > 1 << 16 || slots < 1 || slots > 1 << 20 || log < 1 || log > kMostLogged) return -1;
  for (int64_t i = 0; i < layers; i++) {
    const StateShape& shape = reinterpret_cast<const StateShape*>(sizes)[i];
    if (!shape.is_possible() || __builtin_add_overflow(slot, (State::bytes(shape, log) + 63) & ~int64_t(63), &slot)) return -1;
  }
  return __builtin_mul_overflow(slot, slots, &bytes) ? -1 : bytes;
}
// The number of states in `memory`, zeros of as many bytes as above, for graphs; 0 if there cannot be any, or without memory. It and
// `floors` [slots] must outlive all passes.
EXPORT int64_t edgespec_hold_states(uint8_t* memory, const int32_t* sizes, int64_t layers, int64_t slots, int64_t log,
                                    const int64_t* floors) {
  if (edgespec_state_bytes(sizes, layers, slots, log) < 0) return 0;
  States* s = static_cast<States*>(malloc(sizeof(States) + size_t(layers) * (sizeof(int64_t) + sizeof(StateShape))));
  if (!s) return 0;
  int64_t* starts = reinterpret_cast<int64_t*>(s + 1);
  StateShape* shapes = reinterpret_cast<StateShape*>(starts + layers);
  memcpy(shapes, sizes, size_t(layers) * sizeof(StateShape));
  int64_t bytes = 0;
  for (int64_t i = 0; i < layers; i++) {
    starts[i] = bytes;
    bytes += (State::bytes(shapes[i], log) + 63) & ~int64_t(63);
  }
  *s = {0, memory, slots, layers, log, bytes, floors, shapes, starts, nullptr};
  return all_states.add(s);
}
EXPORT void edgespec_drop_states(int64_t number) { all_states.drop(number); }
// Copies what a text of `length` rows needs to go on, for each layer S and the convolution's inputs before it, to (or from)
// `flat`, of as many bytes as this returns. -1: nobody holds the states, or they do not reach there. Null for `flat`: the
// bytes alone.
EXPORT int64_t edgespec_copy_states(int64_t number, int32_t into_states, int64_t slot, int64_t length, float* flat) {
  const States* s = all_states.find(number);
  if (!s || slot < 0 || slot >= s->slots || length < 0) return -1;
  int64_t floats = 0;
  for (int64_t i = 0; i < s->layers; i++) {
    const State state = s->at(slot, i);
    const State::Header& header = state.header();
    if (flat && !into_states && (header.start < 0 || header.start > length || header.end < length || length - header.start > s->log))
      return -1;
    floats += state.shape->state_floats() + int64_t(state.shape->taps - 1) * state.shape->channels;
  }
  for (int64_t i = 0; flat && i < s->layers; i++) {
    const State state = s->at(slot, i);
    const auto copy = [&](float* ours, int64_t count) {
      into_states ? memcpy(ours, flat, size_t(count) * 4) : memcpy(flat, ours, size_t(count) * 4);
      flat += count;
    };
    copy(state.head(0), state.shape->state_floats());
    if (!into_states)
      for (int64_t cell = state.header().start; cell < length; cell++) add_all(state, cell, flat - state.shape->state_floats());
    for (int64_t cell = length - state.shape->taps + 1; cell < length; cell++)
      copy(state.inputs(cell < 0 ? cell + state.rows : cell), state.shape->channels);
    if (into_states) state.header() = {length, length, {}};
  }
  return 4 * floats;
}
// Puts the rows of the log at cells `from` to the cells `to`, one after another. -1: nobody holds the states, or a cell is below 0.
EXPORT int32_t edgespec_move_rows(int64_t number, int64_t slot, const int32_t* to, const int32_t* from, int64_t count) {
  const States* s = all_states.find(number);
  if (!s || slot < 0 || slot >= s->slots) return -1;
  for (int64_t i = 0; i < count; i++) if (to[i] < 0 || from[i] < 0) return -1;
  for (int64_t layer = 0; layer < s->layers; layer++) {
    const State state = s->at(slot, layer);
    for (int64_t i = 0; i < count; i++) memmove(state.inputs(to[i]), state.inputs(from[i]), size_t(state.shape->row_floats()) * 4);
  }
  return 0;
}
