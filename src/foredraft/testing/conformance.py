"""What every drafter must keep to, as checks that raise AssertionError and say what was broken.

    check_drafter(lambda target, draft_model: MyDrafter())

runs all of them in half a minute. Each part can be called alone, as the project's own tests do for every
drafter of the registry.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foredraft.config import ACCEPTANCE_RULES
from foredraft.drafters import Drafter
from foredraft.engine import Engine
from foredraft.engine.sequence import Sequence as EngineSequence
from foredraft.sampling import SamplingRow, TokenCounts, adjust_logits, probs_from_logits
from foredraft.target.forward import TargetModel
from foredraft.testing.distribution import check_distribution
from foredraft.testing.drafters import RecordingDrafter, parts_of
from foredraft.testing.engines import check_caches, engine_for, run
from foredraft.testing.models import noisy_copy, target_for, tiny_model
from foredraft.testing.reference import Reference, reference
from foredraft.types import SamplingParams, StepOutput

MakeDrafter = Callable[[TargetModel, Any], Drafter]
"""Called with the target and a smaller transformers model that agrees with it about every second time; the
latter is for drafters that need a model of their own and may be ignored."""

NUM_TOKENS = 18
PROMPTS: tuple[tuple[int, ...], ...] = (
    (7,),
    (7, 8, 9, 10, 7, 8, 9),
    tuple(range(20, 37)),
    (3, 5, 3, 5, 3),
    (*range(40, 60), *range(40, 56), 41),
)
"""One token, repeating ones, one longer than what attention takes as a short row."""
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy-penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
    "greedy-stop": {"temperature": 0.0, "stop_token_ids": (31, 17), "min_tokens": 6},
    "temperature": {},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.7, "temperature": 1.3},
    "min-p": {"min_p": 0.1},
    "penalties": {"presence_penalty": 0.2, "repetition_penalty": 1.03, "logit_bias": {5: 1.0}},
}
LOSSLESS_RULES = tuple(rule for rule in ACCEPTANCE_RULES if rule != "typical")


@dataclass(slots=True)
class Totals:
    """Drafted and accepted tokens over the runs of a check."""

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    longest_draft: int = 0

    def add(self, sequences: Iterable[EngineSequence]) -> None:
        for sequence in sequences:
            self.num_draft_tokens += sequence.metrics.num_draft_tokens
            self.num_accepted_tokens += sequence.metrics.num_accepted_tokens
            self.longest_draft = max(self.longest_draft, len(sequence.metrics.drafted_per_position))

    def check_not_vacuous(self) -> None:
        """Assert that tokens were drafted, that some were accepted and some were not."""
        assert 0 < self.num_accepted_tokens < self.num_draft_tokens, f"nothing was put to the test: {self}"


@dataclass(frozen=True, slots=True)
class Models:
    """The target of the checks and the smaller model that goes with it, of transformers; compared by identity."""

    target: Any
    draft: Any


@functools.cache
def conformance_models() -> Models:
    """The models that the checks use unless they are given others: a Llama and its noisy copy."""
    target = tiny_model(3, context=0.01)
    return Models(target, noisy_copy(target, 0.08))


def mode_params(mode: str, prompt_index: int) -> SamplingParams:
    """Options of a mode; each prompt has a seed of its own."""
    options = {"temperature": 1.0, **MODES[mode]}
    seed = None if options["temperature"] == 0.0 else 100 + prompt_index
    return SamplingParams(max_tokens=NUM_TOKENS, seed=seed, **options)


@functools.cache
def _reference(models: Models, mode: str, prompt_index: int) -> Reference:
    return reference(models.target, PROMPTS[prompt_index], mode_params(mode, prompt_index))


def check_drafter(make_drafter: MakeDrafter, *, drafts: bool = True, models: Models | None = None) -> None:
    """Run the whole suite on a drafter.

    Args:
        make_drafter: builds a fresh one, see :data:`MakeDrafter`.
        drafts: False for a drafter that never proposes anything.
        models: other ones than :func:`conformance_models`, of vocabulary 64; the distribution, which is judged on
            models of its own, is then left out.

    Raises:
        AssertionError: says what was broken.
    """
    rules = [rule for rule in LOSSLESS_RULES if rule != "block" or not makes_trees(make_drafter)]
    totals = Totals()
    for num_draft_tokens in range(1, 9):
        check_tokens(make_drafter, "auto", "greedy", num_draft_tokens, totals=totals, models=models)
    for mode in MODES:
        check_tokens(make_drafter, "auto", mode, 4, totals=totals, models=models)
    check_interface(make_drafter, models=models)
    for rule in rules:
        check_tokens(make_drafter, rule, "top-k", 4, totals=totals, models=models)
        if rule != "auto" and models is None:
            check_distribution(make_drafter, rule, num_texts=2500)
    if drafts:
        totals.check_not_vacuous()


def makes_trees(make_drafter: MakeDrafter) -> bool:
    models = conformance_models()
    return make_drafter(target_for(models.target), models.draft).makes_trees


def check_tokens(
    make_drafter: MakeDrafter,
    rule: str,
    mode: str,
    num_draft_tokens: int,
    *,
    totals: Totals | None = None,
    models: Models | None = None,
) -> None:
    """Five rows in a batch, one of them alone and three in another order, all on the same engine.

    A row is the same in each. Under greedy decoding and the coupled rule it equals the reference, token for
    token; under the others every token is possible where it stands. Counters add up.
    """
    models = models or conformance_models()
    engine = _engine(make_drafter, models, rule, num_draft_tokens)
    params = [mode_params(mode, index) for index in range(len(PROMPTS))]
    together = run(engine, PROMPTS, params, after_step=_check_step)
    finished = list(together)
    for order in ([4], [2, 1, 0]):
        batch = run(engine, [PROMPTS[i] for i in order], [params[i] for i in order], after_step=_check_step)
        for index, sequence in zip(order, batch, strict=True):
            assert sequence.output_token_ids == together[index].output_token_ids, (
                f"prompt {index} gets other tokens in the batch {order} than among five ({rule}, {mode})"
            )
        finished += batch
    identical = params[0].is_greedy or rule in ("auto", "coupled")
    for index, sequence in enumerate(together):
        if identical:
            expected = _reference(models, mode, index)
            assert sequence.output_token_ids == expected.token_ids, f"prompt {index} differs from plain decoding"
            assert sequence.finish_reason == expected.finish_reason
        else:
            check_possible(models.target, sequence)
        check_counters(sequence)
    if totals is not None:
        totals.add(finished)


def check_interface(make_drafter: MakeDrafter, num_draft_tokens: int = 5, *, models: Models | None = None) -> None:
    """State: caches follow the text after every step, nothing of a request outlives it, nothing is changed.

    The same requests on the same engine again, in another order, get the same drafts as on a fresh one.
    """
    models = models or conformance_models()
    for mode in ("greedy", "temperature"):
        engine = _engine(make_drafter, models, "auto", num_draft_tokens)
        recorder = engine.drafter
        assert isinstance(recorder, RecordingDrafter)
        params = [mode_params(mode, index) for index in range(len(PROMPTS))]
        before = _held_by(recorder.inner)
        histories = []
        for order in (range(len(PROMPTS)), reversed(range(len(PROMPTS)))):
            chosen = list(order)
            sequences = run(
                engine,
                [PROMPTS[i] for i in chosen],
                [params[i] for i in chosen],
                after_step=lambda engine, _: check_caches(engine),
            )
            histories.append({i: recorder.proposed(s.sequence_id) for i, s in zip(chosen, sequences, strict=True)})
            assert _held_by(recorder.inner) == before, "the drafter keeps state of requests that have ended"
        assert histories[0] == histories[1], "drafts depend on earlier requests, or on the order of rows"


def check_possible(model: Any, sequence: EngineSequence) -> None:
    """Assert that each emitted token has a positive probability after all filters, by one plain pass."""
    prompt, output = sequence.request.prompt_token_ids, sequence.output_token_ids
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + output]), use_cache=False).logits[0]
    for place, token in enumerate(output):
        counts = TokenCounts(prompt)
        counts.append(output[:place])
        row = SamplingRow(sequence.request.params, num_output_tokens=place, counts=counts, stop_ids=sequence.stop_ids)
        at = len(prompt) + place - 1
        probs = probs_from_logits(adjust_logits(logits[at : at + 1], [row]), [row.params])[0]
        assert probs[token] > 0, f"token {token} at place {place} is filtered out"


def check_counters(sequence: EngineSequence) -> None:
    """Emitted tokens are the accepted ones and one for each pass, less what a stop cut off."""
    metrics = sequence.metrics
    emitted = len(sequence.output_token_ids)
    assert metrics.num_emitted_tokens == emitted
    missing = metrics.num_accepted_tokens + metrics.num_target_passes - emitted
    assert missing == 0 or (sequence.finish_reason == "stop" and missing == 1), metrics
    assert sum(metrics.accepted_per_position) == metrics.num_accepted_tokens
    assert sum(metrics.drafted_per_position) <= metrics.num_draft_tokens
    assert sum(metrics.drafted_per_position[:1]) == metrics.num_drafts
    assert metrics.accepted_per_position == sorted(metrics.accepted_per_position, reverse=True)


def _engine(make_drafter: MakeDrafter, models: Models, rule: str, num_draft_tokens: int) -> Engine:
    target = target_for(models.target)
    drafter = RecordingDrafter(make_drafter(target, models.draft))
    return engine_for(
        target,
        drafter,
        num_speculative_tokens=num_draft_tokens,
        acceptance_rule=rule,
        allow_lossy=rule == "typical",
    )


def _check_step(engine: Engine, outputs: Sequence[StepOutput]) -> None:
    """The draft of the step just run: no longer than asked, a tree of real tokens, drawn from what it says."""
    recorder = engine.drafter
    assert isinstance(recorder, RecordingDrafter)
    rows, draft = recorder.rows[-1], recorder.drafts[-1]
    assert len(draft.num_draft_tokens) == len(rows) == len(outputs)
    for i, (row, count) in enumerate(zip(rows, draft.num_draft_tokens, strict=True)):
        assert 0 <= count <= row.num_draft_tokens, f"{count} draft tokens, {row.num_draft_tokens} were asked for"
        tokens = draft.token_ids[i, :count].tolist()
        assert all(0 <= token < engine.target.vocab_size for token in tokens), tokens
        parents = draft.parents[i, :count].tolist()
        if recorder.makes_trees:
            assert all(-1 <= parent < node for node, parent in enumerate(parents)), f"not a tree: {parents}"
            assert len(set(zip(parents, tokens, strict=True))) == count, "siblings with the same token"
        else:
            assert parents == list(range(-1, count - 1)), f"not a chain: {parents}"
        greedy = row.sampling_row(()).params.is_greedy
        if draft.probs is not None and not greedy:
            probs = draft.probs[i, :count]
            assert torch.allclose(probs.sum(-1), torch.ones(count), atol=1e-5), "probabilities do not sum to 1"
            assert all(probs[at, token] > 0 for at, token in enumerate(tokens)), "an impossible token was drawn"


def _held_by(drafter: Drafter) -> dict[tuple[int, str], int]:
    """How many entries each container of a drafter has, and how many slots its models have open."""
    held = {}
    for index, part in enumerate(parts_of(drafter)):
        for name, value in vars(part).items():
            if isinstance(value, dict | list | set):
                held[index, name] = len(value)
            elif isinstance(value, TargetModel):
                held[index, name] = value.slots.num_open
    return held
