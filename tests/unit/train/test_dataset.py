"""Stores of texts: what is written comes back, pieces are whole, the split does not move."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foredraft.errors import InvalidOptionError
from foredraft.train.dataset import StoreMeta, Text, TextStore, origin_of

META = StoreMeta(target="tiny", fingerprint="0123", layers=(1, 2), hidden_size=3, vocab_size=50, recipe="by hand")


def make_text(seed: int, length: int = 7, prompt: int = 3, origin: int | None = None) -> Text:
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(0, 50, (length,), generator=generator)
    features = torch.randn(length - 1, 6, generator=generator).bfloat16()
    return Text(token_ids, prompt, features, "code" if seed % 2 else "chat", seed if origin is None else origin)


def same(one: Text, other: Text) -> bool:
    return (
        torch.equal(one.token_ids, other.token_ids)
        and torch.equal(one.features, other.features)
        and (one.num_prompt_tokens, one.route, one.origin) == (other.num_prompt_tokens, other.route, other.origin)
    )


def test_texts_come_back_as_they_were(tmp_path: Path) -> None:
    texts = [make_text(seed, length) for seed, length in enumerate((7, 4, 12, 5))]
    store = TextStore(tmp_path, META)
    store.append(texts[:3], seconds=2.0)
    store.append(texts[3:], seconds=1.0)
    for opened in (store, TextStore(tmp_path), TextStore(tmp_path, META)):
        assert len(opened) == 4
        assert opened.num_pieces == 2
        assert opened.num_tokens == 7 + 4 + 12 + 5 - 4 * 3
        assert opened.tokens_per_second == pytest.approx(16 / 3)
        assert opened.meta == META
        assert all(same(one, other) for one, other in zip(opened, texts, strict=True))
        assert same(opened[-1], texts[-1])
    assert store[2].features.dtype == torch.bfloat16
    assert store[2].token_ids.dtype == torch.int64


def test_what_was_left_of_a_killed_run_is_no_piece(tmp_path: Path) -> None:
    store = TextStore(tmp_path, META)
    store.append([make_text(0)])
    (tmp_path / "piece-00001.safetensors.part").write_bytes(b"half a piece")
    again = TextStore(tmp_path, META)
    assert len(again) == 1
    again.append([make_text(1)])
    assert same(TextStore(tmp_path)[1], make_text(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "piece-00000.safetensors",
        "piece-00001.safetensors",
        "store.json",
    ]


def test_stores_are_joined(tmp_path: Path) -> None:
    one, other = TextStore(tmp_path / "one", META), TextStore(tmp_path / "other", replace(META, recipe="of files"))
    one.append([make_text(0), make_text(1)], seconds=2.0)
    one.append([make_text(2)], seconds=1.0)
    other.append([make_text(3)], seconds=4.0)
    other.append([make_text(4), make_text(5)], seconds=1.0)
    one.join(other)
    assert all(same(text, make_text(seed)) for seed, text in enumerate(one))
    assert (len(one), one.num_pieces, one.seconds, one.meta.recipe) == (6, 4, 8.0, "by hand; of files")
    with pytest.raises(InvalidOptionError, match="hidden states of layers"):
        one.join(TextStore(tmp_path / "third", replace(META, layers=(1, 3))))


@pytest.mark.parametrize(
    ("change", "there", "here"),
    [
        ({"target": "other", "fingerprint": "4567"}, "tiny (0123)", "other (4567)"),
        ({"layers": (1, 3)}, "(1, 2)", "(1, 3)"),
        ({"recipe": "seed=2"}, "by hand", "seed=2"),
    ],
)
def test_a_store_is_not_continued_with_something_else(
    tmp_path: Path, change: dict[str, object], there: str, here: str
) -> None:
    TextStore(tmp_path, META)
    with pytest.raises(InvalidOptionError) as caught:
        TextStore(tmp_path, replace(META, **change))
    assert there in str(caught.value)
    assert here in str(caught.value)


def test_the_same_target_may_have_another_name(tmp_path: Path) -> None:
    TextStore(tmp_path, META)
    assert TextStore(tmp_path, replace(META, target="/models/tiny")).meta == META


def test_a_folder_without_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="no store.json"):
        TextStore(tmp_path)


def test_the_split_stays_when_texts_are_added(tmp_path: Path) -> None:
    store = TextStore(tmp_path, META)
    store.append([make_text(seed, origin=origin_of([seed])) for seed in range(200)])
    kept, held = store.split(0.1)
    assert sorted(kept + held) == list(range(200))
    assert 8 <= len(held) <= 34  # 20 expected, standard deviation 4.2
    store.append([make_text(seed, origin=origin_of([seed])) for seed in range(200, 260)])
    more_kept, more_held = store.split(0.1)
    assert more_held[: len(held)] == held
    assert more_kept[: len(kept)] == kept


def test_texts_of_one_origin_are_not_split(tmp_path: Path) -> None:
    store = TextStore(tmp_path, META)
    store.append([make_text(seed, origin=seed // 2) for seed in range(100)])
    _, held = store.split(0.3)
    assert held
    assert all((index ^ 1) in held for index in held)


def test_something_is_held_out_of_a_small_store(tmp_path: Path) -> None:
    store = TextStore(tmp_path, META)
    store.append([make_text(seed) for seed in range(3)])
    kept, held = store.split(1e-6)
    assert (len(kept), len(held)) == (2, 1)
    alone = TextStore(tmp_path / "alone", META)
    alone.append([make_text(0)])
    with pytest.raises(InvalidOptionError, match="make more texts"):
        alone.split(0.1)
