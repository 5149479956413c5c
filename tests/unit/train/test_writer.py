"""What the target writes, and the states that are kept of it, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foredraft.testing.heads import hidden_states
from foredraft.train.dataset import Text
from foredraft.train.writer import AS_IT_STANDS, Ask, Task, Writer
from foredraft.types import SamplingParams

from .conftest import LAYERS

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
DRAWN = SamplingParams(temperature=1.0, max_tokens=9, seed=5)


def one(ask: Ask) -> Task:
    yield ask


def check_states(model: Any, text: Text) -> None:
    """All of them and no other, as far as bfloat16 tells them apart: 8 bits."""
    token_ids = text.token_ids[None]
    with torch.no_grad():
        normed = model.model(token_ids).last_hidden_state
    wanted = torch.cat([hidden_states(model, token_ids, LAYERS[:-1]), normed], -1)[0, :-1]
    assert text.features.shape == wanted.shape
    assert torch.allclose(text.features.float(), wanted, rtol=2**-7, atol=1e-4)
    # Rounding shifts no row and no layer; a slip by one shows here even where states are alike.
    assert (text.features == wanted.bfloat16()).float().mean() > 0.99


def test_states_are_those_of_the_text(model: Any, new_writer: Callable[..., Writer]) -> None:
    prompts = [list(range(5, 5 + length)) for length in (1, 3, 40, 7, 12)]
    asks = [Ask(prompt, DRAWN if i % 2 else GREEDY, "chat", i) for i, prompt in enumerate(prompts)]
    # Three at a time, and prompts in chunks: some begin while others are in the middle.
    writer = new_writer(max_num_seqs=3, max_num_batched_tokens=16)
    texts = writer.run([one(ask) for ask in asks])
    assert [text.origin for text in texts] == [0, 1, 2, 3, 4]
    for ask, text in zip(asks, texts, strict=True):
        assert text.token_ids[: text.num_prompt_tokens].tolist() == ask.token_ids
        check_states(model, text)


def test_states_are_complete_where_a_stop_ends_the_answer(model: Any, new_writer: Callable[..., Writer]) -> None:
    prompt = [5, 6, 7]
    (free,) = new_writer().run([one(Ask(prompt, GREEDY, "chat"))])
    stop = int(free.token_ids[8])
    (text,) = new_writer(eos_token_ids=(stop,)).run([one(Ask(prompt, GREEDY, "chat"))])
    assert int(text.token_ids[-1]) == stop
    assert len(text.token_ids) < len(free.token_ids)
    check_states(model, text)


def test_states_of_preempted_texts_are_those_of_the_text(model: Any, new_writer: Callable[..., Writer]) -> None:
    writer = new_writer()
    engine, step = writer.engine, writer.engine.step
    preempted = []

    def step_and_preempt() -> Any:
        outputs = step()
        if len(preempted) < 2 and engine.target.num_passes in (4, 7):
            engine.preempt("text-1")
            preempted.append(engine.target.num_passes)
        return outputs

    engine.step = step_and_preempt  # type: ignore[method-assign]
    texts = writer.run([one(Ask(list(range(9, 9 + n)), GREEDY, "chat")) for n in (4, 6, 8)])
    assert len(preempted) == 2
    for text in texts:
        check_states(model, text)


def test_a_text_is_read_as_it_stands(model: Any, new_writer: Callable[..., Writer]) -> None:
    token_ids = torch.randint(0, 320, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    (text,) = new_writer().run([one(Ask(token_ids, AS_IT_STANDS, "text", num_prompt_tokens=11))])
    assert text.token_ids.tolist() == token_ids
    assert text.num_prompt_tokens == 11
    check_states(model, text)


def test_a_task_goes_on_with_what_was_written(new_writer: Callable[..., Writer], chat_tokenizer: Any) -> None:
    def twice() -> Task:
        first = yield Ask([5, 6], GREEDY)
        assert first is not None
        assert first.is_cut
        yield Ask(chat_tokenizer(first.text)["input_ids"], DRAWN, "code", 3)

    writer = new_writer()
    (text,) = writer.run([twice()])
    (direct,) = writer.run([one(Ask([5, 6], GREEDY, "chat"))])
    answer = chat_tokenizer.decode(direct.token_ids[2:], skip_special_tokens=True)
    assert text.token_ids[: text.num_prompt_tokens].tolist() == chat_tokenizer(answer)["input_ids"]
    assert (text.route, text.origin) == ("code", 3)


def test_reused_cache_entries_bring_their_states(model: Any, new_writer: Callable[..., Writer]) -> None:
    writer = new_writer(enable_prefix_caching=True)
    ask = Ask(list(range(5, 45)), GREEDY, "chat")
    (first,), (again,) = writer.run([one(ask)]), writer.run([one(ask)])
    check_states(model, again)
    assert again.token_ids.equal(first.token_ids)
    assert again.features.equal(first.features)
