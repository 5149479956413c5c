// Decoder layers of the Llama kind, one behind the other, by one team of threads.
//
//   x += out(attend(rotate(qkv(norm(x)))))        x += down(silu(gate) * up), gate and up of norm(x)
//
// The steps are the kernels that also run alone, in the same order and with the same roundings, so the bits are those
// of the layers called step by step.
#include <atomic>
#include <immintrin.h>
#include <omp.h>
#include <sched.h>

#include "kernels.h"

namespace {

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

}  // namespace

// x: [T, hidden], changed in place; given: [T, inputs], what the first layer's attention reads, or null for the norm of
// x; work: three times [T, width], width the most numbers that a token has anywhere; keys, values: of every layer of the
// cache, found by index; the rest as for the kernels.
extern "C" void foredraft_layers_bf16(const Layer* layers, uint16_t* x, const uint16_t* given, uint16_t* work,
                                      const uint16_t* cos, const uint16_t* sin, const int64_t* write_index, uint16_t* const* keys,
                                      uint16_t* const* values, const int64_t* rows, const int64_t* positions,
                                      const int64_t* paths, int64_t num_layers, int64_t T, int64_t width,
                                      int64_t num_rows, int64_t path_width, int64_t capacity, int threads) {
  using namespace foredraft;
  uint16_t *a = work, *b = a + T * width, *c = b + T * width;
  Barrier barrier;
#pragma omp parallel num_threads(threads)
  {
    const int team = omp_get_num_threads();
    for (const Layer* l = layers; l < layers + num_layers; ++l) {
      const int64_t heads_width = l->query_heads * l->dim, kv_width = l->kv_heads * l->dim;
      const bool is_given = given && l == layers;
      if (!is_given) {
        rms_norm(x, l->input_norm, a, T, l->hidden, l->hidden, l->input_eps);
        barrier.wait(team);
      }
      product(is_given ? given : a, l->qkv, l->qkv_bias, b, T, heads_width + 2 * kv_width, l->inputs, l->inputs, false);
      barrier.wait(team);
      rotate_store(b, l->rotary ? cos : nullptr, sin, {l->q_norm, l->k_norm, l->head_eps}, write_index, c,
                   keys[l->index], values[l->index], T, l->query_heads, l->kv_heads, l->dim);
      barrier.wait(team);
      attention({c, keys[l->index], values[l->index], a, rows, positions, paths, nullptr, num_rows, path_width,
                 heads_width, kv_width, capacity * kv_width, l->query_heads, l->kv_heads, l->dim, l->window,
                 l->scaling, 0});
      barrier.wait(team);
      product(a, l->out, l->out_bias, x, T, l->hidden, heads_width, heads_width, true);
      barrier.wait(team);
      rms_norm(x, l->post_norm, a, T, l->hidden, l->hidden, l->post_eps);
      barrier.wait(team);
      product(a, l->gate_up, l->gate_up_bias, b, T, 2 * l->inner, l->hidden, l->hidden, false);
      barrier.wait(team);
      silu_mul(b, c, T, l->inner);
      barrier.wait(team);
      product(c, l->down, l->down_bias, x, T, l->hidden, l->inner, l->inner, true);
      barrier.wait(team);
    }
  }
}
