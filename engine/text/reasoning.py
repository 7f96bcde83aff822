"""The text of a completion, its reasoning apart from its answer where the model marks the reasoning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..errors import RequestError
from .detokenizer import Detokenizer
from .tokenizer import Tokenizer

OPENING, CLOSING = "<think>", "</think>"  # as Qwen3, DeepSeek-R1 and their kin mark it


class ReasoningMarks(NamedTuple):
    """The two tokens around a model's reasoning, and whether the prompt ends inside of it."""

    opening: int
    closing: int
    is_open: bool = False

    def after(self, prompt_ids: Sequence[int]) -> ReasoningMarks:
        """The marks of a completion that follows ``prompt_ids``."""
        for token_id in reversed(prompt_ids):
            if token_id in (self.opening, self.closing):
                return self._replace(is_open=token_id == self.opening)
        return self


def find_marks(tokenizer: Tokenizer) -> ReasoningMarks | None:
    """The marks of a model that has a token for each; ``None`` for any other model."""
    try:
        opening, closing = (tokenizer.encode(text, add_special_tokens=False) for text in (OPENING, CLOSING))
    except RequestError:
        return None
    return ReasoningMarks(opening[0], closing[0]) if len(opening) == len(closing) == 1 else None


class OutputText:
    """The text of one completion, token by token.

    With ``marks`` reasoning is kept apart: it begins with the opening mark, if no answer has begun, or in the prompt,
    and ends with the closing one; neither part begins with white space. Stop strings are looked for in each part.

    Text is kept in ``pieces`` and ``thoughts``, the pieces of the reasoning, to which tokens add at the end alone: a
    long text is joined by its reader and not after every token. None is empty; ``thoughts`` is None without reasoning.
    """

    __slots__ = ("_detokenizer", "_is_open", "_make", "_marks", "_num_pushed", "pieces", "thoughts")

    def __init__(self, make: Callable[[int], Detokenizer], marks: ReasoningMarks | None = None):
        """``make(n)`` is a detokenizer for the tokens after the first ``n``."""
        self.pieces: list[str] = []
        self.thoughts: list[str] | None = None
        self._make, self._marks = make, marks
        self._is_open = marks is not None and marks.is_open
        self._detokenizer = make(0)
        self._num_pushed = 0

    @property
    def text(self) -> str:
        """The text without the reasoning."""
        return "".join(self.pieces)

    @property
    def reasoning(self) -> str | None:
        """The reasoning; None unless there was some."""
        return None if self.thoughts is None else "".join(self.thoughts)

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return self._detokenizer.stopped

    def push(self, token_id: int) -> None:
        """Adds the text that ``token_id`` makes certain."""
        self._num_pushed += 1
        if self._marks is None:
            text = self._detokenizer.push(token_id)
            if text:
                self.pieces.append(text)
        elif token_id == (self._marks.closing if self._is_open else self._marks.opening) and not self.pieces:
            self._turn()
        else:
            self._add(self._detokenizer.push(token_id))

    def finish(self) -> None:
        """Adds the rest, after the last token."""
        self._add(self._detokenizer.finish())

    def _turn(self) -> None:
        """Switches to the other part at a mark."""
        self._add(self._detokenizer.finish())
        if self.stopped is None:
            self._is_open = not self._is_open
            self._detokenizer = self._make(self._num_pushed)

    def _add(self, text: str) -> None:
        if self._is_open and self.thoughts is None:
            self.thoughts = []
        part = self.thoughts if self._is_open and self.thoughts is not None else self.pieces
        text = text if part or self._marks is None else text.lstrip()
        if text:
            part.append(text)
