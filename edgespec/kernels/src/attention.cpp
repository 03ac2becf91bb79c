// Operators of ONNX Runtime in the domain "edgespec":
//   Attention(q [..., n, heads * size], k?, v?, rows [n, 4], cache [1], cosines?, sines?, q_norm?, k_norm?, sinks?, v_norm?)
//     -> y [..., n, heads * size]; without k and v, q holds all three side by side; without values keys are values, too, and
//     without keys the cache has both already
//   Norm(x [..., width], weight, delta?) -> normed [..., width], sum? [..., width]
// A row is (slot, position, cell, parent): the text that it belongs to, its place in it, the cell that takes its key and
// value, and the row before it in its branch, -1 if that is in the cache already, where all cells are at their positions.
// With -1 - n a row sees n cells behind its own, too, which other rows of the pass fill: a block whose rows see one another.
// Rows of a slot are together. So rows of one pass may belong to several texts, and those of a text form a chain or a tree.
#include <cmath>
#include "cache.h"
#include "operator.h"

namespace edgespec {
namespace {
Registry<Cache> caches;

// Keys and values of one head and of `cells` cells, as a chunk has them.
struct Cells { uint8_t *keys, *values; int64_t cells; };
void copy_cell(int32_t type, int64_t size, const Cells& from, int64_t cell, const Cells& to, int64_t to_cell) {
  const int64_t bytes = type == F16 ? 2 : 1;
  const uint8_t* key = from.keys + cell / kLanes * key_block_bytes(type, size);
  uint8_t* to_key = to.keys + to_cell / kLanes * key_block_bytes(type, size);
  for (int64_t i = 0; i < size; i++) memcpy(to_key + (i * kLanes + to_cell % kLanes) * bytes, key + (i * kLanes + cell % kLanes) * bytes, size_t(bytes));
  if (type == F16) {
    for (int64_t i = 0; i < size / kLanes; i++) memcpy(to.values + (i * to.cells + to_cell) * kLanes * 2, from.values + (i * from.cells + cell) * kLanes * 2, kLanes * 2);
    return;
  }
  for (int64_t i = 0; i < size / 32; i++) {
    memcpy(to_key + size * kLanes + (i * kLanes + to_cell % kLanes) * 2, key + size * kLanes + (i * kLanes + cell % kLanes) * 2, 2);
    const uint8_t* group = from.values + i * 34 * from.cells;
    uint8_t* to_group = to.values + i * 34 * to.cells;
    for (int half = 0; half < 2; half++) memcpy(to_group + (half * to.cells + to_cell) * kLanes, group + (half * from.cells + cell) * kLanes, kLanes);
    memcpy(to_group + 32 * to.cells + 2 * to_cell, group + 32 * from.cells + 2 * cell, 2);
  }
}

// ---- Attention
struct Layer {
  int64_t heads, kv_heads, size, first_head, window;  // first_head: of the cache's; window: cells that a row sees, its own included; 0: all
  int64_t gated;  // whether each head of q is followed by a gate of its result
  float scale, cap, epsilon;
};
OrtStatus* create_attention(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info, void** out) {
  Layer l = {};
  TRY(attribute(info, "heads", &l.heads));
  TRY(attribute(info, "kv_heads", &l.kv_heads));
  TRY(attribute(info, "head_size", &l.size));
  TRY(attribute(info, "first_head", &l.first_head));
  TRY(attribute(info, "window", &l.window));
  TRY(attribute(info, "scale", &l.scale));
  TRY(attribute(info, "cap", &l.cap));
  TRY(attribute(info, "epsilon", &l.epsilon));
  optional(attribute(info, "gated", &l.gated));
  if (l.kv_heads < 1 || l.heads < l.kv_heads || l.heads > 1024 || l.heads % l.kv_heads || !holds(F16, l.size) || l.first_head < 0 || l.first_head > 1 << 20 || l.window < 0 || l.gated < 0 || l.gated > 1)
    return invalid("edgespec: Attention cannot have %lld heads of size %lld for %lld heads of keys, the first of them number %lld, window %lld", (long long)l.heads, (long long)l.size, (long long)l.kv_heads, (long long)l.first_head, (long long)l.window);
  return keep(l, out);
}

struct Item { int64_t head, first, last, chunk; };  // rows of a slot and a chunk, -1: all of their chunks
struct Step {
  Layer layer;
  const Attention* kernels;
  const Cache* cache;
  const Row* rows;
  int64_t count, group, stride, q_stride, k_stride, most_chunks;  // group: queries per key; stride: floats of a result
  const float *q, *k, *v, *cosines, *sines, *q_norm, *k_norm, *v_norm, *sinks;  // k: null if the cache has keys and values
  Head head;
  float *queries, *partials, *y;  // [kv_heads][count][group][size]; [kv_heads][chunks][count][group][stride]
  Item* items;
  bool has_partials;
  bool* is_by_chunk;   // by row: whether its items are
  int32_t* straight;   // by row: the first position of its branch that is not in the cell of its number
  std::atomic<bool> out_of_memory;

  int64_t begin(int64_t row) const { const int64_t end = rows[row].position + 1; return layer.window && end > layer.window ? end - layer.window : 0; }
  int64_t first_chunk(int64_t row) const { return begin(row) / kChunk; }
  int64_t end(int64_t row) const { return rows[row].position - (rows[row].parent < 0 ? int64_t(rows[row].parent) : -1); }  // behind the last cell that it sees
  int64_t last_chunk(int64_t row) const { return (end(row) - 1) / kChunk; }
  bool sees(int64_t row, int64_t chunk) const { return first_chunk(row) <= chunk && chunk <= last_chunk(row); }
  bool is_straight(int64_t row, int64_t chunk) const { return straight[row] >= end(row) || straight[row] >= (chunk + 1) * kChunk; }
  Cells cells(int64_t row, int64_t chunk, int64_t h) const { return {cache->keys(rows[row].slot, chunk, layer.first_head + h), cache->values(rows[row].slot, chunk, layer.first_head + h), kChunk}; }
  void finish(const float* whole, int64_t row, int64_t at) const {
    const float* gate = layer.gated ? q + row * q_stride + (2 * at + 1) * layer.size : nullptr;
    kernels->finish(whole, int(layer.size), sinks ? sinks + at : nullptr, gate, y + (row * layer.heads + at) * layer.size);
  }
  float* partial(int64_t h, int64_t chunk, int64_t row) const { return partials + ((h * most_chunks + chunk) * count + row) * group * stride; }
};

// The queries of a row, and its key and value into the cache.
void ORT_CALL place_row(void* with, size_t number) {
  Step& s = *static_cast<Step*>(with);
  const int64_t row = int64_t(number), size = s.layer.size, q_size = size << s.layer.gated, angle = int64_t(s.rows[row].position) * s.head.rotary;
  const float *cosines = s.cosines ? s.cosines + angle : nullptr, *sines = s.sines ? s.sines + angle : nullptr;
  alignas(64) float key[1024], value[1024];
  for (int64_t h = 0; h < s.layer.kv_heads; h++) {
    if (s.k) {
      s.kernels->prepare(s.k + row * s.k_stride + h * size, s.head, s.k_norm, cosines, sines, 1.f, key);
      s.kernels->prepare(s.v + row * s.k_stride + h * size, s.head, s.v_norm, nullptr, nullptr, 1.f, value);
      const Cells to = s.cells(row, s.rows[row].cell / kChunk, h);
      s.kernels->put(s.cache->type, int(size), key, value, to.keys, to.values, s.rows[row].cell % kChunk, kChunk);
    }
    for (int64_t g = 0; g < s.group; g++)
      s.kernels->prepare(s.q + row * s.q_stride + (h * s.group + g) * q_size, s.head, s.q_norm, cosines, sines, s.layer.scale, s.queries + ((h * s.count + row) * s.group + g) * size);
  }
}
// Rows first..last of a head on a chunk that all of them see. The cells of a single row's branch may lie elsewhere.
bool attend_rows(Step& s, int64_t h, int64_t first, int64_t last, int64_t chunk, float* results) {
  const int64_t pairs = (last - first) * s.group, size = s.layer.size, start = chunk * kChunk;
  const Cells cells = s.cells(first, chunk, h);
  Scratch scratch, tails;
  if (!scratch.get(size_t(pairs) * (kChunk * sizeof(float) + 2 * sizeof(int)))) return false;
  float* scores = reinterpret_cast<float*>(scratch.data);
  int *begin = reinterpret_cast<int*>(scores + pairs * kChunk), *end = begin + pairs;
  for (int64_t p = 0; p < pairs; p++) {
    const int64_t row = first + p / s.group, from = s.begin(row) - start, to = s.end(row) - start;
    begin[p] = from > 0 ? int(from) : 0;
    end[p] = to < kChunk ? int(to) : kChunk;
  }
  Attend a = {s.cache->type, int(size), int(pairs), cells.keys, cells.values, kChunk, nullptr, nullptr, 0, s.queries + (h * s.count + first) * s.group * size, begin, end, s.layer.cap, scores, results, s.stride};
  if (!s.is_straight(first, chunk)) {
    const int64_t direct = s.straight[first] - start;
    a.direct = direct < 0 ? 0 : int(direct / kLanes * kLanes);
    a.tail_cells = (end[0] - a.direct + kLanes - 1) / kLanes * kLanes;
    const int64_t bytes = a.tail_cells * vector_bytes(a.type, size);
    if (!tails.get(size_t(2 * bytes))) return false;
    const Cells to = {tails.data, tails.data + bytes, a.tail_cells};
    a.tail_keys = to.keys; a.tail_values = to.values;
    for (int64_t position = start + end[0] - 1, at = first; position >= start + (begin[0] > a.direct ? begin[0] : a.direct); position--) {
      while (at >= 0 && s.rows[at].position > position) at = s.rows[at].parent;
      const int64_t cell = at >= 0 ? s.rows[at].cell : position;
      copy_cell(a.type, size, s.cells(first, cell / kChunk, h), cell % kChunk, to, position - start - a.direct);
    }
  }
  s.kernels->attend(a);
  return true;
}
// Calls f(first, last) for groups of rows that see a chunk and can be taken together.
template <class F> bool for_groups(const Step& s, int64_t first, int64_t last, int64_t chunk, F f) {
  for (int64_t row = first; row < last;) {
    int64_t next = row;
    while (next < last && s.sees(next, chunk) && s.is_straight(next, chunk)) next++;
    if (next == row && !s.sees(row, chunk)) { row++; continue; }
    if (next == row) next++;
    if (!f(row, next)) return false;
    row = next;
  }
  return true;
}
bool run_chunks(Step& s, const Item& item) {
  const int64_t pairs = (item.last - item.first) * s.group, size = s.layer.size;
  Scratch scratch;
  if (!scratch.get(size_t(2 * pairs * s.stride) * sizeof(float))) return false;
  float *whole = reinterpret_cast<float*>(scratch.data), *part = whole + pairs * s.stride;
  int64_t chunk = s.first_chunk(item.first), last = 0;
  for (int64_t row = item.first; row < item.last; row++) {
    chunk = s.first_chunk(row) < chunk ? s.first_chunk(row) : chunk;
    last = s.last_chunk(row) > last ? s.last_chunk(row) : last;
  }
  for (; chunk <= last; chunk++) {
    const bool done = for_groups(s, item.first, item.last, chunk, [&](int64_t from, int64_t to) {
      if (!attend_rows(s, item.head, from, to, chunk, part)) return false;
      for (int64_t p = 0; p < (to - from) * s.group; p++)
        s.kernels->merge(whole + ((from - item.first) * s.group + p) * s.stride, part + p * s.stride, int(size), chunk == s.first_chunk(from + p / s.group));
      return true;
    });
    if (!done) return false;
  }
  for (int64_t p = 0; p < pairs; p++) s.finish(whole + p * s.stride, item.first + p / s.group, item.head * s.group + p % s.group);
  return true;
}
void ORT_CALL run_item(void* with, size_t number) {
  Step& s = *static_cast<Step*>(with);
  const Item& item = s.items[number];
  const bool done = item.chunk < 0 ? run_chunks(s, item) : for_groups(s, item.first, item.last, item.chunk, [&](int64_t from, int64_t to) { return attend_rows(s, item.head, from, to, item.chunk, s.partial(item.head, item.chunk, from)); });
  if (!done) s.out_of_memory = true;
}
void ORT_CALL merge_row(void* with, size_t number) {
  Step& s = *static_cast<Step*>(with);
  const int64_t row = int64_t(number), first = s.first_chunk(row), size = s.layer.size;
  if (s.is_by_chunk[row]) for (int64_t h = 0; h < s.layer.kv_heads; h++) for (int64_t g = 0; g < s.group; g++) {
    float* whole = s.partial(h, first, row) + g * s.stride;
    for (int64_t chunk = first + 1; chunk <= s.last_chunk(row); chunk++) s.kernels->merge(whole, s.partial(h, chunk, row) + g * s.stride, int(size), false);
    s.finish(whole, row, h * s.group + g);
  }
}

constexpr int64_t kManyRows = 32, kPairsAtOnce = 96, kMostPartials = 8 << 20;
// The work on each slot's rows: few rows by chunk, so that all threads have a part of it; many in blocks of rows.
int64_t divide(const Step& s, Item* items) {
  int64_t count = 0;
  for (int64_t first = 0, last; first < s.count; first = last) {
    for (last = first + 1; last < s.count && s.rows[last].slot == s.rows[first].slot;) last++;
    int64_t from = s.first_chunk(first), to = s.last_chunk(first);
    for (int64_t row = first; row < last; row++) {
      from = s.first_chunk(row) < from ? s.first_chunk(row) : from;
      to = s.last_chunk(row) > to ? s.last_chunk(row) : to;
    }
    const bool by_chunk = last - first < kManyRows && s.has_partials;
    const int64_t block = by_chunk ? last - first : kPairsAtOnce / s.group < 1 ? 1 : kPairsAtOnce / s.group;
    for (int64_t row = first; items && row < last; row++) s.is_by_chunk[row] = by_chunk;
    for (int64_t h = 0; h < s.layer.kv_heads; h++) for (int64_t row = first; row < last; row += block) {
      const Item item = {h, row, row + block < last ? row + block : last, -1};
      for (int64_t chunk = from; chunk <= (by_chunk ? to : from); chunk++, count++) if (items) { items[count] = item; items[count].chunk = by_chunk ? chunk : -1; }
    }
  }
  return count;
}

OrtStatus* check_row(const Step& s, int64_t i, int64_t positions) {
  const Row& r = s.rows[i];
  const int64_t cells = s.cache->chunks * kChunk;
  const int64_t last = i - 1 - r.parent;  // the row of the last cell that is seen by one of a block
  const bool follows = r.parent == -1 || (r.parent < 0 ? last < s.count && s.rows[last].slot == r.slot && s.rows[last].cell == s.end(i) - 1 && r.cell == r.position : r.parent < i && s.rows[r.parent].slot == r.slot && s.rows[r.parent].position + 1 == r.position);
  if (r.slot < 0 || r.slot >= s.cache->slots || r.position < 0 || r.position >= cells || r.position >= positions || r.cell < 0 || r.cell >= cells || !follows)
    return invalid("edgespec: Attention has a row %lld (slot %d, position %d, cell %d, parent %d) outside %lld slots of %lld cells and %lld positions, or away from its parent", (long long)i, r.slot, r.position, r.cell, r.parent, (long long)s.cache->slots, (long long)cells, (long long)positions);
  return nullptr;
}
OrtStatus* ORT_CALL compute_attention(void* self, OrtKernelContext* context) {
  const Layer& l = *static_cast<const Layer*>(self);
  Step s = {};
  s.layer = l; s.kernels = path_in_use().attention;
  s.group = l.heads / l.kv_heads; s.stride = (l.size + kResult + 15) / 16 * 16;
  Tensor q, k, v, rows, number, cosines, sines;
  const OrtValue* value;
  TRY(read_floats(context, 0, "q", &q));
  TRY(read_floats(context, 1, "k", &k));
  TRY(read_floats(context, 2, "v", &v));
  const bool is_joined = !k.data;
  const int64_t y_width = l.heads * l.size, q_width = y_width << l.gated, k_width = l.kv_heads * l.size, width = q.rank ? q.dims[q.rank - 1] : 0;
  if (width != q_width && !(is_joined && (width == q_width + k_width || width == q_width + 2 * k_width))) return invalid("edgespec: Attention's q is %lld wide, expected %lld, or with keys and values in it %lld or %lld more", (long long)width, (long long)q_width, (long long)k_width, (long long)(2 * k_width));
  s.count = elements(q, q.rank - 1);
  if (!is_joined && (!v.data || elements(k, k.rank) != s.count * k_width || elements(v, v.rank) != s.count * k_width)) return invalid("edgespec: Attention's k and v are not %lld rows of %lld", (long long)s.count, (long long)k_width);
  s.q = static_cast<const float*>(q.data);
  s.k = !is_joined ? static_cast<const float*>(k.data) : width > q_width ? s.q + q_width : nullptr;
  s.v = !is_joined ? static_cast<const float*>(v.data) : width > q_width + k_width ? s.k + k_width : s.k;
  s.q_stride = width; s.k_stride = is_joined ? width : k_width;
  TRY(input(context, 3, &value));
  TRY(read(value, "rows", kTypeInt32, &rows));
  if (elements(rows, rows.rank) != 4 * s.count) return invalid("edgespec: Attention has %lld numbers of rows, expected 4 for each of %lld rows", (long long)elements(rows, rows.rank), (long long)s.count);
  s.rows = static_cast<const Row*>(rows.data);
  TRY(input(context, 4, &value));
  TRY(read(value, "cache", kTypeInt64, &number));
  if (elements(number, number.rank) != 1 || !(s.cache = caches.find(*static_cast<const int64_t*>(number.data)))) return invalid("edgespec: Attention names a cache that nobody holds");
  if (l.first_head + l.kv_heads > s.cache->heads) return invalid("edgespec: Attention's heads %lld to %lld are outside a cache of %lld", (long long)l.first_head, (long long)(l.first_head + l.kv_heads - 1), (long long)s.cache->heads);
  for (int64_t h = 0; h < l.kv_heads; h++) if (s.cache->sizes[l.first_head + h] != l.size) return invalid("edgespec: Attention's heads have size %lld, those of its cache %d", (long long)l.size, s.cache->sizes[l.first_head + h]);
  TRY(read_floats(context, 5, "cosines", &cosines));
  TRY(read_floats(context, 6, "sines", &sines));
  int64_t positions = INT64_MAX;
  if (cosines.data) {
    if (cosines.rank != 2 || !sines.data || sines.rank != 2 || sines.dims[0] != cosines.dims[0] || sines.dims[1] != cosines.dims[1] || cosines.dims[1] < 1 || cosines.dims[1] * 2 > l.size) return invalid("edgespec: Attention's cosines and sines are not [positions, at most %lld]", (long long)(l.size / 2));
    positions = cosines.dims[0];
  }
  s.cosines = static_cast<const float*>(cosines.data); s.sines = static_cast<const float*>(sines.data);
  s.head = {int(l.size), int(cosines.data ? cosines.dims[1] : 0), l.epsilon};
  TRY(read_vector(context, 7, "q_norm", l.size, &s.q_norm));
  TRY(read_vector(context, 8, "k_norm", l.size, &s.k_norm));
  TRY(read_vector(context, 9, "sinks", l.heads, &s.sinks));
  TRY(read_vector(context, 10, "v_norm", l.size, &s.v_norm));
  for (int64_t i = 0; i < s.count; i++) {
    TRY(check_row(s, i, positions));
    s.most_chunks = s.last_chunk(i) + 1 > s.most_chunks ? s.last_chunk(i) + 1 : s.most_chunks;
  }
  OrtValue* y; void* p;
  q.dims[q.rank - 1] = y_width;
  TRY(output(context, 0, q.dims, q.rank, &y));
  TRY(data(y, &p));
  s.y = static_cast<float*>(p);
  if (!s.count) return nullptr;

  const int64_t partials = s.count * s.most_chunks * l.heads * s.stride;
  s.has_partials = s.count < kManyRows || partials * int64_t(sizeof(float)) <= kMostPartials;
  const int64_t items = divide(s, nullptr);
  Scratch scratch;
  for (Pieces pieces = {nullptr, 0};; pieces = {scratch.data, 0}) {
    pieces.take(&s.queries, s.count * y_width);
    if (s.has_partials) pieces.take(&s.partials, partials);
    pieces.take(&s.items, items);
    pieces.take(&s.is_by_chunk, s.count);
    pieces.take(&s.straight, s.count);
    if (pieces.data) break;
    if (!scratch.get(size_t(pieces.size))) return error(kFail, "edgespec: out of memory");
  }
  divide(s, s.items);
  int64_t work = 0;  // multiplications
  for (int64_t i = 0; i < s.count; i++) {
    const Row& r = s.rows[i];
    const int32_t before = r.parent < 0 ? r.position : s.straight[r.parent];
    s.straight[i] = before == r.position && r.cell == r.position ? int32_t(s.end(i)) : before;
    work += (s.end(i) - s.begin(i)) * 2 * y_width;
  }
  run_all(s.count < 16, place_row, s.count, &s);
  run_all(work < 50000, run_item, items, &s);
  if (s.has_partials) run_all(s.count * s.most_chunks * y_width < 100000, merge_row, s.count, &s);
  return s.out_of_memory ? error(kFail, "edgespec: out of memory") : nullptr;
}

// ---- Norm
struct Norm { float epsilon; };
OrtStatus* create_norm(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info, void** out) {
  Norm n = {};
  TRY(attribute(info, "epsilon", &n.epsilon));
  return keep(n, out);
}
struct Norms { const float *x, *weight, *delta; float *normed, *sum, epsilon; int64_t width; };
void ORT_CALL norm_row(void* with, size_t row) {
  const Norms& n = *static_cast<const Norms*>(with);
  const int64_t at = int64_t(row) * n.width;
  // What is not asked for is written to the place of the result first.
  path_in_use().attention->norm(n.x + at, n.delta ? n.delta + at : nullptr, n.weight, n.epsilon, n.width, n.normed + at, (n.sum ? n.sum : n.normed) + at);
}
OrtStatus* ORT_CALL compute_norm(void* self, OrtKernelContext* context) {
  Norms n = {};
  n.epsilon = static_cast<const Norm*>(self)->epsilon;
  Tensor x, delta;
  TRY(read_floats(context, 0, "x", &x));
  n.width = x.rank ? x.dims[x.rank - 1] : 0;
  if (n.width < 1) return invalid("edgespec: Norm's x has no width");
  TRY(read_vector(context, 1, "weight", n.width, &n.weight));
  TRY(read_floats(context, 2, "delta", &delta));
  if (delta.data && elements(delta, delta.rank) != elements(x, x.rank)) return invalid("edgespec: Norm's delta has %lld elements, expected %lld", (long long)elements(delta, delta.rank), (long long)elements(x, x.rank));
  n.x = static_cast<const float*>(x.data); n.delta = static_cast<const float*>(delta.data);
  size_t outputs;
  TRY(num_outputs(context, &outputs));
  float** places[] = {&n.normed, &n.sum};
  for (size_t i = 0; i < outputs && i < 2; i++) {
    OrtValue* y; void* p;
    TRY(output(context, i, x.dims, x.rank, &y));
    if (!y) continue;  // it has no name
    TRY(data(y, &p));
    *places[i] = static_cast<float*>(p);
  }
  if (n.sum && !n.delta) return invalid("edgespec: Norm gives a sum only with a delta");
  const int64_t rows = elements(x, x.rank - 1);
  run_all(rows * n.width < 65536, norm_row, rows, &n);
  return nullptr;
}

}  // namespace
const Operator kAttentionOperators[] = {
    {"Attention", "fFFinFFFFFF", 1, create_attention, compute_attention},
    {"Norm", "ffF", 2, create_norm, compute_norm},
};
}  // namespace edgespec

#define EXPORT extern "C" __attribute__((visibility("default")))
using namespace edgespec;

// Bytes of a cache for `count` heads of these sizes; -1 if there cannot be one.
EXPORT int64_t edgespec_cache_bytes(int32_t type, const int32_t* sizes, int64_t count, int64_t slots, int64_t chunks) {
  int64_t cell = 0, bytes;
  if (count < 1 || count > 1 << 20 || slots < 1 || slots > 1 << 20 || chunks < 1 || chunks > 1 << 20) return -1;
  for (int64_t i = 0; i < count; i++) {
    if (!holds(type, sizes[i])) return -1;
    cell += 2 * vector_bytes(type, sizes[i]);
  }
  return __builtin_mul_overflow(cell * kChunk, slots * chunks, &bytes) ? -1 : bytes;
}
// The number of a cache in `memory`, of as many bytes as above, for graphs; 0 if there cannot be one, or without memory. It must outlive all passes.
EXPORT int64_t edgespec_hold_cache(uint8_t* memory, int32_t type, const int32_t* sizes, int64_t count, int64_t slots, int64_t chunks) {
  if (edgespec_cache_bytes(type, sizes, count, slots, chunks) < 0) return 0;
  Cache* c = static_cast<Cache*>(malloc(sizeof(Cache) + size_t(count) * (sizeof(int64_t) + sizeof(int32_t))));
  if (!c) return 0;
  int64_t* starts = reinterpret_cast<int64_t*>(c + 1);
  int32_t* kept = reinterpret_cast<int32_t*>(starts + count);
  int64_t bytes = 0;
  for (int64_t i = 0; i < count; i++) {
    starts[i] = bytes;
    kept[i] = sizes[i];
    bytes += 2 * kChunk * vector_bytes(type, sizes[i]);
  }
  *c = {0, memory, type, slots, chunks, count, bytes, kept, starts, nullptr};
  return caches.add(c);
}
EXPORT void edgespec_drop_cache(int64_t number) { caches.drop(number); }
// Copies `count` cells of a slot to (or from) `flat`, which is, for each head, its keys and its values as a chunk of `room`
// (a multiple of 16, at most a slot's) cells has them. -1: nobody holds the cache, or something is outside it.
EXPORT int32_t edgespec_copy_cells(int64_t number, int32_t into_cache, int64_t slot, const int32_t* cells, int64_t count, uint8_t* flat, int64_t room) {
  const Cache* c = caches.find(number);
  if (!c || slot < 0 || slot >= c->slots || count < 0 || room % kLanes || count > room || room > c->chunks * kChunk) return -1;
  for (int64_t i = 0; i < count; i++) if (cells[i] < 0 || cells[i] >= c->chunks * kChunk) return -1;
  for (int64_t h = 0; h < c->heads; h++) {
    const int64_t bytes = room * vector_bytes(c->type, c->sizes[h]);
    const Cells theirs = {flat, flat + bytes, room};
    for (int64_t i = 0; i < count; i++) {
      const Cells ours = {c->keys(slot, cells[i] / kChunk, h), c->values(slot, cells[i] / kChunk, h), kChunk};
      into_cache ? copy_cell(c->type, c->sizes[h], theirs, i, ours, cells[i] % kChunk) : copy_cell(c->type, c->sizes[h], ours, cells[i] % kChunk, theirs, i);
    }
    flat += 2 * bytes;
  }
  return 0;
}
