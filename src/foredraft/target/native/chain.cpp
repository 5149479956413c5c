// Chains of draft tokens by a head of EAGLE-3's kind, with other likely tokens beside them: all places in one call.
//
//   both = norm(embedding of the last token) | norm(state)
//   state = layer(state, both)        logits = lm_head(norm(state))        the likeliest tokens, of equals the lowest
//
// The first of them is the next last token. Noise, where there is some, is added to the logits before.
//
// The steps are the kernels that the head's modules call, so the bits are theirs.
#include <cstring>
#include <omp.h>

#include "exp.h"
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

// What the first step reads: T tokens of the text, of B rows, the states beside them, and which of them end the rows.
struct Given {
  const int64_t* tokens;
  const uint16_t* states;  // [T, hidden]
  const int64_t *rows, *positions, *write_index, *ends;
  int64_t T;  // 0: the step is like all others
};

float as_float(uint16_t bf16) {
  const uint32_t bits = uint32_t(bf16) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The logits, times `scale`, with the noise, which may be null.
void scores_of(const uint16_t* logits, int64_t size, float scale, const float* noise, float* scores) {
  for (int64_t i = 0; i < size; ++i) scores[i] = as_float(logits[i]);
  if (noise)
    for (int64_t i = 0; i < size; ++i) scores[i] = scores[i] * scale + noise[i];
}

// The best `count` of the columns, best first, and their scores.
void likeliest(const float* scores, int64_t size, int64_t count, int64_t* best, float* tops) {
  for (int64_t k = 0; k < count; ++k) best[k] = 0, tops[k] = -__builtin_inff();
  for (int64_t i = 0; i < size; ++i) {
    const float value = scores[i];
    if (!(value > tops[count - 1])) continue;
    int64_t k = count - 1;
    for (; k > 0 && value > tops[k - 1]; --k) tops[k] = tops[k - 1], best[k] = best[k - 1];
    tops[k] = value, best[k] = i;
  }
}

// From scores, the first being the highest of all, to their shares of the softmax over `size` columns.
void softmax_shares(const float* scores, int64_t size, int64_t count, float* tops) {
  const float top = tops[0];
  float sum = 0.0f;
  for (int64_t i = 0; i < size; i += 16) {
    const __mmask16 seen = size - i >= 16 ? 0xffff : (1 << (size - i)) - 1;
    const __m512 above = _mm512_sub_ps(_mm512_maskz_loadu_ps(seen, scores + i), _mm512_set1_ps(top));
    sum += _mm512_mask_reduce_add_ps(seen, exp_of(above));
  }
  for (int64_t k = 0; k < count; ++k) tops[k] = _mm512_cvtss_f32(exp_of(_mm512_set1_ps(tops[k] - top))) / sum;
}

}  // namespace

// last: [B], the tokens to begin with, where nothing is given, and then the best of each step; tokens, probs: [num_steps,
// B, num_best], to be filled, probs only where more than one is wanted; scales, noise: [B] and [B, num_steps,
// draft_vocab], or noise null; scores: [B, draft_vocab], to be filled; states: [B, hidden], those behind `last` to begin
// with, then the last ones; rows, positions, write_index: of the first step that reads `last`, moved on; work:
// max(T, B) times (3 width + 4 hidden + 2 dim), and B times (hidden + draft_vocab).
extern "C" void foredraft_chain_bf16(const Head* head, const Given* given, int64_t* last, int64_t* tokens, float* probs,
                                     const float* scales, const float* noise, float* scores, uint16_t* states,
                                     int64_t* rows, int64_t* positions, int64_t* write_index, uint16_t* work,
                                     uint16_t* const* keys, uint16_t* const* values, int64_t B, int64_t num_steps,
                                     int64_t num_best, int64_t width, int64_t capacity, int threads) {
  using namespace foredraft;
  const int64_t hidden = head->layer.hidden, dim = head->layer.dim, vocab = head->draft_vocab;
  const int64_t most = given->T > B ? given->T : B;
  uint16_t *x = work + 3 * most * width, *both = x + most * hidden, *normed = both + 2 * most * hidden;
  uint16_t *cos = normed + most * hidden, *sin = cos + most * dim, *ends = sin + most * dim, *logits = ends + B * hidden;
  Barrier barrier;
#pragma omp parallel num_threads(threads)
  {
    const int team = omp_get_num_threads();
    for (int64_t step = 0; step < num_steps; ++step) {
      const bool reads = step == 0 && given->T;
      const int64_t T = reads ? given->T : B;
      const int64_t *fed = reads ? given->tokens : last, *at = reads ? given->positions : positions;
      const uint16_t* before = reads ? given->states : states;
#pragma omp for schedule(static) nowait
      for (int64_t t = 0; t < T; ++t) {
        uint16_t *token = both + 2 * t * hidden, *state = token + hidden;
        norm_row(head->embeddings + fed[t] * hidden, head->token_norm, token, hidden, head->token_eps);
        norm_row(before + t * hidden, head->state_norm, state, hidden, head->state_eps);
        std::memcpy(x + t * hidden, head->norms_residual ? state : before + t * hidden, hidden * sizeof *x);
        std::memcpy(cos + t * dim, head->cos + at[t] * dim, dim * sizeof *cos);
        std::memcpy(sin + t * dim, head->sin + at[t] * dim, dim * sizeof *sin);
      }
      barrier.wait(team);
      run_layers({&head->layer, 1, x, both, work, cos, sin, reads ? given->write_index : write_index, keys, values,
                  reads ? given->rows : rows, at, nullptr, T, width, B, 0, capacity, nullptr, nullptr, 0},
                 barrier);
      uint16_t* back = x;
      if (reads) {
        back = ends;
#pragma omp for schedule(static) nowait
        for (int64_t b = 0; b < B; ++b) std::memcpy(ends + b * hidden, x + given->ends[b] * hidden, hidden * sizeof *x);
        barrier.wait(team);
      }
      rms_norm(back, head->last_norm, normed, B, hidden, hidden, head->last_eps);
      barrier.wait(team);
      product(normed, head->lm_head, head->lm_head_bias, logits, B, vocab, hidden, hidden, false);
      barrier.wait(team);
#pragma omp for schedule(static) nowait
      for (int64_t b = 0; b < B; ++b) {
        int64_t* best = tokens + (step * B + b) * num_best;
        float* tops = probs + (step * B + b) * num_best;
        float* own = scores + b * vocab;
        scores_of(logits + b * vocab, vocab, noise ? scales[b] : 1.0f,
                  noise ? noise + (b * num_steps + step) * vocab : nullptr, own);
        likeliest(own, vocab, num_best, best, tops);
        if (num_best > 1) softmax_shares(own, vocab, num_best, tops);
        for (int64_t k = 0; k < num_best; ++k) best[k] = head->token_ids[best[k]];
        last[b] = best[0];
        std::memcpy(states + b * hidden, (head->norms_output ? normed : back) + b * hidden, hidden * sizeof *x);
        if (!reads) ++positions[b], ++write_index[b], ++rows[6 * b + 3];
      }
      barrier.wait(team);
    }
  }
}
