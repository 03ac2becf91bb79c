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
  for (int64_t i = 0; i < size; i++)
    memcpy(to_key + (i * kLanes + to_cell % kLanes) * bytes, key + (i * kLanes + cell % kLanes) * bytes, size_t(bytes));
  if (type == F16) {
    for (int64_t i = 0; i < size / kLanes; i++)
      memcpy(to.values + (i * to.cells + to_cell) * kLanes * 2, from.values + (i * from.cells + cell) * kLanes * 2, kLanes * 2);
    return;
  }
  for (int64_t i = 0; i < size / 32; i++) {
    memcpy(to_key + size * kLanes + (i * kLanes + to_cell % kLanes) * 2, key + size * kLanes + (i * kLanes + cell % kLanes) * 2, 2);
    const uint8_t* group = from.values + i * 34 * from.cells;
    uint8_t* to_group = to.values + i * 34 * to.cells;
    for (int half = 0; half < 2; half++)
      memcpy(to_group + (half * to.cells + to_cell) * kLanes, group + (half * from.cells + cell) * kLanes, kLanes);
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
  TRY(read_attributes(info, {{"heads", &l.heads},
                             {"kv_heads", &l.kv_heads},
                             {"head_size", &l.size},
                             {"first_head", &l.first_head},
                             {"window", &l.window},
                             {"gated", &l.gated, true},
                             {"scale", &l.scale},
                             {"cap", &l.cap},
                             {"epsilon", &l.epsilon}}));
  if (l.kv_heads < 1 || l.heads < l.kv_heads || l.heads > 1024 || l.heads % l.kv_heads || !holds(F16, l.size) || l.first_head < 0 ||
      l.first_head > 1 << 20 || l.window < 0 || l.gated < 0 || l.gated > 1)
    return invalid(
        "edgespec: Attention cannot have %lld heads of size %lld for %lld heads of keys, the first of them number %lld, window %lld",
        l.heads, l.size, l.kv_heads, l.first_head, l.window);
  return keep(l, out);
}

struct Item { int64_t head, chunk, first, last; };  // rows of a slot
struct Step {
  Layer layer;
  const Attention* kernels;
  const Cache* cache;
  const Row* rows;
  int64_t count, group, stride, q_stride, k_stride, most_chunks, wave;  // group: queries per key; stride: floats of a result
  const float *q, *k, *v, *cosines, *sines, *q_norm, *k_norm, *v_norm, *sinks;  // k: null if the cache has keys and values
  Head head;
  float *queries, *partials, *y;  // [kv_heads][count][group][size]; [kv_heads][chunks][wave][group][stride]
  Item* items;
  int32_t* straight;   // by row: the first position of its branch that is not in the cell of its number
  std::atomic<bool> out_of_memory;

  int64_t begin(int64_t row) const {
    const int64_t end = rows[row].position + 1;
    return layer.window && end > layer.window ? end - layer.window : 0;
  }
  int64_t first_chunk(int64_t row) const { return begin(row) / kChunk; }
  // behind the last cell that it sees
  int64_t end(int64_t row) const {
    return rows[row].position - (rows[row].parent < 0 ? int64_t(rows[row].parent) : -1);
  }
  int64_t last_chunk(int64_t row) const { return (end(row) - 1) / kChunk; }
  bool sees(int64_t row, int64_t chunk) const { return first_chunk(row) <= chunk && chunk <= last_chunk(row); }
  bool is_straight(int64_t row, int64_t chunk) const { return straight[row] >= end(row) || straight[row] >= (chunk + 1) * kChunk; }
  Cells cells(int64_t row, int64_t chunk, int64_t h) const {
    return {cache->keys(rows[row].slot, chunk, layer.first_head + h), cache->values(rows[row].slot, chunk, layer.first_head + h), kChunk};
  }
  void finish(const float* whole, int64_t row, int64_t at) const {
    const float* gate = layer.gated ? q + row * q_stride + (2 * at + 1) * layer.size : nullptr;
    kernels->finish(whole, int(layer.size), sinks ? sinks + at : nullptr, gate, y + (row * layer.heads + at) * layer.size);
  }
  float* partial(int64_t h, int64_t chunk, int64_t row) const {
    return partials + ((h * most_chunks + chunk) * wave + row % wave) * group * stride;
  }
};

// The queries of a row, and its key and value into the cache.
void place_row(const Step& s, int64_t row) {
  const int64_t size = s.layer.size, q_size = size << s.layer.gated, angle = int64_t(s.rows[row].position) * s.head.rotary;
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
      s.kernels->prepare(s.q + row * s.q_stride + (h * s.group + g) * q_size, s.head, s.q_norm, cosines, sines, s.layer.scale,
                         s.queries + ((h * s.count + row) * s.group + g) * size);
  }
}
// Rows first..last of a head on a chunk that all of them see. The cells of a single row's branch may lie elsewhere.
bool attend_rows(const Step& s, int64_t h, int64_t first, int64_t last, int64_t chunk, float* results) {
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
  const float* queries = s.queries + (h * s.count + first) * s.group * size;
  Attend a = {s.cache->type, int(size), int(pairs), cells.keys, cells.values, kChunk, nullptr, nullptr, 0,
              queries, begin, end, s.layer.cap, scores, results, s.stride};
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
void run_item(Step& s, const Item& item) {
  const bool done = for_groups(s, item.first, item.last, item.chunk, [&](int64_t from, int64_t to) {
    return attend_rows(s, item.head, from, to, item.chunk, s.partial(item.head, item.chunk, from));
  });
  if (!done) s.out_of_memory = true;
}
void merge_row(const Step& s, int64_t row) {
  const int64_t first = s.first_chunk(row), size = s.layer.size;
  for (int64_t h = 0; h < s.layer.kv_heads; h++) for (int64_t g = 0; g < s.group; g++) {
    float* whole = s.partial(h, first, row) + g * s.stride;
    for (int64_t chunk = first + 1; chunk <= s.last_chunk(row); chunk++)
      s.kernels->merge(whole, s.partial(h, chunk, row) + g * s.stride, int(size), false);
    s.finish(whole, row, h * s.group + g);
  }
}

// Rows are taken in waves, as the results of their chunks are kept until they are merged: 32 of them, or more that take 8 MB.
constexpr int64_t kLeastWave = 32, kMostPartials = 8 << 20, kPairsAtOnce = 96;
// The work on the rows start..stop by heads, chunks and blocks of each slot's rows; without `items` how much there is.
int64_t divide(const Step& s, int64_t start, int64_t stop, Item* items) {
  const int64_t block = kPairsAtOnce / s.group < 1 ? 1 : kPairsAtOnce / s.group;
  int64_t count = 0;
  for (int64_t first = start, last; first < stop; first = last) {
    int64_t from = s.first_chunk(first), to = s.last_chunk(first);
    for (last = first; last < stop && s.rows[last].slot == s.rows[first].slot; last++) {
      from = s.first_chunk(last) < from ? s.first_chunk(last) : from;
      to = s.last_chunk(last) > to ? s.last_chunk(last) : to;
    }
    for (int64_t h = 0; h < s.layer.kv_heads; h++) for (int64_t chunk = from; chunk <= to; chunk++)
      for (int64_t row = first; row < last; row += block, count++)
        if (items) items[count] = {h, chunk, row, row + block < last ? row + block : last};
  }
  return count;
}

OrtStatus* check_row(const Step& s, int64_t i, int64_t positions) {
  const Row& r = s.rows[i];
  const int64_t cells = s.cache->chunks * kChunk;
  const int64_t last = i - 1 - r.parent;  // the row of the last cell that is seen by one of a block
  const bool follows =
      r.parent == -1 ||
      (r.parent < 0 ? last < s.count && s.rows[last].slot == r.slot && s.rows[last].cell == s.end(i) - 1 && r.cell == r.position
                    : r.parent < i && s.rows[r.parent].slot == r.slot && s.rows[r.parent].position + 1 == r.position);
  if (r.slot < 0 || r.slot >= s.cache->slots || r.position < 0 || r.position >= cells || r.position >= positions || r.cell < 0 ||
      r.cell >= cells || !follows)
    return invalid(
        "edgespec: Attention has a row %lld (slot %d, position %d, cell %d, parent %d) outside %lld slots of %lld cells and %lld "
        "positions, or away from its parent",
        i, r.slot, r.position, r.cell, r.parent, s.cache->slots, cells, positions);
  return nullptr;
}
OrtStatus* ORT_CALL compute_attention(void* self, OrtKernelContext* context) {
  const Layer& l = *static_cast<const Layer*>(self);
  Step s = {};
  s.layer = l; s.kernels = kernels_in_use().attention;
  s.group = l.heads / l.kv_heads; s.stride = (l.size + kResult + 15) / 16 * 16;
  Tensor q, k, v, cosines, sines;
  TRY(read_floats(context, 0, "q", &q));
  TRY(read_floats(context, 1, "k", &k));
  TRY(read_floats(context, 2, "v", &v));
  const bool is_joined = !k.data;
  const int64_t y_width = l.heads * l.size, q_width = y_width << l.gated, k_width = l.kv_heads * l.size, width = q.width();
  if (width != q_width && !(is_joined && (width == q_width + k_width || width == q_width + 2 * k_width)))
    return invalid("edgespec: Attention's q is %lld wide, expected %lld, or with keys and values in it %lld or %lld more", width, q_width,
                   k_width, 2 * k_width);
  s.count = q.rows();
  if (!is_joined && (!v.data || k.size() != s.count * k_width || v.size() != s.count * k_width))
    return invalid("edgespec: Attention's k and v are not %lld rows of %lld", s.count, k_width);
  s.q = q.floats();
  s.k = !is_joined ? k.floats() : width > q_width ? s.q + q_width : nullptr;
  s.v = !is_joined ? v.floats() : width > q_width + k_width ? s.k + k_width : s.k;
  s.q_stride = width; s.k_stride = is_joined ? width : k_width;
  TRY(read_rows(context, 3, "Attention", s.count, &s.rows));
  TRY(caches.find(context, 4, "Attention", "a cache", &s.cache));
  if (l.first_head + l.kv_heads > s.cache->heads)
    return invalid("edgespec: Attention's heads %lld to %lld are outside a cache of %lld", l.first_head, l.first_head + l.kv_heads - 1,
                   s.cache->heads);
  for (int64_t h = 0; h < l.kv_heads; h++)
    if (s.cache->sizes[l.first_head + h] != l.size)
      return invalid("edgespec: Attention's heads have size %lld, those of its cache %d", l.size, s.cache->sizes[l.first_head + h]);
  TRY(read_floats(context, 5, "cosines", &cosines));
  TRY(read_floats(context, 6, "sines", &sines));
  if (cosines.data && (cosines.rank != 2 || !sines.data || sines.rank != 2 || sines.dims[0] != cosines.dims[0] ||
                       sines.dims[1] != cosines.dims[1] || cosines.dims[1] < 1 || cosines.dims[1] * 2 > l.size))
    return invalid("edgespec: Attention's cosines and sines are not [positions, at most %lld]", l.size / 2);
  s.cosines = cosines.floats(); s.sines = sines.floats();
  s.head = {int(l.size), int(cosines.data ? cosines.dims[1] : 0), l.epsilon};
  TRY(read_vector(context, 7, "q_norm", l.size, &s.q_norm));
  TRY(read_vector(context, 8, "k_norm", l.size, &s.k_norm));
  TRY(read_vector(context, 9, "sinks", l.heads, &s.sinks));
  TRY(read_vector(context, 10, "v_norm", l.size, &s.v_norm));
  for (int64_t i = 0; i < s.count; i++) {
    TRY(check_row(s, i, cosines.data ? cosines.dims[0] : INT64_MAX));
    s.most_chunks = s.last_chunk(i) + 1 > s.most_chunks ? s.last_chunk(i) + 1 : s.most_chunks;
  }
  q.dims[q.rank - 1] = y_width;
  TRY(open(context, 0, q, &s.y));
  if (!s.count) return nullptr;

  const int64_t results = s.most_chunks * l.heads * s.stride, fitting = kMostPartials / int64_t(sizeof(float)) / results;  // of a row
  s.wave = fitting > kLeastWave ? fitting : kLeastWave;
  s.wave = s.wave < s.count ? s.wave : s.count;
  int64_t items = 0;
  for (int64_t row = 0; row < s.count; row += s.wave) {
    const int64_t needed = divide(s, row, row + s.wave < s.count ? row + s.wave : s.count, nullptr);
    items = needed > items ? needed : items;
  }
  Scratch scratch;
  TRY(scratch.get({{&s.queries, s.count * y_width}, {&s.partials, s.wave * results}, {&s.items, items}, {&s.straight, s.count}}));
  for (int64_t i = 0; i < s.count; i++) {
    const Row& r = s.rows[i];
    const int32_t before = r.parent < 0 ? r.position : s.straight[r.parent];
    s.straight[i] = before == r.position && r.cell == r.position ? int32_t(s.end(i)) : before;
  }
  run_all(s.count < 16, s.count, [&](int64_t row) { place_row(s, row); });
  for (int64_t first = 0, last; first < s.count; first = last) {
    last = first + s.wave < s.count ? first + s.wave : s.count;
    int64_t work = 0;  // multiplications
    for (int64_t row = first; row < last; row++) work += (s.end(row) - s.begin(row)) * 2 * y_width;
    run_all(work < 50000, divide(s, first, last, s.items), [&](int64_t item) { run_item(s, s.items[item]); });
    run_all((last - first) * s.most_chunks * y_width < 100000, last - first, [&](int64_t row) { merge_row(s, first + row); });
  }
  return s.out_of_memory ? out_of_memory() : nullptr;
}

// ---- Norm
struct Norm { float epsilon; };
OrtStatus* create_norm(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info, void** out) {
  Norm n = {};
  TRY(read_attributes(info, {{"epsilon", &n.epsilon}}));
  return keep(n, out);
}
OrtStatus* ORT_CALL compute_norm(void* self, OrtKernelContext* context) {
  const float epsilon = static_cast<const Norm*>(self)->epsilon;
  Tensor x, delta;
  TRY(read_floats(context, 0, "x", &x));
  const int64_t width = x.width(), rows = x.rows();
  if (width < 1) return invalid("edgespec: Norm's x has no width");
  const float* weight;
  TRY(read_vector(context, 1, "weight", width, &weight));
  TRY(read_floats(context, 2, "delta", &delta));
  if (delta.data && delta.size() != x.size())
    return invalid("edgespec: Norm's delta has %lld elements, expected %lld", delta.size(), x.size());
  size_t outputs;
  TRY(num_outputs(context, &outputs));
  float *normed, *sum = nullptr;
  TRY(open(context, 0, x, &normed));
  if (outputs > 1) TRY(open(context, 1, x, &sum));
  if (sum && rows && !delta.data) return invalid("edgespec: Norm gives a sum only with a delta");
  run_all(rows * width < 65536, rows, [&](int64_t row) {
    const int64_t at = row * width;
    // What is not asked for is written to the place of the result first.
    kernels_in_use().attention->norm(x.floats() + at, delta.data ? delta.floats() + at : nullptr, weight, epsilon, width, normed + at,
                                     (sum ? sum : normed) + at);
  });
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
// The number of a cache in `memory`, of as many bytes as above, for graphs; 0 if there cannot be one, or without memory. It must outlive
// all passes.
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
EXPORT int32_t edgespec_copy_cells(int64_t number, int32_t into_cache, int64_t slot, const int32_t* cells, int64_t count, uint8_t* flat,
                                   int64_t room) {
  const Cache* c = caches.find(number);
  if (!c || slot < 0 || slot >= c->slots || count < 0 || room % kLanes || count > room || room > c->chunks * kChunk) return -1;
  for (int64_t i = 0; i < count; i++) if (cells[i] < 0 || cells[i] >= c->chunks * kChunk) return -1;
  for (int64_t h = 0; h < c->heads; h++) {
    const int64_t bytes = room * vector_bytes(c->type, c->sizes[h]);
    const Cells theirs = {flat, flat + bytes, room};
    for (int64_t i = 0; i < count; i++) {
      const Cells ours = {c->keys(slot, cells[i] / kChunk, h), c->values(slot, cells[i] / kChunk, h), kChunk};
      into_cache ? copy_cell(c->type, c->sizes[h], theirs, i, ours, cells[i] % kChunk)
                 : copy_cell(c->type, c->sizes[h], ours, cells[i] % kChunk, theirs, i);
    }
    flat += 2 * bytes;
  }
  return 0;
}
