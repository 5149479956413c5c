"""Which token is of which kind, and how it is shown; on a made-up engine."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from foredraft.cli import decoding
from foredraft.cli.decoding import Piece
from foredraft.types import FinishReason, RequestMetrics, SamplingParams, StepOutput


class Letters:
    """A tokenizer whose ids are code points."""

    def decode(self, ids, **options):
        return "".join(map(chr, ids))


class Engine:
    """Delivers what it is told: (text of the tokens, draft tokens, accepted ones, text the user gets)."""

    contract = "token-identical"

    def __init__(self, *steps):
        self.steps, self.aborted = list(steps), []

    def add_request(self, request):
        self.sequence = SimpleNamespace(request=request, metrics=RequestMetrics())
        return self.sequence

    @property
    def has_unfinished_requests(self):
        return bool(self.steps)

    def step(self):
        tokens, drafted, accepted, text = self.steps.pop(0)
        if tokens == "Ctrl-C":
            raise KeyboardInterrupt
        self.sequence.metrics.num_draft_tokens += drafted
        self.sequence.metrics.num_accepted_tokens += accepted
        reason = None if self.steps else FinishReason.LENGTH
        name = self.sequence.request.request_id
        return [StepOutput(name, [ord(letter) for letter in tokens], text, None, reason, None)]

    def abort(self, name):
        self.aborted.append(name)


def pieces_of(*steps):
    llm = SimpleNamespace(engine=Engine(*steps), tokenizer=Letters())
    follower = decoding.Follower(llm, "one", [1], SamplingParams())
    return [[(piece.text, piece.kind) for piece in new] for _, new in decoding.follow(llm, [follower])]


def test_kinds_of_tokens():
    assert pieces_of(("a", 0, 0, "a"), ("bcd", 4, 2, "bcd"), ("efg", 2, 2, "efg"), ("h", 3, 0, "h")) == [
        [("a", "plain")],
        [("b", "accepted"), ("c", "accepted"), ("d", "recovered")],
        [("e", "accepted"), ("f", "accepted"), ("g", "bonus")],
        [("h", "recovered")],
    ]


def test_a_block_cut_at_its_end_token_has_no_last_token():
    assert pieces_of(("abc", 5, 3, "abc")) == [[("a", "accepted"), ("b", "accepted"), ("c", "accepted")]]


def test_text_that_is_held_back_keeps_its_kind():
    """The engine holds back what may become a stop string, and cuts the string itself."""
    assert pieces_of(("ab", 1, 1, "a"), ("cd", 0, 0, "bc")) == [
        [("a", "accepted")],
        [("b", "bonus"), ("c", "plain")],
    ]


def test_ctrl_c_aborts_what_runs():
    engine = Engine(("ab", 0, 0, "ab"), ("Ctrl-C", 0, 0, ""))
    llm = SimpleNamespace(engine=engine, tokenizer=Letters())
    follower = decoding.Follower(llm, "one", [1], SamplingParams())
    shown = []
    with pytest.raises(KeyboardInterrupt):
        shown += [pieces for _, pieces in decoding.follow(llm, [follower])]
    assert engine.aborted == ["one"]


PIECES = [Piece("a [x] ", "plain"), Piece("bc", "accepted"), Piece("d", "recovered"), Piece("e", "bonus")]


def shown(with_drafts, **options):
    console = Console(file=io.StringIO(), **options)
    decoding.show(console, PIECES, with_drafts)
    return console.file.getvalue()


def test_drafts_stand_in_brackets_where_there_are_no_colours():
    assert shown(False) == "a [x] bcde"
    assert shown(True) == "a [x] [bc]de"


def test_drafts_are_coloured_on_a_terminal():
    text = shown(True, force_terminal=True, color_system="standard")
    assert "\x1b[32mbc\x1b[0m" in text
    assert "\x1b[33md\x1b[0m" in text
    assert "\x1b[36me\x1b[0m" in text
    assert text.startswith("a [x] ")


def test_the_last_line_counts_what_was_delivered():
    one = RequestMetrics(
        num_emitted_tokens=12, num_target_passes=4, num_draft_tokens=10, num_accepted_tokens=8, first_token_s=0.25,
        draft_s=0.1, target_s=1.7, verify_s=0.1, host_s=0.1,
    )  # fmt: skip
    assert decoding.stats_line([one], 2.0, "near-tie") == (
        "12 tokens in 2.00 s, 6.0 tok/s; first after 0.25 s; 3.00 tokens per target pass; "
        "8 of 10 draft tokens accepted; draft 5%, target 85%, verify 5%, host 5%; near-tie"
    )
    assert decoding.stats_line([one, one], 2.0, "near-tie").startswith("24 tokens in 2.00 s, 12.0 tok/s; 3.00 tokens")
