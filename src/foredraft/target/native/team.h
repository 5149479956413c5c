// Several kernels one behind the other by one team of threads, which wait for each other in between.
#pragma once
#include <atomic>
#include <cstdint>
#include <immintrin.h>
#include <sched.h>

namespace foredraft {

constexpr int kSpins = 1000;  // looks at the barrier before the core is offered to others

class Barrier {
 public:
  void wait(int team) {
    if (team == 1) return;
    const int round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == team - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int looks = 0; round_.load(std::memory_order_acquire) == round; ++looks)
      looks < kSpins ? _mm_pause() : (void)sched_yield();
  }

 private:
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> round_{0};
};

struct Layer {  // one of ``layers.py``; weights packed as for ``product``
  const float* input_norm;
  const uint16_t* qkv;
  const float *qkv_bias, *q_norm, *k_norm;
  const uint16_t* out;
  const float *out_bias, *post_norm;
  const uint16_t* gate_up;
  const float* gate_up_bias;
  const uint16_t* down;
  const float* down_bias;
  int64_t index, inputs, hidden, query_heads, kv_heads, dim, inner, window, rotary;
  float input_eps, head_eps, post_eps, scaling;
};

// x: [T, hidden], changed in place; given: [T, inputs], what the first layer's attention reads, or null for the norm of
// x; work: three times [T, width], width the most numbers that a token has anywhere; keys, values: of every layer of
// the cache, found by index; the rest as for the kernels. noted: ascending, how many of the layers have run where x is to be
// copied; states: [T, num_noted, hidden], the copies.
struct LayersPass {
  const Layer* layers;
  int64_t num_layers;
  uint16_t* x;
  const uint16_t* given;
  uint16_t* work;
  const uint16_t *cos, *sin;
  const int64_t* write_index;
  uint16_t* const* keys;
  uint16_t* const* values;
  const int64_t *rows, *positions, *paths;
  int64_t T, width, num_rows, path_width, capacity;
  const int64_t* noted;
  uint16_t* states;
  int64_t num_noted;
};

// By every thread of a team; all are done when it returns.
void run_layers(const LayersPass& pass, Barrier& barrier);

}  // namespace foredraft
