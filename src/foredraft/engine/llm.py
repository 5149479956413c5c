"""The front door: a model by name, prompts in, outputs out. Shaped like vLLM's class of the same name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any, TypeGuard, cast

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters import Drafter, make_drafter
from foredraft.engine.engine import Engine
from foredraft.engine.metrics import MetricsSnapshot
from foredraft.engine.profile import make_policy
from foredraft.engine.sequence import Sequence
from foredraft.errors import InvalidOptionError, RequestError
from foredraft.target.load import load_target
from foredraft.target.memory import kv_cache_bytes
from foredraft.target.selfcheck import TOKEN_IDENTICAL, settle_numerics
from foredraft.types import CompletionOutput, Request, RequestOutput, SamplingParams, StepOutput

Prompt = str | Seq[int]
Messages = Seq[Mapping[str, Any]]


class LLM:
    """A target model with a drafter, ready to generate.

    Args:
        model: folder, hub id or short name (``smollm2-135m-instruct``).
        speculative_config: options of :class:`SpeculativeConfig`, as a mapping or an object.
        options: options of :class:`EngineConfig` (dtype, device, max_model_len, numerics, ...).

    Raises:
        InvalidOptionError: an option is unknown (the nearest one is named) or out of range.
        ModelLoadError, UnsupportedModelError, IncompatibleDrafterError: see their docstrings.

    Example:
        >>> llm = LLM("smollm2-135m-instruct", speculative_config={"method": "ngram"})
        >>> llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text
    """

    def __init__(
        self,
        model: str,
        *,
        speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None,
        **options: Any,
    ):
        self.config = EngineConfig.from_options({"model": model, **options})
        self.speculative_config = SpeculativeConfig.from_options(speculative_config)
        target, self.loaded = load_target(self.config.model, self.config)
        self.numerics = settle_numerics(target, self.loaded.fingerprint, self.config)
        self.tokenizer = self.loaded.tokenizer
        self._target = target
        self._max_kv_bytes = kv_cache_bytes(self.config, self.loaded.device)
        self.engine = self.new_engine(self.speculative_config)
        self._ids = itertools.count()

    def new_engine(self, speculative_config: SpeculativeConfig, drafter: Drafter | None = None) -> Engine:
        """An engine on this target with the given drafter, or the one that the configuration names.

        Two engines of one target must not run at the same time.
        """
        drafter = drafter or make_drafter(speculative_config, self.config, self._target, self.tokenizer)
        contract, caching = self.numerics.for_drafts(drafter.makes_trees), self.config.enable_prefix_caching
        return Engine(
            self._target,
            drafter,
            speculative_config,
            tokenizer=self.tokenizer,
            eos_token_ids=self.loaded.eos_token_ids,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_kv_bytes=self._max_kv_bytes,
            enable_prefix_caching=contract == TOKEN_IDENTICAL if caching is None else caching,
            contract=contract,
            policy=make_policy(speculative_config, drafter, self._target, self.loaded.fingerprint, self.config),
        )

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        prediction: Prompt | Seq[Prompt | None] | None = None,
        priority: int | Seq[int] = 0,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts, all in one batch as far as ``max_num_seqs`` allows.

        Args:
            prompts: texts or lists of token ids.
            sampling_params: one for all prompts, or one each.
            prediction: what the output is expected to be like (a text or token ids), for the method
                ``prediction``: one for all prompts, or one each, None for none. The output does not depend on it.
            priority: one for all prompts, or one each; lower numbers go first when not all can run at once.
            use_tqdm: show a progress bar (the name is vLLM's).

        Returns:
            One output per prompt, in the order of the prompts. Interrupted by Ctrl-C, those begun are
            returned with what they have, ``finished`` False.

        Raises:
            RequestError: a prompt can't be served; nothing has been run then.
            InvalidOptionError: there is a prediction, and no drafter that uses it.
        """
        sequences = self._add_all(prompts, sampling_params, prediction, priority)
        with _Advance(len(sequences), use_tqdm) as advance:
            try:
                while self.engine.has_unfinished_requests:
                    for out in self.engine.step():
                        advance(out)
            except BaseException as error:
                for sequence in sequences:
                    if sequence.finish_reason is None:
                        self.engine.abort(sequence.request.request_id)
                if not isinstance(error, KeyboardInterrupt):
                    raise
        return [request_output(sequence, self.engine.contract) for sequence in sequences]

    def chat(
        self,
        messages: Messages | Seq[Messages],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Like :meth:`generate`, with conversations put through the model's chat template."""
        many = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate([self.chat_token_ids(cast(Messages, m)) for m in many], sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[StepOutput]:
        """Yield what each step delivers for one prompt. Leaving the loop early aborts the request."""
        sequence = self._add_all(prompt if isinstance(prompt, str) else [prompt], sampling_params)[0]
        try:
            while sequence.finish_reason is None:
                for out in self.engine.step():
                    if out.request_id == sequence.request.request_id:
                        yield out
        finally:
            self.engine.abort(sequence.request.request_id)

    def chat_token_ids(self, messages: Messages) -> list[int]:
        """Token ids of a conversation, ready for the model's answer."""
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise RequestError(f"{self.config.model} has no chat template; use generate() with a plain prompt")
        return list(
            self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_dict=False, tokenize=True
            )
        )

    def reset_prefix_cache(self) -> None:
        """Forget the texts of ended requests that are kept for reuse (the name is vLLM's)."""
        self._target.slots.drop_retained()

    @property
    def metrics(self) -> MetricsSnapshot:
        """Counts, draft lengths, time split and goodput of all requests so far."""
        return self.engine.metrics

    def close(self) -> None:
        """End all requests, and let the drafter write what should outlive it (``suffix_decoding_store``)."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add_all(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None,
        prediction: Prompt | Seq[Prompt | None] | None = None,
        priority: int | Seq[int] = 0,
    ) -> list[Sequence]:
        many = [prompts] if _is_one(prompts) else cast(Seq[Prompt], prompts)
        params = SamplingParams() if sampling_params is None else sampling_params
        each = [params] * len(many) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise InvalidOptionError(f"{len(each)} sampling_params for {len(many)} prompts; give one, or one each")
        predictions = self._predictions(prediction, len(many))
        priorities = [priority] * len(many) if isinstance(priority, int) else list(priority)
        if len(priorities) != len(many):
            raise InvalidOptionError(f"{len(priorities)} priorities for {len(many)} prompts; give one, or one each")
        added: list[Sequence] = []
        try:
            for each_prompt in zip(many, each, predictions, priorities, strict=True):
                added.append(self.engine.add_request(self._request(*each_prompt)))
        except Exception:
            for sequence in added:
                self.engine.abort(sequence.request.request_id)
            raise
        return added

    def _predictions(self, prediction: Prompt | Seq[Prompt | None] | None, num_prompts: int) -> list[tuple[int, ...]]:
        if prediction is None:
            return [()] * num_prompts
        if "prediction" not in self.speculative_config.methods:
            raise InvalidOptionError(
                f"a prediction has no effect with method {self.speculative_config.method!r}; use 'prediction', or "
                "leave it out"
            )
        each = [prediction] * num_prompts if _is_one(prediction) else cast(Seq[Prompt | None], prediction)
        if len(each) != num_prompts:
            raise InvalidOptionError(f"{len(each)} predictions for {num_prompts} prompts; give one, or one each")
        return [self.prediction_token_ids(one or ()) for one in each]

    def prediction_token_ids(self, prediction: Prompt) -> tuple[int, ...]:
        """Token ids of a text in the middle of another one: nothing is put before or behind it."""
        if not isinstance(prediction, str):
            return tuple(prediction)
        if self.tokenizer is None:
            raise RequestError(f"{self.config.model} has no tokenizer; give predictions as lists of token ids")
        return tuple(self.tokenizer(prediction, add_special_tokens=False)["input_ids"])

    def _request(self, prompt: Prompt, params: SamplingParams, prediction: tuple[int, ...], priority: int) -> Request:
        request_id = str(next(self._ids))
        if not isinstance(prompt, str):
            return Request(request_id, list(prompt), params, prediction_token_ids=prediction, priority=priority)
        if self.tokenizer is None:
            raise RequestError(f"{self.config.model} has no tokenizer; give prompts as lists of token ids")
        token_ids = list(self.tokenizer(prompt)["input_ids"])
        return Request(request_id, token_ids, params, prompt, prediction, priority=priority)


def _is_one(prompts: Prompt | Seq[Prompt | None]) -> TypeGuard[Prompt]:
    """Whether it is one prompt, not a list of them."""
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


def request_output(sequence: Sequence, contract: str) -> RequestOutput:
    """What the user sees of a sequence, finished or not."""
    params = sequence.request.params
    completion = CompletionOutput(
        index=0,
        text=sequence.detokenizer.text,
        token_ids=sequence.output_token_ids,
        logprobs=None if params.logprobs is None else list(sequence.logprobs),
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
    )
    finished = sequence.finish_reason is not None and sequence.finish_reason != "abort"
    return RequestOutput(
        sequence.request.request_id,
        sequence.request.prompt,
        sequence.request.prompt_token_ids,
        [completion],
        finished,
        sequence.metrics,
        contract,
    )


class _Advance:
    """A progress bar over requests that also shows tokens per second; silent unless asked for."""

    def __init__(self, total: int, show: bool):
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens, {task.fields[rate]:.0f}/s"),
            TimeRemainingColumn(),
            disable=not show,
            transient=True,
        )
        self._task = self._bar.add_task("generating", total=total, tokens=0, rate=0.0)
        self._tokens = 0

    def __enter__(self) -> _Advance:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, out: StepOutput) -> None:
        self._tokens += len(out.token_ids)
        elapsed = self._bar.tasks[0].elapsed or 1e-9
        self._bar.update(
            self._task,
            advance=int(out.finish_reason is not None),
            tokens=self._tokens,
            rate=self._tokens / elapsed,
        )
