// The small operations between products, each over whole rows in float32 and rounded once. A row's bits depend on
// that row alone.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

#include "exp.h"

namespace {

constexpr int64_t kParallel = 16;  // rows from which a second thread pays

__m512 load(const uint16_t* x, __mmask16 lanes = 0xffff) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, x)), 16));
}

void store(uint16_t* y, __m512 x, __mmask16 lanes = 0xffff) {
  _mm256_mask_storeu_epi16(y, lanes, (__m256i)_mm512_cvtneps_pbh(x));
}

__mmask16 lanes(int64_t left) { return left >= 16 ? 0xffff : (1u << left) - 1; }

}  // namespace

// y = x / sqrt(mean(x^2) + eps) * weight; x: [M, K] with row stride ldx, y contiguous.
extern "C" void foredraft_rms_norm_bf16(const uint16_t* x, const float* weight, uint16_t* y, int64_t M, int64_t K,
                                        int64_t ldx, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (M >= kParallel)
  for (int64_t m = 0; m < M; ++m) {
    const uint16_t* row = x + m * ldx;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t k = 0; k < K; k += 16) {
      const __m512 v = load(row + k, lanes(K - k));
      sum = _mm512_fmadd_ps(v, v, sum);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / K + eps));
    for (int64_t k = 0; k < K; k += 16) {
      const __mmask16 some = lanes(K - k);
      const __m512 v = _mm512_mul_ps(load(row + k, some), scale);
      store(y + m * K + k, _mm512_mul_ps(v, _mm512_maskz_loadu_ps(some, weight + k)), some);
    }
  }
}

// y = silu(x[:, :K]) * x[:, K:]; x: [M, 2 K], y: [M, K], both contiguous.
extern "C" void foredraft_silu_mul_bf16(const uint16_t* x, uint16_t* y, int64_t M, int64_t K, int threads) {
  const __m512 one = _mm512_set1_ps(1.0f);
#pragma omp parallel for num_threads(threads) schedule(static) if (M >= kParallel)
  for (int64_t m = 0; m < M; ++m) {
    const uint16_t *gate = x + m * 2 * K, *up = gate + K;
    for (int64_t k = 0; k < K; k += 16) {
      const __mmask16 some = lanes(K - k);
      const __m512 g = load(gate + k, some);
      const __m512 e = exp_of(_mm512_sub_ps(_mm512_setzero_ps(), g));
      store(y + m * K + k, _mm512_mul_ps(_mm512_div_ps(g, _mm512_add_ps(one, e)), load(up + k, some)), some);
    }
  }
}

// Rotate queries and keys by their positions (RoFormer) and store keys and values in the cache.
//   qkv: [T, (query_heads + 2 kv_heads) * dim]   cos, sin: [T, dim], or null for no rotation
//   query: [T, query_heads * dim]   keys, values: cache rows of kv_heads * dim at write_index[t]
extern "C" void foredraft_rotate_store_bf16(const uint16_t* qkv, const uint16_t* cos, const uint16_t* sin,
                                            const int64_t* write_index, uint16_t* query, uint16_t* keys,
                                            uint16_t* values, int64_t T, int64_t query_heads, int64_t kv_heads,
                                            int64_t dim, int threads) {
  const int64_t width = (query_heads + 2 * kv_heads) * dim, half = dim / 2;
#pragma omp parallel for num_threads(threads) schedule(static) if (T >= kParallel)
  for (int64_t t = 0; t < T; ++t) {
    const uint16_t* row = qkv + t * width;
    for (int64_t h = 0; h < query_heads + kv_heads; ++h) {
      const uint16_t* in = row + h * dim;
      uint16_t* out = h < query_heads ? query + (t * query_heads + h) * dim
                                      : keys + (write_index[t] * kv_heads + h - query_heads) * dim;
      if (!cos) {
        std::memcpy(out, in, dim * sizeof *in);
        continue;
      }
      for (int64_t d = 0; d < half; d += 16) {
        const __m512 left = load(in + d), right = load(in + half + d);
        const uint16_t *c = cos + t * dim + d, *s = sin + t * dim + d;
        store(out + d, _mm512_fnmadd_ps(right, load(s), _mm512_mul_ps(left, load(c))));
        store(out + half + d, _mm512_fmadd_ps(left, load(s + half), _mm512_mul_ps(right, load(c + half))));
      }
    }
    std::memcpy(values + write_index[t] * kv_heads * dim, row + (query_heads + kv_heads) * dim,
                kv_heads * dim * sizeof *row);
  }
}
