// The kernels as a team of threads runs them together: every thread of the team makes the same call, the work is split
// among them, and none waits at the end. What the arguments mean stands where a kernel is defined.
#pragma once
#include <cstdint>

namespace foredraft {

struct Attention {
  const uint16_t *query, *keys, *values;
  uint16_t* out;
  const int64_t *rows, *positions, *paths;
  const float* sinks;
  int64_t num_rows, path_width, query_stride, key_stride, slot_stride;
  int64_t query_heads, kv_heads, dim, window;
  float scaling, cap;
};

struct HeadNorms {  // of queries and keys, before they are rotated; null for none
  const float *query, *key;
  float eps;
};

void attention(const Attention& call);

void product(const uint16_t* x, const uint16_t* w, const float* bias, uint16_t* y, int64_t M, int64_t N, int64_t K,
             int64_t ldx, bool add);

// One row, by the thread that calls it.
void norm_row(const uint16_t* x, const float* weight, uint16_t* y, int64_t K, float eps);

void rms_norm(const uint16_t* x, const float* weight, uint16_t* y, int64_t M, int64_t K, int64_t ldx, float eps);

void silu_mul(const uint16_t* x, uint16_t* y, int64_t M, int64_t K);

void rotate_store(const uint16_t* qkv, const uint16_t* cos, const uint16_t* sin, const HeadNorms& norms,
                  const int64_t* write_index, uint16_t* query, uint16_t* keys, uint16_t* values, int64_t T,
                  int64_t query_heads, int64_t kv_heads, int64_t dim);

}  // namespace foredraft
