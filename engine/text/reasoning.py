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
    """

    __slots__ = ("_detokenizer", "_is_open", "_make", "_marks", "_num_pushed", "reasoning", "text")

    def __init__(self, make: Callable[[int], Detokenizer], marks: ReasoningMarks | None = None):
        """``make(n)`` is a detokenizer for the tokens after the first ``n``."""
        self.text = ""
        self.reasoning: str | None = None  # None unless there was some
        self._make, self._marks = make, marks
        self._is_open = marks is not None and marks.is_open
        self._detokenizer = make(0)
        self._num_pushed = 0

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return self._detokenizer.stopped

    def push(self, token_id: int) -> None:
        """Adds the text that ``token_id`` makes certain."""
        self._num_pushed += 1
        if self._marks is None:
            self.text += self._detokenizer.push(token_id)
        elif token_id == (self._marks.closing if self._is_open else self._marks.opening) and not self.text:
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
        if self._is_open:
            self.reasoning = (self.reasoning or "") + (text if self.reasoning else text.lstrip())
        else:
            self.text += text if self.text or self._marks is None else text.lstrip()
