// Decoder layers of the Llama kind, one behind the other, by one team of threads.
//
//   x += out(attend(rotate(qkv(norm(x)))))        x += down(silu(gate) * up), gate and up of norm(x)
//
// The steps are the kernels that also run alone, in the same order and with the same roundings, so the bits are those
// of the layers called step by step.
#include <cstring>
#include <omp.h>

#include "kernels.h"
#include "team.h"

namespace foredraft {

void run_layers(const LayersPass& p, Barrier& barrier) {
  const int64_t T = p.T;
  uint16_t *a = p.work, *b = a + T * p.width, *c = b + T * p.width;
  const int team = omp_get_num_threads();
  int64_t next = 0;
  for (const Layer* l = p.layers; l < p.layers + p.num_layers; ++l) {
    const int64_t heads_width = l->query_heads * l->dim, kv_width = l->kv_heads * l->dim;
    const bool is_given = p.given && l == p.layers;
    if (!is_given) {
      rms_norm(p.x, l->input_norm, a, T, l->hidden, l->hidden, l->input_eps);
      barrier.wait(team);
    }
    const uint16_t* read = is_given ? p.given : a;
    product(read, l->qkv, l->qkv_bias, b, T, heads_width + 2 * kv_width, l->inputs, l->inputs, false);
    barrier.wait(team);
    rotate_store(b, l->rotary ? p.cos : nullptr, p.sin, {l->q_norm, l->k_norm, l->head_eps}, p.write_index, c,
                 p.keys[l->index], p.values[l->index], T, l->query_heads, l->kv_heads, l->dim);
    barrier.wait(team);
    attention({c, p.keys[l->index], p.values[l->index], a, p.rows, p.positions, p.paths, nullptr, p.num_rows,
               p.path_width, heads_width, kv_width, p.capacity * kv_width, l->query_heads, l->kv_heads, l->dim,
               l->window, l->scaling, 0});
    barrier.wait(team);
    product(a, l->out, l->out_bias, p.x, T, l->hidden, heads_width, heads_width, true);
    barrier.wait(team);
    rms_norm(p.x, l->post_norm, a, T, l->hidden, l->hidden, l->post_eps);
    barrier.wait(team);
    product(a, l->gate_up, l->gate_up_bias, b, T, 2 * l->inner, l->hidden, l->hidden, false);
    barrier.wait(team);
    silu_mul(b, c, T, l->inner);
    barrier.wait(team);
    product(c, l->down, l->down_bias, p.x, T, l->hidden, l->inner, l->inner, true);
    barrier.wait(team);
    if (next < p.num_noted && p.noted[next] == l - p.layers + 1) {
#pragma omp for schedule(static) nowait
      for (int64_t t = 0; t < T; ++t)
        std::memcpy(p.states + (t * p.num_noted + next) * l->hidden, p.x + t * l->hidden, l->hidden * sizeof *p.x);
      barrier.wait(team);
      ++next;
    }
  }
}

}  // namespace foredraft

extern "C" void foredraft_layers_bf16(const foredraft::Layer* layers, uint16_t* x, const uint16_t* given,
                                      uint16_t* work, const uint16_t* cos, const uint16_t* sin,
                                      const int64_t* write_index, uint16_t* const* keys, uint16_t* const* values,
                                      const int64_t* rows, const int64_t* positions, const int64_t* paths,
                                      const int64_t* noted, uint16_t* states, int64_t num_layers, int64_t T,
                                      int64_t width, int64_t num_rows, int64_t path_width, int64_t capacity,
                                      int64_t num_noted, int threads) {
  foredraft::Barrier barrier;
#pragma omp parallel num_threads(threads)
  foredraft::run_layers({layers, num_layers, x, given, work, cos, sin, write_index, keys, values, rows, positions,
                         paths, T, width, num_rows, path_width, capacity, noted, states, num_noted},
                        barrier);
}
