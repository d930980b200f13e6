"""Laws of output that waits for moderation."""

from __future__ import annotations

import re
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from inference.agent.moderation.held_output import HeldOutput
from stream_fabric.limits import MODERATION_HOLD_CHARS, MODERATION_LOCAL_CHARS

_PIECES = st.lists(st.tuples(st.integers(0, 2), st.text("ab ", max_size=40)), max_size=60)


class Release:
    """Plays calls through held output, with a rule; keeps what goes on, by block and in order."""

    def __init__(self, rule: str = "$x", step: int = MODERATION_LOCAL_CHARS) -> None:
        self.held = HeldOutput(step)
        self.rule = re.compile(rule)
        self.texts = dict.fromkeys(range(3), "")
        self.order: list[int] = []
        self.flagged = False

    def _take(self, number: int, block: int, text: str) -> None:
        self.order.append(number)
        self.texts[block] += text

    def play(self, pieces: list[tuple[int, str]]) -> None:
        for number, (block, text) in enumerate(pieces):
            self.held.add_text(block, text, partial(self._take, number, block, text))
            self.check()
        self.held.close()
        self.check()

    def check(self) -> None:
        windows = self.held.windows()
        self.flagged = self.flagged or any(self.rule.search(window.text) for window in windows)
        if self.flagged:
            self.held.drop()
            return
        self.held.pass_(windows)
        for call in self.held.released():
            call()


@given(_PIECES, st.integers(1, 300))
def test_everything_goes_on_in_order_when_nothing_is_flagged(pieces: list[tuple[int, str]], step: int) -> None:
    release = Release(step=step)
    release.play(pieces)
    assert release.order == list(range(len(pieces)))
    assert release.texts == {block: "".join(text for at, text in pieces if at == block) for block in range(3)}
    assert release.held.empty
    assert release.held.chars == 0


@given(_PIECES, st.integers(0, 40), st.integers(0, 2), st.integers(1, 300), st.integers(1, MODERATION_HOLD_CHARS))
def test_no_part_of_a_flagged_phrase_goes_on(
    pieces: list[tuple[int, str]], at: int, block: int, step: int, length: int
) -> None:
    """The phrase comes in single characters, and other blocks go on between them."""
    phrase = "X" * length
    spread = [piece for char in phrase for piece in ((block, char), ((block + 1) % 3, "a"))]
    release = Release(phrase, step)
    release.play([*pieces[:at], *spread, *pieces[at:]])
    assert release.flagged
    assert "X" not in release.texts[block]
    before = "".join(text for number, text in pieces[:at] if number == block)
    assert before.startswith(release.texts[block])


@given(_PIECES)
def test_few_characters_wait(pieces: list[tuple[int, str]]) -> None:
    release = Release()
    for block, text in pieces:
        release.held.add_text(block, text, lambda: None)
        release.check()
        received = release.held._blocks[block]
        assert received.received - received.cleared <= MODERATION_HOLD_CHARS + MODERATION_LOCAL_CHARS
