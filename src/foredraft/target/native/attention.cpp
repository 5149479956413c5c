// Causal attention over KV slots in bf16, for rows of any length and any number of queries, on AVX512-BF16.
//
// A query's softmax runs over its own keys in blocks of 16 that start at multiples of 16; keys that it may not
// see add exact zeros. So its bits depend neither on the other queries of the pass nor on how much is cached.
//
//   keys, values: [slot][capacity][kv head][dim]    queries that share a kv head are handled together
#include <algorithm>
#include <cstdint>
#include <immintrin.h>
#include <vector>

#include "exp.h"

namespace {

constexpr int kTile = 6;     // queries handled at once
constexpr int kBlock = 16;   // keys handled at once: one vector of scores
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

struct Layer {
  const uint16_t *query, *keys, *values;
  uint16_t* out;
  int64_t query_stride, key_stride, slot_stride;  // elements from token to token, and from slot to slot
  int64_t query_heads, kv_heads, dim, window;
  float scaling, cap;
  const float* sinks;
};

struct Tile {
  const uint16_t* query[kTile];
  uint16_t* out[kTile];
  int64_t position[kTile];
  float sink[kTile];
  int size;
};

template <int R>
void attend(const Layer& layer, const Tile& tile, const uint16_t* keys, const uint16_t* values) {
  alignas(64) float acc[R][kMaxDim];
  alignas(64) int32_t block[kMaxDim / 2 * kBlock];
  alignas(64) uint16_t weights[R][kBlock];
  float top[R], sum[R];
  const int64_t dim = layer.dim, stride = layer.key_stride;
  int64_t first = tile.position[0], last = tile.position[0];
  for (int q = 0; q < R; ++q) {
    std::fill(acc[q], acc[q] + dim, 0.0f);
    top[q] = kHidden;
    sum[q] = 0;
    first = std::min(first, tile.position[q]);
    last = std::max(last, tile.position[q]);
  }
  first = layer.window ? std::max<int64_t>(0, first - layer.window + 1) / kBlock * kBlock : 0;
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int64_t key = first; key <= last; key += kBlock) {
    const int32_t* rows = reinterpret_cast<const int32_t*>(keys + key * stride);
    for (int64_t d = 0; d < dim / 2; d += 16) transpose16(rows + d, stride / 2, block + d * kBlock);
    for (int q = 0; q < R; ++q) {
      __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
      const int32_t* query = reinterpret_cast<const int32_t*>(tile.query[q]);
      for (int64_t d = 0; d < dim / 2; d += 2) {
        even = _mm512_dpbf16_ps(even, (__m512bh)_mm512_load_si512(block + d * kBlock), (__m512bh)_mm512_set1_epi32(query[d]));
        odd = _mm512_dpbf16_ps(odd, (__m512bh)_mm512_load_si512(block + (d + 1) * kBlock), (__m512bh)_mm512_set1_epi32(query[d + 1]));
      }
      __m512 scores = _mm512_mul_ps(_mm512_add_ps(even, odd), _mm512_set1_ps(layer.scaling));
      if (layer.cap > 0) scores = capped(scores, layer.cap);
      const int64_t newest = tile.position[q] - key, oldest = layer.window ? newest - layer.window : -1;
      __mmask16 seen = _mm512_cmple_epi32_mask(lane, _mm512_set1_epi32((int)std::clamp<int64_t>(newest, -1, kBlock)));
      seen &= _mm512_cmpgt_epi32_mask(lane, _mm512_set1_epi32((int)std::clamp<int64_t>(oldest, -1, kBlock)));
      scores = _mm512_mask_blend_ps(seen, _mm512_set1_ps(kHidden), scores);
      const float highest = std::max(top[q], _mm512_reduce_max_ps(scores));
      if (highest > top[q]) {
        const float shrink = exp_one(top[q] - highest);
        const __m512 factor = _mm512_set1_ps(shrink);
        for (int64_t d = 0; d < dim; d += 16) _mm512_store_ps(acc[q] + d, _mm512_mul_ps(_mm512_load_ps(acc[q] + d), factor));
        sum[q] *= shrink;
        top[q] = highest;
      }
      const __m512 weight = _mm512_maskz_mov_ps(seen, exp_of(_mm512_sub_ps(scores, _mm512_set1_ps(highest))));
      sum[q] += _mm512_reduce_add_ps(weight);
      _mm256_store_si256(reinterpret_cast<__m256i*>(weights[q]), (__m256i)_mm512_cvtneps_pbh(weight));
    }
    for (int64_t d = 0; d < dim; d += 32) {
      __m512 low[R], high[R];
      for (int q = 0; q < R; ++q) {
        low[q] = _mm512_load_ps(acc[q] + d);
        high[q] = _mm512_load_ps(acc[q] + d + 16);
      }
      for (int j = 0; j < kBlock; j += 2) {
        const __m512i v0 = _mm512_loadu_si512(values + (key + j) * stride + d);
        const __m512i v1 = _mm512_loadu_si512(values + (key + j + 1) * stride + d);
        const __m512bh lo = (__m512bh)_mm512_unpacklo_epi16(v0, v1), hi = (__m512bh)_mm512_unpackhi_epi16(v0, v1);
        for (int q = 0; q < R; ++q) {
          int32_t pair;
          __builtin_memcpy(&pair, weights[q] + j, sizeof pair);
          const __m512bh w = (__m512bh)_mm512_set1_epi32(pair);
          low[q] = _mm512_dpbf16_ps(low[q], lo, w);
          high[q] = _mm512_dpbf16_ps(high[q], hi, w);
        }
      }
      for (int q = 0; q < R; ++q) {
        _mm512_store_ps(acc[q] + d, low[q]);
        _mm512_store_ps(acc[q] + d + 16, high[q]);
      }
    }
  }
  // low and high hold, for each 8 dims, the first and the last four: put them in order again
  const __m512i order0 = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i order1 = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int q = 0; q < R; ++q) {
    float scale = 1.0f / sum[q];
    if (layer.sinks) {
      const float highest = std::max(top[q], tile.sink[q]);
      const float shrink = exp_one(top[q] - highest);
      scale = shrink / (sum[q] * shrink + exp_one(tile.sink[q] - highest));
    }
    const __m512 factor = _mm512_set1_ps(scale);
    for (int64_t d = 0; d < dim; d += 32) {
      const __m512 low = _mm512_mul_ps(_mm512_load_ps(acc[q] + d), factor);
      const __m512 high = _mm512_mul_ps(_mm512_load_ps(acc[q] + d + 16), factor);
      const __m512 a = _mm512_permutex2var_ps(low, order0, high), b = _mm512_permutex2var_ps(low, order1, high);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(tile.out[q] + d), (__m256i)_mm512_cvtneps_pbh(a));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(tile.out[q] + d + 16), (__m256i)_mm512_cvtneps_pbh(b));
    }
  }
}

using Attend = void (*)(const Layer&, const Tile&, const uint16_t*, const uint16_t*);
constexpr Attend kAttend[kTile + 1] = {nullptr,   attend<1>, attend<2>, attend<3>,
                                       attend<4>, attend<5>, attend<6>};

}  // namespace

// rows: [num_rows][4] = first token, number of tokens, slot, position of the first token.
extern "C" void foredraft_attention_bf16(const uint16_t* query, const uint16_t* keys, const uint16_t* values,
                                         uint16_t* out, const int64_t* rows, const float* sinks, int64_t num_rows,
                                         int64_t query_stride, int64_t slot_stride, int64_t query_heads,
                                         int64_t kv_heads, int64_t dim, int64_t window, float scaling, float cap,
                                         int threads) {
  const Layer layer{query,    keys, values,   out, query_stride, kv_heads * dim, slot_stride, query_heads,
                    kv_heads, dim,  window, scaling, cap, sinks};
  const int64_t group = query_heads / kv_heads;
  std::vector<int64_t> first_item(num_rows + 1, 0);
  for (int64_t r = 0; r < num_rows; ++r)
    first_item[r + 1] = first_item[r] + kv_heads * ((rows[4 * r + 1] * group + kTile - 1) / kTile);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t item = 0; item < first_item[num_rows]; ++item) {
    const int64_t r = std::upper_bound(first_item.begin(), first_item.end(), item) - first_item.begin() - 1;
    const int64_t *row = rows + 4 * r, count = row[1] * group, tiles = (count + kTile - 1) / kTile;
    const int64_t head = (item - first_item[r]) / tiles, begin = (item - first_item[r]) % tiles * kTile;
    Tile tile;
    tile.size = (int)std::min<int64_t>(kTile, count - begin);
    for (int q = 0; q < tile.size; ++q) {
      const int64_t token = (begin + q) / group, query_head = head * group + (begin + q) % group;
      tile.query[q] = query + (row[0] + token) * query_stride + query_head * dim;
      tile.out[q] = out + ((row[0] + token) * query_heads + query_head) * dim;
      tile.position[q] = row[3] + token;
      tile.sink[q] = sinks ? sinks[query_head] : 0;
    }
    const int64_t at = row[2] * slot_stride + head * dim;
    kAttend[tile.size](layer, tile, keys + at, values + at);
  }
}
