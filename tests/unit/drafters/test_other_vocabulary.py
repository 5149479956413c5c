"""Draft models of another tokenizer: their caches follow the text in their own tokens, drafts come back right.

Target and draft model say the same text, each by its own positions, so one slip of a position or of a cache shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

from foredraft.drafters.other_vocabulary import SharedVocabularyDrafter, TextAlignmentDrafter
from foredraft.drafters.token_text import TokenText
from foredraft.engine import Engine
from foredraft.errors import IncompatibleDrafterError
from foredraft.testing import (
    RecordingDrafter,
    ScriptedDrafter,
    bigram_model,
    check_cache,
    engine_for,
    reference,
    run,
    scripted_model,
    target_for,
    tiny_model,
)
from foredraft.types import Request, SamplingParams

KINDS = ("tokenizer", "gemma_tokenizer", "llama_tokenizer")
PAIRS = list(itertools.permutations(KINDS, 2))
METHODS = {"tli": SharedVocabularyDrafter, "slem": TextAlignmentDrafter}
PROMPT = "alpha beta"
ANSWER = " gamma delta, the quick brown dog sleeps on the fox zz and 🙂 ten"
GREEDY = SamplingParams(temperature=0, max_tokens=20)


@pytest.fixture
def text_of(request: pytest.FixtureRequest) -> Callable[[str], TokenText]:
    def make(kind: str) -> TokenText:
        tokenizer = request.getfixturevalue(kind)
        return TokenText(tokenizer, len(tokenizer), kind)

    return make


def tokens_of(text: TokenText, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    return [*text.start, *text.encode_start(prompt)], text.encode(answer)


def model_that_says(text: TokenText, answer: str, *, wrong_at: tuple[int, ...] = ()) -> Any:
    """With other tokens than those of the answer at some places."""
    first, rest = tokens_of(text, PROMPT, answer)
    for place in wrong_at:
        rest[place] = rest[place] - 1
    return scripted_model(rest, len(first), vocab_size=len(text.pieces))


def make(method: str, target: TokenText, draft: TokenText, model: Any, **options: Any) -> Any:
    return METHODS[method](target_for(model, **options), target, draft)


def check_follows(engine: Engine, _: Any) -> None:
    """The draft model's cache holds a prefix of the text in its own tokens."""
    drafter = engine.drafter.inner
    for sequence in engine.scheduler.running:
        text = drafter._translations[sequence.sequence_id].token_ids
        check_cache(drafter._inner.model, sequence.sequence_id, text)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_tokens_are_those_of_plain_decoding(text_of: Callable[[str], TokenText], target: str, draft: str, method: str):
    """Greedy and seeded, with a draft model that errs at some words and within a character."""
    target_text, draft_text = text_of(target), text_of(draft)
    model = model_that_says(target_text, ANSWER)
    prompt, answer = tokens_of(target_text, PROMPT, ANSWER)
    params = [replace(GREEDY, max_tokens=len(answer)), SamplingParams(seed=7, max_tokens=len(answer))]
    draft_model = model_that_says(draft_text, ANSWER, wrong_at=(3, -10, -3))
    drafter = RecordingDrafter(make(method, target_text, draft_text, draft_model))
    sequences = run(engine_for(target_for(model), drafter), [prompt] * 2, params, after_step=check_follows)
    for sequence, param in zip(sequences, params, strict=True):
        assert sequence.output_token_ids == reference(model, prompt, param).token_ids == answer
        assert 8 <= sequence.metrics.num_accepted_tokens < sequence.metrics.num_draft_tokens
        assert len(sequence.metrics.drafted_per_position) == 4
    assert drafter.inner._translations == {}
    assert drafter.inner._inner.model.slots.num_open == 0
    assert all((draft.probs is None) == (method == "slem") for draft in drafter.drafts if draft.token_ids.numel())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("k", [1, 2])
def test_a_text_that_ends_within_a_character_waits(text_of: Callable[[str], TokenText], method: str, k: int):
    """Four bytes a character: some step leaves one incomplete, gets no draft, and the next character is whole."""
    target_text, draft_text = text_of("tokenizer"), text_of("gemma_tokenizer")
    answer = "🙂🙃🙂🙃 ten"
    model = model_that_says(target_text, answer)
    prompt, _ = tokens_of(target_text, PROMPT, answer)
    drafter = RecordingDrafter(make(method, target_text, draft_text, model_that_says(draft_text, answer)))
    engine = engine_for(target_for(model), drafter, num_speculative_tokens=k)
    lengths = [0]
    (sequence,) = run(engine, [prompt], GREEDY, after_step=lambda _, out: lengths.append(len(out[0].token_ids)))
    assert sequence.output_token_ids == reference(model, prompt, GREEDY).token_ids
    within = [n < 16 and n % 4 > 0 for n in itertools.accumulate(lengths[:-1])]
    assert any(within)
    for incomplete, (width,) in zip(within, drafter.widths, strict=True):
        assert width == 0 or not incomplete
    if method == "tli":
        assert sequence.metrics.num_accepted_tokens > 0


def test_special_tokens_come_back_by_content_only(text_of: Callable[[str], TokenText]):
    """The draft model ends its text: shared tokens have the target's end token, text ends before it."""
    target_text, draft_text = text_of("tokenizer"), text_of("gemma_tokenizer")
    end = target_text.special["<|end|>"]
    prompt, answer = tokens_of(target_text, PROMPT, " gamma")
    model = scripted_model([*answer, end, 7, 7], len(prompt), vocab_size=len(target_text.pieces))
    draft_prompt, draft_answer = tokens_of(draft_text, PROMPT, " gamma")
    script = [*draft_answer, draft_text.special["<|end|>"], 300, 300]
    draft_model = scripted_model(script, len(draft_prompt), vocab_size=len(draft_text.pieces))
    for method in METHODS:
        drafter = RecordingDrafter(make(method, target_text, draft_text, draft_model))
        engine = engine_for(target_for(model), drafter, num_speculative_tokens=8, eos_token_ids=(end,))
        (sequence,) = run(engine, [prompt], GREEDY)
        assert sequence.output_token_ids == [*answer, end]
        assert sequence.finish_reason == "stop"
        first = drafter.drafts[0].token_ids[0].tolist()
        assert first[: len(answer) + 1] == [*answer, end] if method == "tli" else first == answer


def test_the_name_of_a_special_token_is_only_text(text_of: Callable[[str], TokenText]):
    """The draft model spells it out; the target's tokenizer would make one token of it."""
    target_text, draft_text = text_of("tokenizer"), text_of("llama_tokenizer")
    answer = " <|end|> alpha"
    model = model_that_says(target_text, answer)
    prompt, _ = tokens_of(target_text, PROMPT, answer)
    drafter = RecordingDrafter(make("slem", target_text, draft_text, model_that_says(draft_text, answer)))
    (sequence,) = run(engine_for(target_for(model), drafter, num_speculative_tokens=8), [prompt], GREEDY)
    assert sequence.metrics.num_accepted_tokens > 4
    end = target_text.special["<|end|>"]
    assert all(end not in tokens for tokens in drafter.proposed(sequence.sequence_id))


def test_cached_tokens_become_others_as_the_text_grows(character_tokenizer: Callable[[str], Any]):
    """For the draft model abc is ab, c but abcd is a, bcd: as many tokens, and the first is another."""
    merges = [("c", "d"), ("b", "cd"), ("a", "b")]
    tokens = ["a", "b", "c", "d", *("".join(pair) for pair in merges)]
    pairs = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    pairs.decoder = decoders.Fuse()
    texts = [
        TokenText(tokenizer, 32, "tiny")
        for tokenizer in (character_tokenizer("abcd"), PreTrainedTokenizerFast(tokenizer_object=pairs))
    ]
    assert [texts[1].encode(text) for text in ("abc", "abcd")] == [[6, 2], [0, 5]]
    model = scripted_model([0, 1, 2, 3] * 4, 3, vocab_size=32)
    drafter = RecordingDrafter(make("slem", *texts, scripted_model([6] * 40, 2, vocab_size=32)))
    engine = engine_for(target_for(model), drafter, num_speculative_tokens=1)
    (sequence,) = run(engine, [[3, 2, 3]], replace(GREEDY, max_tokens=16), after_step=check_follows)
    assert sequence.output_token_ids == [0, 1, 2, 3] * 4
    assert sequence.metrics.num_draft_tokens > sequence.metrics.num_accepted_tokens


def test_tokens_that_the_target_model_lacks_are_not_proposed(text_of: Callable[[str], TokenText], tokenizer: Any):
    """A tokenizer may know more tokens than its model: the draft ends before the first of them."""
    target_text, draft_text = TokenText(tokenizer, 300, "small"), text_of("llama_tokenizer")
    prompt, answer = tokens_of(target_text, "a b", " c d, e f the quick brown")
    assert max(answer) >= 300 > max(prompt)
    at = next(place for place, token in enumerate(answer) if token >= 300)
    model = scripted_model(answer[:at], len(prompt), vocab_size=300)
    first, rest = tokens_of(draft_text, "a b", " c d, e f the quick brown")
    draft_model = scripted_model(rest, len(first), vocab_size=len(draft_text.pieces))
    drafter = RecordingDrafter(make("slem", target_text, draft_text, draft_model))
    (sequence,) = run(engine_for(target_for(model), drafter, num_speculative_tokens=at + 3), [prompt], GREEDY)
    assert sequence.output_token_ids == reference(model, prompt, GREEDY).token_ids
    assert drafter.proposed(sequence.sequence_id)[0] == answer[:at]


@pytest.mark.parametrize("seed", [None, 3])
def test_options_that_leave_no_shared_token_leave_no_draft(text_of: Callable[[str], TokenText], seed: int | None):
    """Only tokens that the draft model lacks may be emitted: it proposes nothing, and the target goes on."""
    target_text, draft_text = text_of("tokenizer"), text_of("gemma_tokenizer")
    drafter = RecordingDrafter(make("tli", target_text, draft_text, model_that_says(draft_text, ANSWER)))
    lacking = set(range(len(target_text.pieces))) - set(drafter.inner._inner._shared)
    options = {"temperature": 0} if seed is None else {"seed": seed}
    params = SamplingParams(**options, allowed_token_ids=tuple(sorted(lacking)), max_tokens=6)
    model = model_that_says(target_text, ANSWER)
    prompt, _ = tokens_of(target_text, PROMPT, ANSWER)
    (sequence,) = run(engine_for(target_for(model), drafter), [prompt], params)
    assert sequence.output_token_ids == reference(model, prompt, params).token_ids
    assert sequence.metrics.num_draft_tokens == 0
    assert lacking


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_model_that_was_left_out_catches_up(text_of: Callable[[str], TokenText], method: str):
    """Other drafters' steps in between change the end of its text; it cuts its cache back and goes on."""
    target_text, draft_text = text_of("tokenizer"), text_of("llama_tokenizer")
    model = model_that_says(target_text, ANSWER)
    prompt, answer = tokens_of(target_text, PROMPT, ANSWER)
    drafter = make(method, target_text, draft_text, model_that_says(draft_text, ANSWER))
    engine = engine_for(target_for(model), drafter, num_speculative_tokens=3)
    sequence = engine.add_request(Request("a", prompt, GREEDY))
    engine.step()
    engine.drafter = ScriptedDrafter([])
    for _ in range(8):
        engine.step()
    accepted = sequence.metrics.num_accepted_tokens
    engine.drafter = RecordingDrafter(drafter)
    while engine.has_unfinished_requests:
        check_follows(engine, engine.step())
    assert sequence.output_token_ids == answer[:20]
    assert sequence.metrics.num_accepted_tokens > accepted + 2


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_model_stops_at_its_own_limit(text_of: Callable[[str], TokenText], method: str):
    """Counted in its own tokens: of those there are more."""
    target_text, draft_text = text_of("tokenizer"), text_of("llama_tokenizer")
    model = model_that_says(target_text, ANSWER)
    prompt, answer = tokens_of(target_text, PROMPT, ANSWER)
    draft_model = model_that_says(draft_text, ANSWER)
    drafter = RecordingDrafter(make(method, target_text, draft_text, draft_model, max_model_len=12))
    (sequence,) = run(engine_for(target_for(model), drafter), [prompt], GREEDY)
    assert sequence.output_token_ids == answer[:20]
    assert drafter.widths[0] > [0]
    assert drafter.widths[-1] == [0]


@pytest.mark.parametrize("method", METHODS)
def test_an_aborted_request_leaves_nothing(text_of: Callable[[str], TokenText], method: str):
    target_text, draft_text = text_of("tokenizer"), text_of("gemma_tokenizer")
    model = model_that_says(target_text, ANSWER)
    prompt, _ = tokens_of(target_text, PROMPT, ANSWER)
    drafter = make(method, target_text, draft_text, model_that_says(draft_text, ANSWER))
    engine = engine_for(target_for(model), drafter)
    engine.add_request(Request("a", prompt, GREEDY))
    engine.step()
    assert drafter._inner.model.slots.num_open == len(drafter._translations) == 1
    engine.abort("a")
    assert drafter._inner.model.slots.num_open == len(drafter._translations) == 0


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_equal_laws_are_always_accepted(character_tokenizer: Callable[[str], Any], rule: str):
    """Two bigram languages, one law: by the same noise the same tokens, at the target's positions, and ratios of 1.

    The draft model has its letters in another order and a begin token, so its ids and its positions are others.
    """
    letters, order = "abcdefgh", [3, 1, 0, 2, 7, 6, 4, 5]
    table = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    draft_table = torch.full((9, 9), float("-inf"))
    draft_table[:8, :8] = table[order][:, order]
    draft_table[8, 0] = 0.0
    tokenizer = character_tokenizer([letters[index] for index in order])
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    start = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 8)])
    tokenizer.backend_tokenizer.post_processor = start
    draft_text = TokenText(tokenizer, 9, "draft")
    assert draft_text.start == [8]
    drafter = make(
        "tli", TokenText(character_tokenizer(letters), 8, "target"), draft_text, bigram_model(draft_table, 9)
    )
    params = [SamplingParams(seed=seed, max_tokens=16) for seed in range(4)]
    engine = engine_for(bigram_model(table, 8), drafter, acceptance_rule=rule)
    for sequence in run(engine, [[0, 1, 2]] * 4, params):
        assert sequence.metrics.num_accepted_tokens == sequence.metrics.num_draft_tokens >= 12


def test_vocabularies_with_nothing_in_common_are_refused(character_tokenizer: Callable[[str], Any]):
    texts = [TokenText(character_tokenizer(characters), 4, "tiny") for characters in ("abcd", "efgh")]
    with pytest.raises(IncompatibleDrafterError, match="share no token.*heterogeneous_vocab_method='slem'"):
        SharedVocabularyDrafter(target_for(tiny_model(0, vocab_size=64)), *texts)
