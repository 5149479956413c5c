// The small operations between products, each over whole rows in float32 and rounded once. A row's bits depend on
// that row alone.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <immintrin.h>

#include "exp.h"
#include "kernels.h"

namespace {

constexpr int64_t kParallel = 16;  // rows from which a second thread pays, where it has to be woken first
constexpr int64_t kPart = 512;     // numbers of a row that one thread takes at once
constexpr int64_t kMaxDim = 256;

__m512 load(const uint16_t* x, __mmask16 lanes = 0xffff) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, x)), 16));
}

void store(uint16_t* y, __m512 x, __mmask16 lanes = 0xffff) {
  _mm256_mask_storeu_epi16(y, lanes, (__m256i)_mm512_cvtneps_pbh(x));
}

__mmask16 lanes(int64_t left) { return left >= 16 ? 0xffff : (1u << left) - 1; }

void rotate(const uint16_t* in, const uint16_t* cos, const uint16_t* sin, uint16_t* out, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t d = 0; d < half; d += 16) {
    const __m512 left = load(in + d), right = load(in + half + d);
    const uint16_t *c = cos + d, *s = sin + d;
    store(out + d, _mm512_fnmadd_ps(right, load(s), _mm512_mul_ps(left, load(c))));
    store(out + half + d, _mm512_fmadd_ps(left, load(s + half), _mm512_mul_ps(right, load(c + half))));
  }
}

}  // namespace

namespace foredraft {

void norm_row(const uint16_t* x, const float* weight, uint16_t* y, int64_t K, float eps) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t k = 0; k < K; k += 16) {
    const __m512 v = load(x + k, lanes(K - k));
    sum = _mm512_fmadd_ps(v, v, sum);
  }
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / K + eps));
  for (int64_t k = 0; k < K; k += 16) {
    const __mmask16 some = lanes(K - k);
    const __m512 v = _mm512_mul_ps(load(x + k, some), scale);
    store(y + k, _mm512_mul_ps(v, _mm512_maskz_loadu_ps(some, weight + k)), some);
  }
}

// y = x / sqrt(mean(x^2) + eps) * weight; x: [M, K] with row stride ldx, y contiguous.
void rms_norm(const uint16_t* x, const float* weight, uint16_t* y, int64_t M, int64_t K, int64_t ldx, float eps) {
#pragma omp for schedule(static) nowait
  for (int64_t m = 0; m < M; ++m) norm_row(x + m * ldx, weight, y + m * K, K, eps);
}

// y = silu(x[:, :K]) * x[:, K:]; x: [M, 2 K], y: [M, K], both contiguous.
void silu_mul(const uint16_t* x, uint16_t* y, int64_t M, int64_t K) {
  const __m512 one = _mm512_set1_ps(1.0f);
#pragma omp for collapse(2) schedule(static) nowait
  for (int64_t m = 0; m < M; ++m)
    for (int64_t part = 0; part < K; part += kPart) {
      const uint16_t *gate = x + m * 2 * K, *up = gate + K;
      for (int64_t k = part; k < std::min(K, part + kPart); k += 16) {
        const __mmask16 some = lanes(K - k);
        const __m512 g = load(gate + k, some);
        const __m512 e = exp_of(_mm512_sub_ps(_mm512_setzero_ps(), g));
        store(y + m * K + k, _mm512_mul_ps(_mm512_div_ps(g, _mm512_add_ps(one, e)), load(up + k, some)), some);
      }
    }
}

// Norm queries and keys head by head, rotate them by their positions (RoFormer), store keys and values in the cache.
//   qkv: [T, (query_heads + 2 kv_heads) * dim]   cos, sin: [T, dim], or null for no rotation
//   query: [T, query_heads * dim]   keys, values: cache rows of kv_heads * dim at write_index[t]
void rotate_store(const uint16_t* qkv, const uint16_t* cos, const uint16_t* sin, const HeadNorms& norms,
                  const int64_t* write_index, uint16_t* query, uint16_t* keys, uint16_t* values, int64_t T,
                  int64_t query_heads, int64_t kv_heads, int64_t dim) {
  const int64_t rotated = query_heads + kv_heads, all = rotated + kv_heads;
#pragma omp for collapse(2) schedule(static) nowait
  for (int64_t t = 0; t < T; ++t)
    for (int64_t h = 0; h < all; ++h) {
      const uint16_t* in = qkv + (t * all + h) * dim;
      if (h >= rotated) {
        std::memcpy(values + (write_index[t] * kv_heads + h - rotated) * dim, in, dim * sizeof *in);
        continue;
      }
      const bool is_query = h < query_heads;
      const float* weight = is_query ? norms.query : norms.key;
      uint16_t normed[kMaxDim];
      if (weight) {
        norm_row(in, weight, normed, dim, norms.eps);
        in = normed;
      }
      uint16_t* out = is_query ? query + (t * query_heads + h) * dim
                               : keys + (write_index[t] * kv_heads + h - query_heads) * dim;
      if (cos)
        rotate(in, cos + t * dim, sin + t * dim, out, dim);
      else
        std::memcpy(out, in, dim * sizeof *in);
    }
}

}  // namespace foredraft

extern "C" void foredraft_rms_norm_bf16(const uint16_t* x, const float* weight, uint16_t* y, int64_t M, int64_t K,
                                        int64_t ldx, float eps, int threads) {
#pragma omp parallel num_threads(threads) if (M >= kParallel)
  foredraft::rms_norm(x, weight, y, M, K, ldx, eps);
}

extern "C" void foredraft_silu_mul_bf16(const uint16_t* x, uint16_t* y, int64_t M, int64_t K, int threads) {
#pragma omp parallel num_threads(threads) if (M >= kParallel)
  foredraft::silu_mul(x, y, M, K);
}

extern "C" void foredraft_rotate_store_bf16(const uint16_t* qkv, const uint16_t* cos, const uint16_t* sin,
                                            const float* q_norm, const float* k_norm, const int64_t* write_index,
                                            uint16_t* query, uint16_t* keys, uint16_t* values, int64_t T,
                                            int64_t query_heads, int64_t kv_heads, int64_t dim, float eps,
                                            int threads) {
#pragma omp parallel num_threads(threads) if (T >= kParallel)
  foredraft::rotate_store(qkv, cos, sin, {q_norm, k_norm, eps}, write_index, query, keys, values, T, query_heads,
                          kv_heads, dim);
}
