"""What is decoded in a benchmark: two short prompts, a long one of exact length, or the user's own file.

The code edit has an answer that is mostly in the prompt already, the story has nothing to copy: between them
lies what drafting can win. The long prompt shows what a step costs once there is a context to read.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from foredraft.errors import InvalidOptionError

_ORDERS = """def load_orders(path):
    orders = []
    with open(path) as f:
        for line in f:
            order_id, customer, amount, status = line.strip().split(",")
            if status == "paid":
                orders.append({"id": order_id, "customer": customer, "amount": float(amount)})
    return orders
"""
SHORT_PROMPTS = {
    "code": "Add type hints and a docstring to this function. Return the full function.\n\n" + _ORDERS,
    "story": "Write a short story about a lighthouse keeper who finds a message in a bottle.",
}
LONG = "long"
PROMPT_NAMES = (*SHORT_PROMPTS, LONG)

_SUMMARISE = "Summarise the following text in five sentences.\n\n"
STORY_SUBJECTS = (
    "a lighthouse keeper who finds a message in a bottle",
    "two sisters who inherit a bakery in a small town",
    "a train driver on the last night of an old railway line",
    "a gardener who grows a plant that nobody can name",
    "a violin that is stolen twice in one day",
    "an astronomer who wakes to a second moon",
    "a village that votes to change its name",
    "a postman who reads one letter too many",
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts that are measured as one: their tokens and seconds are summed.

    Attributes:
        name: ``code``, ``story``, ``long``, or a category of the user's file.
        prompts: token ids, ready for the model, with its chat template applied if it has one.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


def check_prompt_names(names: Sequence[str]) -> None:
    """Raise :class:`InvalidOptionError` for an unknown prompt, naming the nearest known one."""
    for name in names:
        if name not in PROMPT_NAMES:
            near = get_close_matches(name, PROMPT_NAMES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidOptionError(f"there is no prompt {name!r}; known: {', '.join(PROMPT_NAMES)}{hint}")


def built_in_workload(name: str, tokenizer: Any, num_prompt_tokens: int) -> Workload:
    """One of the prompts that come with the package; ``num_prompt_tokens`` is the length of ``long``."""
    if name == LONG:
        return Workload(name, (tuple(long_prompt(tokenizer, num_prompt_tokens)),))
    return Workload(name, (tuple(encode(tokenizer, [_user(SHORT_PROMPTS[name])])),))


def story_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Different prompts of one kind, for batches; past the last subject a chapter number tells them apart."""
    prompts = []
    for index in range(count):
        chapter, subject = divmod(index, len(STORY_SUBJECTS))
        what = f"chapter {chapter + 1} of a story" if chapter else "a short story"
        prompts.append(encode(tokenizer, [_user(f"Write {what} about {STORY_SUBJECTS[subject]}.")]))
    return prompts


def long_prompt(tokenizer: Any, num_tokens: int) -> list[int]:
    """A request to summarise a text, cut so that the whole prompt has exactly ``num_tokens`` tokens.

    Beyond the length of the text that comes with the package, it begins again under another heading.

    Raises:
        InvalidOptionError: the request alone is longer than that.
    """
    mark = "|the text|"
    frame = _render(tokenizer, [_user(_SUMMARISE + mark)])
    before, _, after = frame.partition(mark)
    head, tail = _ids(tokenizer, before), _ids(tokenizer, after)
    room = num_tokens - len(head) - len(tail)
    if room < 1:
        raise InvalidOptionError(
            f"prompt_tokens={num_tokens} is too short: the request alone takes {len(head) + len(tail)} tokens"
        )
    page = resources.files("foredraft.measure").joinpath("long_text.txt").read_text(encoding="utf-8")
    text = _ids(tokenizer, page)
    telling = 2
    while len(text) < room:
        text += _ids(tokenizer, f"\nThe same winter, told for the {telling}th time\n\n" + page)
        telling += 1
    return [*head, *text[:room], *tail]


def dataset_workloads(file: Path, tokenizer: Any, per_category: int | None, max_prompt_tokens: int) -> list[Workload]:
    """Prompts of a JSONL file, one workload for each category.

    A line is an object with ``turns`` (Spec-Bench; the first turn is taken), ``prompt`` or ``messages``, and
    perhaps a ``category``; without one, the file's name stands for it.

    Args:
        per_category: take the first so many of each category; None takes all.
        max_prompt_tokens: what the model has room for.

    Raises:
        InvalidOptionError: the file or a line cannot be used; the line's number is given.
    """
    groups: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for number, record in read_jsonl(file):
        category = str(record.get("category", file.stem))
        if per_category is None or len(groups[category]) < per_category:
            ids = encode(tokenizer, _messages(record, f"{file}, line {number}"))
            if len(ids) > max_prompt_tokens:
                raise InvalidOptionError(
                    f"{file}, line {number}: the prompt has {len(ids)} tokens and there is room for "
                    f"{max_prompt_tokens}; leave the line out or lower max_tokens"
                )
            groups[category].append(tuple(ids))
    if not groups:
        raise InvalidOptionError(f"{file} holds no prompts; expected one JSON object a line")
    return [Workload(name, tuple(prompts)) for name, prompts in groups.items()]


def encode(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a conversation; without a chat template, those of its texts."""
    return _ids(tokenizer, _render(tokenizer, messages))


def _render(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    if getattr(tokenizer, "chat_template", None):
        return str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False))
    start = getattr(tokenizer, "bos_token", None) or ""
    return start + "\n\n".join(message["content"] for message in messages)


def _ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text that already holds its special tokens."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def read_jsonl(file: Path) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a file, one a line, with the numbers of their lines.

    Raises:
        InvalidOptionError: it cannot be read, or a line is no JSON object; the line's number is given.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOptionError(f"the dataset {file} cannot be read: {error}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise InvalidOptionError(f"{file}, line {number} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise InvalidOptionError(f"{file}, line {number} is not a JSON object")
        records.append((number, record))
    return records


def _messages(record: Mapping[str, Any], where: str) -> list[dict[str, str]]:
    if isinstance(record.get("messages"), list) and record["messages"]:
        return list(record["messages"])
    turns = record.get("turns")
    text = turns[0] if isinstance(turns, list) and turns else record.get("prompt")
    if not isinstance(text, str) or not text:
        raise InvalidOptionError(
            f"{where} has none of 'turns', 'prompt' and 'messages' with a text in it; "
            f"it has {', '.join(map(repr, record)) or 'nothing'}"
        )
    return [_user(text)]
