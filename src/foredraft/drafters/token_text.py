"""What the tokens of a tokenizer spell, in bytes, and which tokens spell a text.

The two kinds of tokenizer that language models use are read the same way: byte-level ones (GPT-2's alphabet of bytes)
and those in the manner of sentencepiece (a mark for the space, single bytes as <0xE2>).
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

from foredraft.errors import IncompatibleDrafterError

_SINGLE_BYTE = re.compile("<0x([0-9A-F]{2})>")
_KNOWN_DECODERS = {"ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}
_ANCHOR = "\n"


class TokenText:
    """The tokens of one tokenizer as text. The tokenizer is not changed.

    Attributes:
        pieces: by token id, the bytes that the token adds to a text; None for special tokens and for ids without a
            token. Joined, the pieces of a text are its UTF-8 bytes.
        single_bytes: ids of sentencepiece's byte tokens.
        special: ids of special tokens by their content.
        start: what the tokenizer puts before every text (the begin token, or nothing).
        adds_space: a text begins with a space that is not in it (sentencepiece's dummy prefix).

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: of the model; ids from there on are left out.
        name: of the model, for the error.

    Raises:
        IncompatibleDrafterError: there is no tokenizer, or a token's text depends on its neighbours.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, name: str):
        decoders = _decoders(tokenizer, name)
        self._tokenizer = _without_special_tokens(tokenizer)
        special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        special_ids.update(tokenizer.all_special_ids)
        self.pieces: list[bytes | None] = [None] * vocab_size
        self.single_bytes: set[int] = set()
        self.special: dict[str, int] = {}
        for token, index in tokenizer.get_vocab().items():
            if index >= vocab_size:
                continue
            if index in special_ids:
                self.special[token] = index
                continue
            self.pieces[index] = _piece(token, decoders)
            if "ByteFallback" in decoders and _SINGLE_BYTE.fullmatch(token):
                self.single_bytes.add(index)
        with_start, without = list(tokenizer("a")["input_ids"]), self.encode_start("a")
        self.start = with_start[: _find(with_start, without)]
        self.adds_space = self.spell(without) == b" a"

    def encode_start(self, text: str) -> list[int]:
        """The tokens of a text that nothing stands before, without the begin token; no special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that follows another: no space is put before it; no special tokens."""
        if not self.adds_space:
            return self.encode_start(text)
        token_ids = self.encode_start(_ANCHOR + text)
        anchor = b" " + _ANCHOR.encode()
        for end in range(1, len(anchor) + 1):
            if self.spell(token_ids[:end]) == anchor:
                return token_ids[end:]
        return self.encode_start(text)

    def spell(self, token_ids: list[int]) -> bytes:
        """The bytes of tokens, up to the first that has none."""
        spelled = []
        for token_id in token_ids:
            piece = self.piece(token_id)
            if piece is None:
                break
            spelled.append(piece)
        return b"".join(spelled)

    def piece(self, token_id: int) -> bytes | None:
        return self.pieces[token_id] if token_id < len(self.pieces) else None


def shared_tokens(target: TokenText, draft: TokenText) -> dict[int, int]:
    """Token ids of the target with those of the draft model that spell the same, one for one.

    Special tokens correspond by content. Where a vocabulary spells something twice, as a token and as a single byte,
    the token is taken.
    """
    target_ids, draft_ids = _by_bytes(target), _by_bytes(draft)
    shared = {index: draft_ids[piece] for piece, index in target_ids.items() if piece in draft_ids}
    return shared | shared_special_tokens(target, draft)


def shared_special_tokens(source: TokenText, destination: TokenText) -> dict[int, int]:
    """Ids of special tokens with those of the same content in another vocabulary."""
    others = destination.special
    return {index: others[content] for content, index in source.special.items() if content in others}


def _without_special_tokens(tokenizer: Any) -> Tokenizer:
    """A second tokenizer on the same vocabulary that takes the names of special tokens for ordinary text.

    The option is a state of the tokenizer, and the caller's may be in use by another thread.
    """
    backend = tokenizer.backend_tokenizer
    twin = Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer"):
        if getattr(backend, part) is not None:
            setattr(twin, part, getattr(backend, part))
    twin.add_tokens([token for _, token in sorted(tokenizer.added_tokens_decoder.items())])
    twin.encode_special_tokens = True
    return twin


def _by_bytes(text: TokenText) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    for index, piece in enumerate(text.pieces):
        if piece and (piece not in found or found[piece] in text.single_bytes):
            found[piece] = index
    return found


def _decoders(tokenizer: Any, name: str) -> dict[str, list[tuple[str, str]]]:
    """The steps that make text of tokens, by kind, with what each replaces."""
    if tokenizer is None:
        raise IncompatibleDrafterError(
            f"{name} has no tokenizer, and use_heterogeneous_vocab needs that of both models; add it to its folder"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = None if backend is None else backend.decoder
    # The state of a decoder is its JSON; the tokenizer's own JSON has the vocabulary too, tens of megabytes.
    content: dict[str, Any] = {"type": "no decoder"} if decoder is None else json.loads(decoder.__getstate__())
    steps = content["decoders"] if content["type"] == "Sequence" else [content]
    kinds: dict[str, list[tuple[str, str]]] = {}
    for step in steps:
        is_regex = "Regex" in step.get("pattern", ())
        replaced = kinds.setdefault("regular expression" if is_regex else step["type"], [])
        if step["type"] == "Replace" and not is_regex:
            replaced.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Metaspace":
            replaced.append((step["replacement"], " "))
    if unknown := kinds.keys() - _KNOWN_DECODERS:
        raise IncompatibleDrafterError(
            f"the tokens of {name} are no pieces of text that can be joined (its tokenizer decodes by "
            f"{', '.join(sorted(unknown))}); use_heterogeneous_vocab needs a byte-level or sentencepiece tokenizer"
        )
    return kinds


def _piece(token: str, decoders: dict[str, list[tuple[str, str]]]) -> bytes:
    if "ByteFallback" in decoders and (match := _SINGLE_BYTE.fullmatch(token)):
        return bytes([int(match[1], 16)])
    if "ByteLevel" in decoders and all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    for replaced in decoders.values():
        for old, new in replaced:
            token = token.replace(old, new)
    return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies: its own if a byte can be seen, or from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(b): b for b in seen} | {chr(256 + i): b for i, b in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


def _find(token_ids: list[int], part: list[int]) -> int:
    """Where ``part`` begins in ``token_ids``; 0 if it is not there."""
    starts = range(len(token_ids) - len(part) + 1)
    return next((at for at in starts if token_ids[at : at + len(part)] == part), 0)
