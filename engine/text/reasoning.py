"""The text of a completion, its reasoning apart from its answer where the model marks the reasoning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from .stop_strings import StopFinder
from .text_stream import TextStream


class Marks(Protocol):
    """How a model tells its reasoning from its answer."""

    def after(self, prompt_ids: Sequence[int]) -> Marks:
        """The marks of a completion that follows ``prompt_ids``."""
        ...

    def output_text(self, make: Callable[[], TextStream], stops: StopFinder | None, min_tokens: int) -> OutputText:
        """The text of such a completion; the arguments are those of ``OutputText``."""
        ...

    def gate(self, allows: Callable[[int], bool]) -> GrammarGate:
        """What stands before a grammar's text; ``allows`` tells whether the grammar may begin with a token."""
        ...


class GrammarGate(Protocol):
    """The tokens of a completion that are none of its grammar's: the reasoning, and marks."""

    @property
    def is_free(self) -> bool:
        """Whether any token may come next."""
        ...

    @property
    def forced(self) -> Sequence[int]:
        """The tokens of which one must come next; none where the grammar says."""
        ...

    @property
    def extra(self) -> Sequence[int]:
        """Tokens that may come beside those that the grammar allows."""
        ...

    @property
    def pending(self) -> Sequence[int]:
        """Tokens that came, and are the grammar's unless one of ``extra`` comes next."""
        ...

    def feed(self, token_id: int) -> Sequence[int]:
        """The tokens that turn out to be the grammar's once ``token_id`` has come."""
        ...


class ReasoningMarks(NamedTuple):
    """The two tokens around a model's reasoning, and whether the prompt ends inside of it.

    ``label`` is a word that the reasoning begins with, which is no part of it.
    """

    opening: int
    closing: int
    is_open: bool = False
    label: str = ""

    def after(self, prompt_ids: Sequence[int]) -> ReasoningMarks:
        """The marks of a completion that follows ``prompt_ids``."""
        for token_id in reversed(prompt_ids):
            if token_id in (self.opening, self.closing):
                return self._replace(is_open=token_id == self.opening)
        return self

    def output_text(self, make: Callable[[], TextStream], stops: StopFinder | None, min_tokens: int) -> OutputText:
        """The text of such a completion; the arguments are those of ``OutputText``."""
        return OutputText(make, stops, self, min_tokens)

    def gate(self, allows: Callable[[int], bool]) -> GrammarGate:
        """The reasoning before a grammar's text."""
        return ReasoningGate(self)


class ReasoningGate:
    """Reasoning that the prompt or the first token has begun."""

    forced: Sequence[int] = ()
    pending: Sequence[int] = ()

    def __init__(self, marks: ReasoningMarks):
        self._marks, self.is_free = marks, marks.is_open
        self.extra: Sequence[int] = (marks.opening,)

    def feed(self, token_id: int) -> Sequence[int]:
        """The tokens that turn out to be the grammar's once ``token_id`` has come."""
        is_first, self.extra = bool(self.extra), ()
        if self.is_free:
            self.is_free = token_id != self._marks.closing
            return ()
        self.is_free = is_first and token_id == self._marks.opening
        return () if self.is_free else (token_id,)


class OutputText:
    """The text of one completion, token by token.

    With ``marks`` reasoning is kept apart: it begins with the opening mark, if no answer has begun, or in the prompt,
    and ends with the closing one; neither part begins with white space. Stop strings are looked for in the answer
    alone, as its reader gets it; as in vLLM a match counts only if a token after the first ``min_tokens`` completes it.

    Text is kept in ``pieces`` and ``thoughts``, the pieces of the reasoning, to which tokens add at the end alone: a
    long text is joined by its reader and not after every token. None is empty; ``thoughts`` is None without reasoning.
    ``num_reasoning_tokens`` are those of the reasoning, its marks included.
    """

    __slots__ = (
        *("_is_open", "_label", "_make", "_mark", "_marks", "_num_pending", "_stops", "_stream"),
        *("num_reasoning_tokens", "pieces", "thoughts"),
    )

    def __init__(
        self,
        make: Callable[[], TextStream],
        stops: StopFinder | None = None,
        marks: ReasoningMarks | None = None,
        min_tokens: int = 0,
    ):
        """``make`` gives each part the stream that makes text of its tokens."""
        self.pieces: list[str] = []
        self.thoughts: list[str] | None = None
        self._make, self._stops, self._marks, self._num_pending = make, stops, marks, min_tokens
        self.num_reasoning_tokens = 0
        self._label = "" if marks is None else marks.label  # what is still to come of it
        self._mark: int | None = None  # the token that ends the part; None once the answer has begun, and without marks
        self._begin(is_open=marks is not None and marks.is_open)

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
        return None if self._stops is None else self._stops.found

    def push(self, token_id: int) -> None:
        """Adds the text that ``token_id`` makes certain."""
        self._read(token_id)
        if self._num_pending:
            self._num_pending -= 1

    def _read(self, token_id: int) -> None:
        self.num_reasoning_tokens += self._is_open or (token_id == self._mark)
        if token_id == self._mark:
            self._add(self._stream.finish())
            self._begin(is_open=not self._is_open)
        else:
            self._add(self._stream.push(token_id))

    def finish(self) -> None:
        """Adds the rest, after the last token; it may still hold a stop string."""
        self._add(self._stream.finish())
        if self._stops is not None and (held := self._stops.finish()):
            self.pieces.append(held)

    def _begin(self, is_open: bool) -> None:
        """Begins the reasoning, or what may be the answer."""
        self._is_open, self._stream = is_open, self._make()
        if self._marks is not None:
            self._mark = self._marks.closing if is_open else self._marks.opening

    def _add(self, text: str) -> None:
        if self._is_open:
            self._think(text)
            return
        if self._mark is not None and (text := text.lstrip()):
            self._mark = None
        if self._stops is not None:
            text = self._stops.push(text, may_stop=not self._num_pending)
        if text:
            self.pieces.append(text)

    def _think(self, text: str) -> None:
        while text and self._label:
            self._label, text = (self._label[1:], text[1:]) if text[0] == self._label[0] else ("", text)
        if self.thoughts is None:
            self.thoughts = [text] if (text := text.lstrip()) else None
        elif text:
            self.thoughts.append(text)
