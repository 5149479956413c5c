// Causal attention over KV slots in bf16, for rows of any length and any number of queries, on AVX512-BF16.
//
// A query's softmax runs over its own keys in blocks of 16 that start at multiples of 16; keys that it may not
// see add exact zeros. So its bits depend neither on the other queries of the pass nor on how much is cached.
//
//   keys, values: [slot][capacity][kv head][dim]    queries that share a kv head are handled together
//
// In a row whose draft is a tree, a node's key of position p lies wherever the ancestor of that depth lies. Blocks
// that reach into the tree are gathered along the node's path, so its sums are those of the chain from root to node.
#include <algorithm>
#include <immintrin.h>

#include "exp.h"
#include "kernels.h"

namespace {

using Layer = foredraft::Attention;

constexpr int kTile = 12;     // queries handled at once: 24 accumulators
constexpr int kQueries = 48;  // most queries of a work item: they share a block of keys once it is transposed
constexpr int kMany = 192;    // queries of a head in a row from which items are that large; below, threads share better
constexpr int kBlock = 16;    // keys handled at once: one vector of scores
constexpr int kAhead = 256;   // keys fetched at once: they and their values stay in the second cache
constexpr int kMaxDim = 256;
constexpr float kHidden = -1e30f;

float exp_one(float x) { return _mm512_cvtss_f32(exp_of(_mm512_set1_ps(x))); }

__m512 capped(__m512 scores, float cap) {  // cap * tanh(scores / cap), through exp of a non-positive number
  const __m512 x = _mm512_mul_ps(scores, _mm512_set1_ps(1.0f / cap));
  const __m512 e = exp_of(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-2.0f)));
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 t = _mm512_mul_ps(_mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e)), _mm512_set1_ps(cap));
  return _mm512_mask_sub_ps(t, _mm512_movepi32_mask(_mm512_castps_si512(x)), _mm512_setzero_ps(), t);
}

// 16 rows of 16 pairs, row stride in pairs -> out[pair][row]
void transpose16(const int32_t* rows, int64_t stride, int32_t* out) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows + i * stride);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
    b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_si512(out + i * 16, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
    _mm512_storeu_si512(out + (i + 4) * 16, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88));
    _mm512_storeu_si512(out + (i + 8) * 16, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
    _mm512_storeu_si512(out + (i + 12) * 16, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd));
  }
}

struct Queries {  // of one kv head; those of a token are neighbours
  int count;
  const uint16_t* query[kQueries];
  uint16_t* out[kQueries];
  int64_t position[kQueries];
  const int64_t* path[kQueries];  // of a tree's node: places of the keys of positions tree_start, tree_start + 1, ...
  float sink[kQueries];
  int64_t tree_start;  // from this position on keys lie along paths; past every position in a row that is a chain
};

struct State {
  alignas(64) int32_t pairs[kMaxDim / 2 * kQueries];  // queries as [pair of dims][query]
  alignas(64) float acc[kQueries * kMaxDim];          // [query][dim]
  alignas(64) float sum[kQueries][kBlock];
  float top[kQueries];
};

// 16 keys as [pair of dims][key], in the order of their positions.
void transpose_keys(const uint16_t* keys, int64_t stride, int64_t dim, int32_t* block) {
  const int32_t* rows = reinterpret_cast<const int32_t*>(keys);
  for (int64_t d = 0; d < dim / 2; d += 16) transpose16(rows + d, stride / 2, block + d * kBlock);
}

// Scale what a query has summed up so that `highest` is the new reference of its weights.
void raise_top(State& state, int q, int64_t dim, float highest) {
  const float shrink = exp_one(state.top[q] - highest);
  const __m512 factor = _mm512_set1_ps(shrink);
  float* acc = state.acc + q * dim;
  for (int64_t d = 0; d < dim; d += 16) _mm512_store_ps(acc + d, _mm512_mul_ps(_mm512_load_ps(acc + d), factor));
  _mm512_store_ps(state.sum[q], _mm512_mul_ps(_mm512_load_ps(state.sum[q]), factor));
  state.top[q] = highest;
}

// Which of 16 keys a query may see whose position is `newest` places behind the first of them.
__mmask16 visible(int64_t newest, int64_t window) {
  const int64_t unseen = window ? newest - window + 1 : 0;  // keys too old
  if (newest < 0 || unseen >= kBlock) return 0;
  uint32_t seen = newest >= kBlock - 1 ? 0xffff : (2u << newest) - 1;
  return unseen > 0 ? seen >> unseen << unseen : seen;
}

// Take 16 keys that begin at position `key` into the softmax of the queries q0 .. q0 + R - 1.
template <int R>
void absorb(const Layer& layer, const Queries& queries, State& state, int q0, int64_t key, const int32_t* block,
            const uint16_t* values, int64_t stride) {
  alignas(64) uint16_t weights[R][kBlock];
  const int64_t dim = layer.dim;
  __m512 even[R], odd[R];
  for (int r = 0; r < R; ++r) even[r] = odd[r] = _mm512_setzero_ps();
  const int32_t* pairs = state.pairs + q0;
  for (int64_t d = 0; d < dim / 2; d += 2, pairs += 2 * kQueries) {
    const __m512bh k0 = (__m512bh)_mm512_load_si512(block + d * kBlock);
    const __m512bh k1 = (__m512bh)_mm512_load_si512(block + (d + 1) * kBlock);
    for (int r = 0; r < R; ++r) {
      even[r] = _mm512_dpbf16_ps(even[r], k0, (__m512bh)_mm512_set1_epi32(pairs[r]));
      odd[r] = _mm512_dpbf16_ps(odd[r], k1, (__m512bh)_mm512_set1_epi32(pairs[kQueries + r]));
    }
  }
  for (int r = 0; r < R; ++r) {
    const int q = q0 + r;
    __m512 scores = _mm512_mul_ps(_mm512_add_ps(even[r], odd[r]), _mm512_set1_ps(layer.scaling));
    if (layer.cap > 0) scores = capped(scores, layer.cap);
    const __mmask16 seen = visible(queries.position[q] - key, layer.window);
    scores = _mm512_mask_blend_ps(seen, _mm512_set1_ps(kHidden), scores);
    if (_mm512_cmp_ps_mask(scores, _mm512_set1_ps(state.top[q]), _CMP_GT_OQ))
      raise_top(state, q, dim, _mm512_reduce_max_ps(scores));
    const __m512 weight = _mm512_maskz_mov_ps(seen, exp_of(_mm512_sub_ps(scores, _mm512_set1_ps(state.top[q]))));
    _mm512_store_ps(state.sum[q], _mm512_add_ps(_mm512_load_ps(state.sum[q]), weight));
    _mm256_store_si256(reinterpret_cast<__m256i*>(weights[r]), (__m256i)_mm512_cvtneps_pbh(weight));
  }
  float* acc = state.acc + q0 * dim;
  for (int64_t d = 0; d < dim; d += 32) {
    __m512 low[R], high[R];
    for (int r = 0; r < R; ++r) {
      low[r] = _mm512_load_ps(acc + r * dim + d);
      high[r] = _mm512_load_ps(acc + r * dim + d + 16);
    }
    for (int j = 0; j < kBlock; j += 2) {
      const __m512i v0 = _mm512_loadu_si512(values + j * stride + d);
      const __m512i v1 = _mm512_loadu_si512(values + (j + 1) * stride + d);
      const __m512bh lo = (__m512bh)_mm512_unpacklo_epi16(v0, v1), hi = (__m512bh)_mm512_unpackhi_epi16(v0, v1);
      for (int r = 0; r < R; ++r) {
        int32_t pair;
        __builtin_memcpy(&pair, weights[r] + j, sizeof pair);
        const __m512bh w = (__m512bh)_mm512_set1_epi32(pair);
        low[r] = _mm512_dpbf16_ps(low[r], lo, w);
        high[r] = _mm512_dpbf16_ps(high[r], hi, w);
      }
    }
    for (int r = 0; r < R; ++r) {
      _mm512_store_ps(acc + r * dim + d, low[r]);
      _mm512_store_ps(acc + r * dim + d + 16, high[r]);
    }
  }
}

using Absorb = void (*)(const Layer&, const Queries&, State&, int, int64_t, const int32_t*, const uint16_t*, int64_t);
constexpr Absorb kAbsorb[kTile + 1] = {nullptr,   absorb<1>, absorb<2>, absorb<3>,  absorb<4>,  absorb<5>, absorb<6>,
                                       absorb<7>, absorb<8>, absorb<9>, absorb<10>, absorb<11>, absorb<12>};

// The blocks from `first` to the query's own position, gathered along its path.
void absorb_path(const Layer& layer, const Queries& queries, State& state, int q, int64_t first, const uint16_t* keys,
                 const uint16_t* values) {
  alignas(64) uint16_t near_keys[kBlock][kMaxDim], near_values[kBlock][kMaxDim];
  alignas(64) int32_t block[kMaxDim / 2 * kBlock];
  for (int64_t key = first; key <= queries.position[q]; key += kBlock) {
    for (int j = 0; j < kBlock; ++j) {
      int64_t place = std::min(key + j, queries.position[q]);
      if (place >= queries.tree_start) place = queries.path[q][place - queries.tree_start];
      std::copy_n(keys + place * layer.key_stride, layer.dim, near_keys[j]);
      std::copy_n(values + place * layer.key_stride, layer.dim, near_values[j]);
    }
    transpose_keys(near_keys[0], kMaxDim, layer.dim, block);
    absorb<1>(layer, queries, state, q, key, block, near_values[0], kMaxDim);
  }
}

// Read some keys and values for nothing. No sum waits for these reads, so the processor has many of them under way;
// those of a block of keys come one after the other, each as long as memory takes.
void fetch(const uint16_t* keys, const uint16_t* values, int64_t from, int64_t to, int64_t stride, int64_t dim) {
  uint32_t seen = 0;
  for (int64_t key = from; key < to; ++key)
    for (int64_t d = 0; d < dim; d += 32) seen += keys[key * stride + d] + values[key * stride + d];
  volatile uint32_t kept = seen;
  (void)kept;
}

void attend(const Layer& layer, const Queries& queries, const uint16_t* keys, const uint16_t* values) {
  alignas(64) int32_t block[kMaxDim / 2 * kBlock];
  State state;
  const int count = queries.count;
  const int64_t dim = layer.dim, stride = layer.key_stride;
  int64_t first = queries.position[0], last = queries.position[0];
  for (int q = 0; q < count; ++q) {
    const int32_t* query = reinterpret_cast<const int32_t*>(queries.query[q]);
    for (int64_t d = 0; d < dim / 2; ++d) state.pairs[d * kQueries + q] = query[d];
    state.top[q] = kHidden;
    _mm512_store_ps(state.sum[q], _mm512_setzero_ps());
    first = std::min(first, queries.position[q]);
    last = std::max(last, queries.position[q]);
  }
  std::fill(state.acc, state.acc + count * dim, 0.0f);
  first = layer.window ? std::max<int64_t>(0, first - layer.window + 1) / kBlock * kBlock : 0;
  const int64_t shared = last < queries.tree_start ? last + 1 : queries.tree_start / kBlock * kBlock;
  for (int64_t key = first; key < shared; key += kBlock) {
    if ((key - first) % kAhead == 0) fetch(keys, values, key, std::min(key + kAhead, shared), stride, dim);
    transpose_keys(keys + key * stride, stride, dim, block);
    for (int q = 0; q < count; q += kTile)
      kAbsorb[std::min(kTile, count - q)](layer, queries, state, q, key, block, values + key * stride, stride);
  }
  if (last >= queries.tree_start)
    for (int q = 0; q < count; ++q) absorb_path(layer, queries, state, q, std::max(first, shared), keys, values);
  // low and high hold, for each 8 dims, the first and the last four: put them in order again
  const __m512i order0 = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i order1 = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int q = 0; q < count; ++q) {
    const float sum = _mm512_reduce_add_ps(_mm512_load_ps(state.sum[q]));
    float scale = 1.0f / sum;
    if (layer.sinks) {
      const float highest = std::max(state.top[q], queries.sink[q]);
      const float shrink = exp_one(state.top[q] - highest);
      scale = shrink / (sum * shrink + exp_one(queries.sink[q] - highest));
    }
    const __m512 factor = _mm512_set1_ps(scale);
    const float* acc = state.acc + q * dim;
    for (int64_t d = 0; d < dim; d += 32) {
      const __m512 low = _mm512_mul_ps(_mm512_load_ps(acc + d), factor);
      const __m512 high = _mm512_mul_ps(_mm512_load_ps(acc + d + 16), factor);
      const __m512 a = _mm512_permutex2var_ps(low, order0, high), b = _mm512_permutex2var_ps(low, order1, high);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(queries.out[q] + d), (__m256i)_mm512_cvtneps_pbh(a));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(queries.out[q] + d + 16), (__m256i)_mm512_cvtneps_pbh(b));
    }
  }
}

int64_t part_size(int64_t count) { return count < kMany ? kTile : kQueries; }
int64_t num_parts(int64_t count) { return (count + part_size(count) - 1) / part_size(count); }

}  // namespace

namespace foredraft {

// rows: [num_rows][6] = first token, number of tokens, slot, place of the first token, first position of the tree,
// where its paths begin in `paths` (one of path_width places a node), or -1 for a chain. Strides are in elements,
// from token to token and from slot to slot. `out` is contiguous; sinks may be null, window and cap 0.
void attention(const Attention& layer) {
  const int64_t group = layer.query_heads / layer.kv_heads;
  const auto num_items = [&](int64_t r) { return layer.kv_heads * num_parts(layer.rows[6 * r + 1] * group); };
  int64_t items = 0, r = 0, before = 0;  // a thread gets its items in ascending order: `before` those of rows before r
  for (int64_t i = 0; i < layer.num_rows; ++i) items += num_items(i);
#pragma omp for schedule(monotonic : dynamic, 1) nowait
  for (int64_t item = 0; item < items; ++item) {
    while (item - before >= num_items(r)) before += num_items(r++);
    const int64_t *row = layer.rows + 6 * r, count = row[1] * group, parts = num_parts(count), most = part_size(count);
    const int64_t head = (item - before) / parts, begin = (item - before) % parts * most;
    const bool is_tree = row[5] >= 0;
    const int64_t num_pending = row[4] - row[3];
    Queries queries;
    queries.count = (int)std::min(most, count - begin);
    queries.tree_start = is_tree ? row[4] : INT64_MAX;
    for (int q = 0; q < queries.count; ++q) {
      const int64_t token = (begin + q) / group, query_head = head * group + (begin + q) % group, at = row[0] + token;
      queries.query[q] = layer.query + at * layer.query_stride + query_head * layer.dim;
      queries.out[q] = layer.out + (at * layer.query_heads + query_head) * layer.dim;
      queries.position[q] = is_tree ? layer.positions[at] : row[3] + token;
      queries.path[q] =
          is_tree && token >= num_pending ? layer.paths + (row[5] + token - num_pending) * layer.path_width : nullptr;
      queries.sink[q] = layer.sinks ? layer.sinks[query_head] : 0;
    }
    const int64_t at = row[2] * layer.slot_stride + head * layer.dim;
    attend(layer, queries, layer.keys + at, layer.values + at);
  }
}

}  // namespace foredraft

extern "C" void foredraft_attention_bf16(const uint16_t* query, const uint16_t* keys, const uint16_t* values,
                                         uint16_t* out, const int64_t* rows, const int64_t* positions,
                                         const int64_t* paths, const float* sinks, int64_t num_rows,
                                         int64_t path_width, int64_t query_stride, int64_t slot_stride,
                                         int64_t query_heads, int64_t kv_heads, int64_t dim, int64_t window,
                                         float scaling, float cap, int threads) {
#pragma omp parallel num_threads(threads)
  foredraft::attention({query, keys, values, out, rows, positions, paths, sinks, num_rows, path_width, query_stride,
                        kv_heads * dim, slot_stride, query_heads, kv_heads, dim, window, scaling, cap});
}
