"""END: end tokens, stop strings and length, wherever in a verified block they fall."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foredraft import Engine, SamplingParams
from foredraft.drafters import Drafter
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.ngram import NGramDrafter
from foredraft.testing import (
    OracleDrafter,
    bigram_model,
    engine_for,
    noisy_copy,
    run,
    scripted_model,
    target_for,
)
from foredraft.types import StepOutput

GREEDY = {"temperature": 0.0}
CHAIN = {7: 8, 8: 9, 9: 10, 10: 7}
CHAIN_PROMPT = [7, 8, 9, 10, 7, 8]
CHAIN_OUTPUT = [9, 10, 7, 8] * 6


class Stream:
    """Collects what the steps deliver."""

    def __init__(self) -> None:
        self.outputs: list[StepOutput] = []
        self.blocks: list[int] = []

    def __call__(self, _: Engine, outputs: Sequence[StepOutput]) -> None:
        self.outputs += outputs
        self.blocks += [len(out.token_ids) for out in outputs]

    @property
    def token_ids(self) -> list[int]:
        return [token for out in self.outputs for token in out.token_ids]

    @property
    def text(self) -> str:
        return "".join(out.text for out in self.outputs)


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 5, 8])
def test_o01_an_end_token_inside_a_block_ends_it(k: int):
    """The end token falls into the first, a middle, the last and the bonus place of a block."""
    script, prompt = [10, 11, 12, 13, 2, 14, 15, 16, 17], [5, 6, 7]
    drafter = OracleDrafter([prompt + script], vocab_size=64) if k else None
    engine = engine_for(scripted_model(script, 3), drafter, num_speculative_tokens=k, eos_token_ids=(2,))
    stream = Stream()
    (sequence,) = run(engine, [prompt], SamplingParams(**GREEDY, max_tokens=9), after_step=stream)
    assert sequence.output_token_ids == stream.token_ids == [10, 11, 12, 13, 2]
    assert sequence.finish_reason == "stop"
    assert stream.outputs[-1].finish_reason == "stop"
    assert sequence.metrics.num_emitted_tokens == 5
    if k:
        assert max(stream.blocks) > 1, "no block had more than one token"


TEXT = "alpha beta STOP gamma delta epsilon zeta"


def text_engine(tokenizer: Any, text: str, drafter_of: Any, k: int) -> tuple[Engine, list[int], list[int]]:
    """An engine whose model says ``text``; returns its prompt and the tokens of the text too."""
    prompt, script = tokenizer("one two")["input_ids"], tokenizer(text)["input_ids"]
    model = scripted_model(script, len(prompt), vocab_size=len(tokenizer))
    drafter = drafter_of(model, prompt + script) if k else None
    return engine_for(model, drafter, num_speculative_tokens=k, tokenizer=tokenizer), prompt, script


def oracle(model: Any, text: list[int]) -> Drafter:
    return OracleDrafter([text], vocab_size=model.config.vocab_size)


def real_draft_model(model: Any, _: list[int]) -> Drafter:
    return DraftModelDrafter(target_for(noisy_copy(model)), model.config.vocab_size)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("k", "drafter_of"), [(0, oracle), (1, oracle), (4, oracle), (6, oracle), (16, oracle), (5, real_draft_model)]
)
def test_o02_a_stop_string_is_found_wherever_it_completes(tokenizer: Any, k: int, drafter_of: Any, keep: bool):
    """STOP takes several tokens; it lies inside one block, or begins in one and ends in the next."""
    engine, prompt, script = text_engine(tokenizer, TEXT, drafter_of, k)
    params = SamplingParams(**GREEDY, max_tokens=40, stop="STOP", include_stop_str_in_output=keep)
    stream = Stream()
    (sequence,) = run(engine, [prompt], params, after_step=stream)
    wanted = "alpha beta STOP" if keep else "alpha beta "
    assert sequence.detokenizer.text == stream.text == wanted
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", "STOP")
    end = next(n for n in range(len(script)) if "STOP" in tokenizer.decode(script[:n]))
    assert sequence.output_token_ids == stream.token_ids == script[:end]
    start = next(n for n in range(len(script)) if "S" in tokenizer.decode(script[:n]))
    borders = set(itertools.accumulate(stream.blocks))
    if k == 16:
        assert stream.blocks == [end], "the whole string and tokens behind it lay in the first block"
        assert len(script) - end > 4
    elif 0 < k < 6:
        assert borders & set(range(start, end)), "the string crosses no border of blocks"
        assert max(stream.blocks) > 1


@pytest.mark.parametrize("stop", ["c d", " d e", "b c", "h"])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_o03_text_ids_logprobs_and_counts_are_cut_at_one_place(tokenizer: Any, k: int, stop: str):
    params = SamplingParams(**GREEDY, max_tokens=20, stop=stop, logprobs=1)

    def decode(num_draft_tokens: int) -> tuple[Any, Stream]:
        engine, prompt, _ = text_engine(tokenizer, "a b c d e f g h", oracle, num_draft_tokens)
        stream = Stream()
        return run(engine, [prompt], params, after_step=stream)[0], stream

    plain, _ = decode(0)
    ours, stream = decode(k)
    assert ours.detokenizer.text == stream.text == plain.detokenizer.text
    assert plain.detokenizer.text == "a b c d e f g h".partition(stop)[0]
    assert ours.output_token_ids == stream.token_ids == plain.output_token_ids
    streamed = [entry for out in stream.outputs for entry in out.logprobs or []]
    assert len(ours.logprobs) == len(streamed) == len(ours.output_token_ids)
    assert [list(entry) for entry in ours.logprobs] == [list(entry) for entry in plain.logprobs]
    assert ours.metrics.num_emitted_tokens == plain.metrics.num_emitted_tokens == len(ours.output_token_ids)
    assert (ours.finish_reason, ours.stop_reason) == ("stop", stop)
    assert max(stream.blocks) > 1


def chain_model() -> Any:
    """After 7 comes 8, then 9, 10 and 7 again, with probability 1."""
    table = torch.full((11, 11), float("-inf"))
    for before in range(11):
        table[before, CHAIN.get(before, 7)] = 0.0
    return bigram_model(table)


DRAFTERS = {
    "ngram": lambda: NGramDrafter(1, 4),
    "oracle": lambda: OracleDrafter([CHAIN_PROMPT + CHAIN_OUTPUT], vocab_size=64),
    "draft_model": lambda: DraftModelDrafter(target_for(chain_model()), 64),
    "half right": lambda: OracleDrafter([CHAIN_PROMPT + CHAIN_OUTPUT], 64, lambda length: length % 3),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_o04_never_longer_than_asked(name: str):
    """Every limit from 1 to 9 with every draft length from 1 to 8."""
    target = target_for(chain_model())
    accepted = 0
    for k in range(1, 9):
        engine = engine_for(target, DRAFTERS[name](), num_speculative_tokens=k)
        for max_tokens in range(1, 10):
            (sequence,) = run(engine, [CHAIN_PROMPT], SamplingParams(**GREEDY, max_tokens=max_tokens))
            assert sequence.output_token_ids == CHAIN_OUTPUT[:max_tokens]
            assert sequence.finish_reason == "length"
            assert sequence.metrics.num_emitted_tokens == max_tokens
            accepted += sequence.metrics.num_accepted_tokens
    assert accepted > 50


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("ends", [(), [], [50, 51], torch.tensor([50, 51])], ids=["none", "empty", "two", "tensor"])
def test_o05_no_end_token_is_legal(name: str, ends: Any):
    engine = engine_for(chain_model(), DRAFTERS[name](), num_speculative_tokens=3)
    params = SamplingParams(**GREEDY, max_tokens=12, stop_token_ids=ends)
    (sequence,) = run(engine, [CHAIN_PROMPT], params)
    assert sequence.output_token_ids == [9, 10, 7, 8] * 3
    assert sequence.finish_reason == "length"
    assert sequence.metrics.num_accepted_tokens > 0
