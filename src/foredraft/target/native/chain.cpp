// Chains of draft tokens by a head of EAGLE-3's kind, the likeliest token at each place: all places in one call.
//
//   both = norm(embedding of the last token) | norm(state)
//   state = layer(state, both)        logits = lm_head(norm(state))        token = argmax, the lowest of equals
//
// The steps are the kernels that the head's modules call, so the bits are theirs.
#include <cstring>
#include <omp.h>

#include "kernels.h"
#include "team.h"

namespace {

struct Head {  // of ``heads/native_chain.py``
  foredraft::Layer layer;
  const uint16_t *embeddings, *cos, *sin;  // [vocabulary, hidden], [positions, dim] each
  const float *token_norm, *state_norm, *last_norm;
  const uint16_t* lm_head;
  const float* lm_head_bias;
  const int64_t* token_ids;  // the target's token of each id that the head drafts
  int64_t draft_vocab, norms_residual, norms_output;
  float token_eps, state_eps, last_eps;
};

int64_t argmax(const uint16_t* logits, int64_t count) {
  int64_t best = 0;
  float top = -__builtin_inff();
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = uint32_t(logits[i]) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    if (value > top) top = value, best = i;
  }
  return best;
}

}  // namespace

// tokens: [num_steps + 1, B], the first row given; states: [B, hidden], those behind it, then the last ones; rows,
// positions, write_index: of the first place, moved on; work: B times (3 width + 4 hidden + 2 dim + draft_vocab).
extern "C" void foredraft_chain_bf16(const Head* head, int64_t* tokens, uint16_t* states, int64_t* rows,
                                     int64_t* positions, int64_t* write_index, uint16_t* work, uint16_t* const* keys,
                                     uint16_t* const* values, int64_t B, int64_t num_steps, int64_t width,
                                     int64_t capacity, int threads) {
  using namespace foredraft;
  const int64_t hidden = head->layer.hidden, dim = head->layer.dim, vocab = head->draft_vocab;
  uint16_t *x = work + 3 * B * width, *both = x + B * hidden, *normed = both + 2 * B * hidden;
  uint16_t *cos = normed + B * hidden, *sin = cos + B * dim, *logits = sin + B * dim;
  Barrier barrier;
#pragma omp parallel num_threads(threads)
  {
    const int team = omp_get_num_threads();
    for (int64_t step = 0; step < num_steps; ++step) {
      const int64_t* last = tokens + step * B;
#pragma omp for schedule(static) nowait
      for (int64_t b = 0; b < B; ++b) {
        uint16_t *token = both + 2 * b * hidden, *state = token + hidden;
        norm_row(head->embeddings + last[b] * hidden, head->token_norm, token, hidden, head->token_eps);
        norm_row(states + b * hidden, head->state_norm, state, hidden, head->state_eps);
        std::memcpy(x + b * hidden, head->norms_residual ? state : states + b * hidden, hidden * sizeof *x);
        std::memcpy(cos + b * dim, head->cos + positions[b] * dim, dim * sizeof *cos);
        std::memcpy(sin + b * dim, head->sin + positions[b] * dim, dim * sizeof *sin);
      }
      barrier.wait(team);
      run_layers({&head->layer, 1, x, both, work, cos, sin, write_index, keys, values, rows, positions, nullptr, B,
                  width, B, 0, capacity},
                 barrier);
      rms_norm(x, head->last_norm, normed, B, hidden, hidden, head->last_eps);
      barrier.wait(team);
      product(normed, head->lm_head, head->lm_head_bias, logits, B, vocab, hidden, hidden, false);
      barrier.wait(team);
#pragma omp for schedule(static) nowait
      for (int64_t b = 0; b < B; ++b) {
        tokens[(step + 1) * B + b] = head->token_ids[argmax(logits + b * vocab, vocab)];
        std::memcpy(states + b * hidden, (head->norms_output ? normed : x) + b * hidden, hidden * sizeof *x);
        ++positions[b], ++write_index[b], ++rows[6 * b + 3];
      }
      barrier.wait(team);
    }
  }
}
