"""The real model in bf16 under load: order, arrival, preemption and reuse leave no trace in the tokens."""

from __future__ import annotations

import random

import pytest

from foredraft import LLM, SamplingParams
from foredraft.target.selfcheck import TOKEN_IDENTICAL
from foredraft.types import Request

MODEL = "smollm2-135m-instruct"
NUM_REQUESTS = 64
SUBJECTS = ("a lighthouse", "the moon", "bread", "a bicycle", "rain", "chess", "a library", "salt")
TASKS = {
    "edit": "Repeat this line, with the name changed to Anna: def greet(): print('Hello, {0}, how is {0} today?')",
    "list": "List five words about {0}, then repeat the list.",
    "story": "Tell a story about {0} and a very old captain.",
    "fact": "What is {0}?",
}
OPTIONS = {"dtype": "bfloat16", "max_model_len": 1024}


def requests(llm: LLM) -> list[Request]:
    """Two of each prompt, greedy and sampled with a seed; they share the beginning of the chat template."""
    made = []
    for i in range(NUM_REQUESTS):
        route = list(TASKS)[i % 4]
        prompt = TASKS[route].format(SUBJECTS[i // 8])
        tokens = llm.chat_token_ids([{"role": "user", "content": prompt}])
        sampling = {"temperature": 0.0} if i % 8 < 4 else {"temperature": 0.8, "seed": 100 + i}
        params = SamplingParams(max_tokens=24 + i % 9, ignore_eos=True, **sampling)
        made.append(Request(str(i), tokens, params, route=route, priority=i % 3 // 2))
    return made


@pytest.mark.slow  # 64 requests alone and three times under load, some minutes
def test_identical_tokens_whatever_the_load() -> None:
    """Alone and plain against three orders with auto draft lengths, in a cache for 6 to 12 of the texts."""
    plain = LLM(MODEL, enable_prefix_caching=False, **OPTIONS)
    if plain.engine.contract != TOKEN_IDENTICAL:
        pytest.skip(f"this machine's kernels give the contract {plain.engine.contract}")
    each = requests(plain)
    expected = [plain.generate(r.prompt_token_ids, r.params)[0].outputs[0].token_ids for r in each]
    loaded = LLM(
        MODEL,
        speculative_config={"method": "ngram", "policy": "goodput"},
        kv_cache_gb=0.034,
        max_num_seqs=16,
        max_num_batched_tokens=192,
        **OPTIONS,
    )
    for seed, most_at_once in ((0, 1), (1, 4), (2, NUM_REQUESTS)):
        metrics = [0] * 4
        choose, order = random.Random(seed), list(each)
        choose.shuffle(order)
        sequences = {}
        while order or loaded.engine.has_unfinished_requests:
            for request in order[: choose.randint(0, most_at_once)]:
                sequences[request.request_id] = loaded.engine.add_request(request)
            order = [request for request in order if request.request_id not in sequences]
            loaded.engine.step()
            loaded.engine.check_integrity()
        found = [sequences[request.request_id].output_token_ids for request in each]
        assert sum(a == b for a, b in zip(found, expected, strict=True)) == NUM_REQUESTS
        for m in (sequence.metrics for sequence in sequences.values()):
            counts = (m.num_preemptions, m.num_cached_tokens, m.num_draft_tokens, m.num_accepted_tokens)
            metrics = [a + b for a, b in zip(metrics, counts, strict=True)]
        print(f"order {seed}: preemptions, cached, drafted and accepted tokens: {metrics}")
        assert all(metrics)
        loaded.reset_prefix_cache()
