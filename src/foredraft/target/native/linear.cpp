// y = x W^T + b in bf16 with float32 accumulation, for any number of rows, on AVX512-BF16.
//
// Every output is one chain of vdpbf16ps over k = 0, 2, 4, ... in one vector lane. The chain does not depend on
// the number of rows, the number of threads or the neighbours, so a row's bits never change with the batch.
//
//   packed weights: [N/32][K/2][32][2]   a block of 32 outputs is one contiguous stream
#include <immintrin.h>

#include "kernels.h"

namespace {

constexpr int64_t kBlock = 32;  // outputs of a block: two vectors of 16
constexpr int kRows = 14;       // rows of a tile: 28 accumulators, 2 weight vectors and one of inputs
// Bytes ahead of which weights are fetched: by one row or two, which wait for memory, and by more, which also compute.
constexpr int64_t kAhead = 4096, kAheadOfMany = 6144;

__m512 pair_to_float(const uint16_t* pair) {
  int32_t bits;
  __builtin_memcpy(&bits, pair, sizeof bits);
  return _mm512_castsi512_ps(_mm512_set1_epi32(bits));
}

__m512 widened(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

// y = x, or y += x: the sum of two rounded numbers, rounded again.
void put(uint16_t* y, __m512 x, __mmask16 lanes, bool add) {
  __m256i rounded = (__m256i)_mm512_cvtneps_pbh(x);
  if (add) {
    const __m512 sum = _mm512_add_ps(widened(_mm256_maskz_loadu_epi16(lanes, y)), widened(rounded));
    rounded = (__m256i)_mm512_cvtneps_pbh(sum);
  }
  _mm256_mask_storeu_epi16(y, lanes, rounded);
}

template <int R>
void tile(const uint16_t* x, const uint16_t* w, const float* bias, uint16_t* y, int64_t K, int64_t ldx, int64_t ldy,
          __mmask16 lanes0, __mmask16 lanes1, bool add, int64_t ahead) {
  __m512 acc[R][2];
  for (int r = 0; r < R; ++r) {
    acc[r][0] = _mm512_setzero_ps();
    acc[r][1] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < K; k += 2) {
    const __m512bh w0 = (__m512bh)_mm512_loadu_si512(w);
    const __m512bh w1 = (__m512bh)_mm512_loadu_si512(w + kBlock);
    _mm_prefetch(reinterpret_cast<const char*>(w) + ahead, _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(w) + ahead + 64, _MM_HINT_T1);
    w += 2 * kBlock;
    for (int r = 0; r < R; ++r) {
      const __m512bh xr = (__m512bh)pair_to_float(x + r * ldx + k);
      acc[r][0] = _mm512_dpbf16_ps(acc[r][0], w0, xr);
      acc[r][1] = _mm512_dpbf16_ps(acc[r][1], w1, xr);
    }
  }
  for (int r = 0; r < R; ++r) {
    if (bias) {
      acc[r][0] = _mm512_add_ps(acc[r][0], _mm512_maskz_loadu_ps(lanes0, bias));
      acc[r][1] = _mm512_add_ps(acc[r][1], _mm512_maskz_loadu_ps(lanes1, bias + 16));
    }
    put(y + r * ldy, acc[r][0], lanes0, add);
    put(y + r * ldy + 16, acc[r][1], lanes1, add);
  }
}

using Tile = void (*)(const uint16_t*, const uint16_t*, const float*, uint16_t*, int64_t, int64_t, int64_t, __mmask16,
                      __mmask16, bool, int64_t);
constexpr Tile kTiles[kRows + 1] = {nullptr, tile<1>, tile<2>,  tile<3>,  tile<4>,  tile<5>,  tile<6>, tile<7>,
                                    tile<8>, tile<9>, tile<10>, tile<11>, tile<12>, tile<13>, tile<14>};

__mmask16 lanes(int64_t left) { return left >= 16 ? 0xffff : left <= 0 ? 0 : (1u << left) - 1; }

}  // namespace

namespace foredraft {

// x: [M, K] with row stride ldx; w: packed; bias: [N] float32 or null; y: [M, N] contiguous, added to if `add` says
// so. K is even.
void product(const uint16_t* x, const uint16_t* w, const float* bias, uint16_t* y, int64_t M, int64_t N, int64_t K,
             int64_t ldx, bool add) {
  const int64_t blocks = (N + kBlock - 1) / kBlock, block_bytes = kBlock * K * sizeof *w;
#pragma omp for schedule(static) nowait
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t n = b * kBlock;
    for (int64_t m = 0; m < M;) {
      int64_t rows = M - m;
      if (rows > kRows) rows = rows >= 2 * kRows ? kRows : (rows + 1) / 2;
      // Tiles behind the first find the block in the cache, and fetch the next one.
      kTiles[rows](x + m * ldx, w + b * kBlock * K, bias ? bias + n : nullptr, y + m * N + n, K, ldx, N, lanes(N - n),
                   lanes(N - n - 16), add, m ? block_bytes : M > 2 ? kAheadOfMany : kAhead);
      m += rows;
    }
  }
}

}  // namespace foredraft

extern "C" void foredraft_linear_bf16(const uint16_t* x, const uint16_t* w, const float* bias, uint16_t* y, int64_t M,
                                      int64_t N, int64_t K, int64_t ldx, int threads) {
#pragma omp parallel num_threads(threads)
  foredraft::product(x, w, bias, y, M, N, K, ldx, false);
}
