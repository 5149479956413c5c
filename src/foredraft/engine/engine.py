"""The loop: schedule, plan, draft, one target pass, verify, commit, observe, deliver."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from foredraft.config import SpeculativeConfig
from foredraft.drafters import Drafter, DraftRow, JudgedDraft, Offer
from foredraft.engine.accounting import Planned, StepSeconds, share_seconds, step_outcome
from foredraft.engine.delivery import deliver
from foredraft.engine.detokenize import Detokenizer
from foredraft.engine.memory import CacheMemory
from foredraft.engine.metrics import EngineMetrics, MetricsSnapshot
from foredraft.engine.scheduler import Schedule, ScheduledRow, Scheduler, trim
from foredraft.engine.sequence import Sequence
from foredraft.engine.verifier import Verifier, rule_for
from foredraft.errors import IncompatibleDrafterError, RequestError
from foredraft.policy import FixedPolicy, PlanRow, Policy, StepOutcome
from foredraft.sampling import TokenCounts, check_token_ids, likeliest_tokens, needs_counts
from foredraft.target.features import HiddenStates
from foredraft.target.forward import TargetModel
from foredraft.target.layout import PassRow
from foredraft.types import Draft, FinishReason, Request, StepOutput, Verdict

Row = ScheduledRow[Sequence]
Watcher = Callable[[list[Sequence], Draft, list[Verdict], list[StepOutput]], None]
"""Told of every step: the rows that got tokens, their draft, how it was judged, what was delivered."""


class Engine:
    """Batched decoding of many requests with one target model and one drafter.

    Args:
        target: the model; its slots belong to this engine.
        drafter: proposes tokens; method ``none`` is plain decoding in the same loop.
        tokenizer: for text and stop strings; None works with token ids alone.
        eos_token_ids: end a sequence unless the request ignores them.
        max_kv_bytes: most bytes of the target's keys and values; None is no limit.
        enable_prefix_caching: keep the cache entries of ended requests for those that begin like them.
        contract: what the numerics of the target guarantee (see ``target.selfcheck``).
        policy: chooses draft lengths; None always drafts the configured number.

    Attributes:
        watchers: called after every step; they change nothing.

    Raises:
        IncompatibleDrafterError: the drafter asks for what the engine does not give; both are named.
        InvalidOptionError: the cache has no room for one sequence of the longest kind.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        config: SpeculativeConfig,
        *,
        tokenizer: Any = None,
        eos_token_ids: tuple[int, ...] = (),
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 1024,
        max_kv_bytes: int | None = None,
        enable_prefix_caching: bool = False,
        contract: str = "unchecked",
        policy: Policy | None = None,
    ):
        _check_capabilities(drafter, target, config.acceptance_rule)
        target.tap(drafter.feature_layers)
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.eos_token_ids, self.contract = eos_token_ids, contract
        self.config = config
        self.policy: Policy = policy or FixedPolicy(config.max_draft_tokens)
        self.verifier = Verifier(config)
        max_retained = max_num_seqs if enable_prefix_caching else 0
        self.memory = CacheMemory(
            target, config.max_draft_tokens, max_kv_bytes, max_retained, len(drafter.feature_layers)
        )
        self.scheduler: Scheduler[Sequence] = Scheduler(max_num_seqs, max_num_batched_tokens, self.memory)
        self.sequences: dict[str, Sequence] = {}
        self.watchers: list[Watcher] = []
        self._metrics = EngineMetrics()
        self._ids = itertools.count()

    def add_request(self, request: Request) -> Sequence:
        """Queue a request.

        Raises:
            RequestError: it can never be served; nothing is queued then.
        """
        params, most = request.params, self.config.max_draft_tokens
        limit, num_prompt = self.target.max_model_len, len(request.prompt_token_ids)
        if request.request_id in self.sequences:
            raise RequestError(f"request id {request.request_id!r} is in use; ids of running requests must differ")
        if not num_prompt:
            raise RequestError("the prompt is empty; give at least one token")
        if num_prompt >= limit:
            raise RequestError(
                f"the prompt has {num_prompt} tokens and the model's limit is {limit}, one of them "
                "for the output; shorten the prompt or raise max_model_len"
            )
        outside = next((t for t in request.prompt_token_ids if not 0 <= t < self.target.vocab_size), None)
        if outside is not None:
            raise RequestError(f"prompt token id {outside} is outside the vocabulary [0, {self.target.vocab_size})")
        outside = next((t for t in request.prediction_token_ids if not 0 <= t < self.target.vocab_size), None)
        if outside is not None:
            raise RequestError(f"prediction token id {outside} is outside the vocabulary [0, {self.target.vocab_size})")
        self._check_drafting(request)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; use stop_token_ids")
        stop_ids = (*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids))
        check_token_ids(params, stop_ids, self.target.vocab_size)
        sequence = Sequence(
            sequence_id=next(self._ids),
            request=request,
            token_ids=list(request.prompt_token_ids),
            noise_seed=secrets.randbits(63) if params.seed is None else params.seed,
            rule=rule_for(self.config, params.is_greedy, params.seed is not None),
            max_len=min(limit, num_prompt + (params.max_tokens or limit)),
            stop_ids=stop_ids,
            detokenizer=Detokenizer(
                self.tokenizer,
                params.stop_strings,
                params.include_stop_str_in_output,
                params.skip_special_tokens,
            ),
            counts=TokenCounts(request.prompt_token_ids) if needs_counts(params) else None,
            arrived_s=time.perf_counter(),
            max_draft_tokens=most
            if request.num_speculative_tokens is None
            else min(most, request.num_speculative_tokens),
        )
        sequence.metrics.num_prompt_tokens = num_prompt
        self.sequences[request.request_id] = sequence
        self.scheduler.add(sequence)
        return sequence

    def _check_drafting(self, request: Request) -> None:
        unknown = next((name for name in request.methods if name not in self.config.methods), None)
        if unknown is not None:
            raise RequestError(
                f"methods={request.methods}: {unknown!r} is no part of this engine's method; choose among "
                f"{', '.join(self.config.methods)}, or num_speculative_tokens=0 for no drafts"
            )
        if request.num_speculative_tokens is not None and request.num_speculative_tokens < 0:
            raise RequestError(
                f"num_speculative_tokens={request.num_speculative_tokens} is below 0; 0 opts out of drafts"
            )

    def step(self) -> list[StepOutput]:
        """Run one pass and return what it delivered to each request that got tokens."""
        started = time.perf_counter()
        schedule = self._schedule()
        rows = schedule.rows
        if not rows:
            return []
        complete = [row.sequence for row in rows if row.completes]
        planned, draft, draft_s = self._draft(schedule, complete)
        drafted = time.perf_counter()
        features = HiddenStates(self.drafter.feature_layers) if self.drafter.feature_layers else None
        logits = self.target.forward(self._pass_rows(rows, draft), features)
        passed = time.perf_counter()
        verdicts = self.verifier.verify(complete, draft, logits)
        self._show(complete, draft, verdicts, logits)
        verified = time.perf_counter()
        self._commit(rows, verdicts)
        outputs = deliver(complete, draft, verdicts, logits)
        for watch in self.watchers:
            watch(complete, draft, verdicts, outputs)
        self._tell_drafter(rows, verdicts, features)
        seconds = StepSeconds.between(started, drafted, passed, verified, time.perf_counter(), draft_s)
        share_seconds(rows, seconds)
        self._account(step_outcome(rows, planned, draft, verdicts, seconds))
        self._retire(complete)
        return outputs

    @property
    def metrics(self) -> MetricsSnapshot:
        """What was done so far, of all requests."""
        return self._metrics.snapshot((s.request.route, s.metrics) for s in self.sequences.values())

    def abort(self, request_id: str) -> None:
        """End a request now; what it has emitted so far stays with its sequence."""
        sequence = self.sequences.get(request_id)
        if sequence is not None:
            sequence.finish_reason = FinishReason.ABORT
            self._retire([sequence])

    def preempt(self, request_id: str) -> None:
        """Take a running request out of the cache; it waits, and goes on later with what it has emitted.

        The engine does so itself when the cache is full. A request that does not run is left as it is.
        """
        sequence = self.sequences.get(request_id)
        if sequence is not None and sequence in self.scheduler.running:
            self.scheduler.put_back(sequence)
            self._set_back(sequence)

    def close(self) -> None:
        """End all requests; the drafter writes what should outlive it."""
        for request_id in list(self.sequences):
            self.abort(request_id)
        self.drafter.close()

    def check_integrity(self) -> None:
        """Assert the invariants of scheduler and cache (used by tests and the soak run)."""
        self.scheduler.check_integrity()
        self.target.slots.check_integrity()
        held = [s.sequence_id for s in self.sequences.values() if s.sequence_id in self.target.slots]
        assert sorted(held) == sorted(s.sequence_id for s in self.scheduler.running)
        assert len(self.sequences) == len(self.scheduler.running) + len(self.scheduler.waiting)

    @property
    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_work

    def _schedule(self) -> Schedule[Sequence]:
        """Preempt, admit and choose what is fed."""
        for sequence in self.scheduler.overflow():
            self._set_back(sequence)
        for sequence in self.scheduler.admit():
            self.memory.open(sequence, self.scheduler.running)
            self._hand_reused_states(sequence)
            sequence.admitted_s = sequence.admitted_s or time.perf_counter()
        return self.scheduler.schedule()

    def _draft(self, schedule: Schedule[Sequence], complete: list[Sequence]) -> tuple[list[Planned], Draft, float]:
        """Draft for the rows that will get logits: what was planned, the draft, and the drafter's seconds."""
        started = time.perf_counter()
        if self.policy.rests(len(complete)):
            offers = [Offer(0)] * len(complete)
        else:
            offers = self.drafter.offers([_draft_row(s, s.draft_limit) for s in complete])
        offered = time.perf_counter()
        planned = self._plan(schedule, complete, offers)
        counts = [count for _, count in planned]
        begun = time.perf_counter()
        draft = self.drafter.propose([_draft_row(s, n) for s, n in zip(complete, counts, strict=True)])
        return planned, draft, time.perf_counter() - begun + offered - started

    def _plan(self, schedule: Schedule[Sequence], complete: list[Sequence], offers: list[Offer]) -> list[Planned]:
        """Draft tokens of each row, within what the step may feed."""
        rows = [
            PlanRow(
                s.sequence_id,
                offer.num_draft_tokens,
                len(s.token_ids),
                s.request.route,
                offer.match_len,
                offer.source,
                offer.is_free,
                offer.branches,
                offer.num_unread,
            )
            for s, offer in zip(complete, offers, strict=True)
        ]
        num_other_tokens = sum(row.num_tokens for row in schedule.rows) - len(rows)
        counts = trim(self.policy.plan(rows, num_other_tokens), schedule.num_draft_tokens)
        return list(zip(rows, counts, strict=True))

    def _pass_rows(self, rows: list[Row], draft: Draft) -> list[PassRow]:
        """The tokens that each row feeds: its pending ones and, if that completes it, its draft."""
        drafted = iter(zip(draft.token_ids.tolist(), draft.parents.tolist(), draft.num_draft_tokens, strict=True))
        passes = []
        for row in rows:
            start = self.target.slots.length(row.sequence.sequence_id)
            tokens = row.sequence.token_ids[start : start + row.num_tokens]
            if row.completes:
                draft_ids, parents, count = next(drafted)
                tokens += draft_ids[:count]
                passes.append(PassRow(row.sequence.sequence_id, tokens, count + 1, parents[:count]))
            else:
                passes.append(PassRow(row.sequence.sequence_id, tokens, 0))
        return passes

    def _commit(self, rows: list[Row], verdicts: list[Verdict]) -> None:
        """Keep the cache entries of the fed tokens and of the accepted drafts; all else is scratch."""
        verdict = iter(verdicts)
        for row in rows:
            path = next(verdict).path if row.completes else ()
            self.target.slots.commit(row.sequence.sequence_id, row.num_tokens, path)

    def _tell_drafter(self, rows: list[Row], verdicts: list[Verdict], features: HiddenStates | None) -> None:
        """The drafter's state follows what was committed."""
        if features is not None:
            self._hand_features(rows, verdicts, features)
        for row in rows:
            if row.completes:
                self.drafter.observe(row.sequence.sequence_id, row.sequence.token_ids)

    def _account(self, outcome: StepOutcome) -> None:
        self.policy.observe(outcome)
        self._metrics.observe(outcome, self.policy.forecast)

    def _hand_features(self, rows: list[Row], verdicts: list[Verdict], features: HiddenStates) -> None:
        """Give the drafter the hidden states of what was committed: fed tokens and accepted drafts.

        Accepted drafts behind a stop are no part of the text, and the last token never has a state.
        """
        verdict = iter(verdicts)
        for row in rows:
            path = next(verdict).path if row.completes else []
            sequence, states = row.sequence, features.of_sequence[row.sequence.sequence_id]
            num_new = row.num_tokens + len(path)
            if path != list(range(len(path))):
                states = states[[*range(row.num_tokens), *(row.num_tokens + node for node in path)]]
            start = features.start_of[sequence.sequence_id]
            known = states[: min(num_new, len(sequence.token_ids) - 1 - start)]
            self.drafter.observe_features(sequence.sequence_id, sequence.token_ids, start, known)

    def _hand_reused_states(self, sequence: Sequence) -> None:
        """Give the drafter the hidden states that came with the prefix of another sequence."""
        states = self.target.slots.read_states(sequence.sequence_id) if self.drafter.feature_layers else None
        if states is not None and len(states):
            self.drafter.observe_features(sequence.sequence_id, sequence.token_ids, 0, states)

    def _show(self, sequences: list[Sequence], draft: Draft, verdicts: list[Verdict], logits: Tensor) -> None:
        """Let the drafter see what the target found likely behind every token of the draft."""
        if not self.drafter.num_top_tokens:
            return
        tops = likeliest_tokens(logits, self.drafter.num_top_tokens)
        each = tops.split([count + 1 for count in draft.num_draft_tokens])
        for i, (sequence, verdict, top) in enumerate(zip(sequences, verdicts, each, strict=True)):
            count = draft.num_draft_tokens[i]
            tokens = [sequence.token_ids[-1], *draft.token_ids[i, :count].tolist()]
            parents = draft.parents[i, :count].tolist()
            self.drafter.observe_pass(JudgedDraft(sequence.sequence_id, tokens, parents, verdict.path, top))

    def _retire(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence.finish_reason is not None:
                self.scheduler.remove(sequence)
                del self.sequences[sequence.request.request_id]
                self._metrics.end(sequence.request.route, sequence.metrics)
                self._release(sequence)

    def _set_back(self, sequence: Sequence) -> None:
        """A sequence was preempted: its text stays, all else is made anew when it runs again."""
        self._release(sequence)
        sequence.metrics.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        """Drop what drafter, policy and cache hold of a sequence."""
        self.drafter.forget(sequence.sequence_id)
        self.policy.forget(sequence.sequence_id)
        self.memory.close(sequence)


def _check_capabilities(drafter: Drafter, target: TargetModel, rule: str) -> None:
    if drafter.makes_trees and rule == "block":
        raise IncompatibleDrafterError(
            f"acceptance_rule 'block' judges chains and {type(drafter).__name__} makes trees; "
            "use 'rejection' or 'auto', or tree_width=1"
        )
    wants = {
        "hidden states of the target": bool(drafter.feature_layers) and not target.gives_states(drafter.feature_layers),
        "verification of trees": drafter.makes_trees and not target.supports_trees,
        "verification without rollback": not drafter.rolls_back,
    }
    for what, wanted in wants.items():
        if wanted:
            raise IncompatibleDrafterError(
                f"{type(drafter).__name__} needs {what}, which this engine does not give for "
                f"{type(target.model).__name__}; use another method"
            )


def _draft_row(sequence: Sequence, num_draft_tokens: int) -> DraftRow:
    return DraftRow(
        sequence.sequence_id,
        sequence.token_ids,
        num_draft_tokens,
        sequence.noise_seed,
        sequence.rule,
        sequence.sampling_row,
        sequence.request.prediction_token_ids,
        sequence.request.methods,
    )
