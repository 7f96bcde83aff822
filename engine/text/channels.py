"""Answers in messages, each with a channel: reasoning in "analysis", what the user reads in others (gpt-oss).

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

A message may go to a function, which its header names ("to=functions.NAME"): it stays in the text, header included.
Source: OpenAI's harmony, https://github.com/openai/harmony.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .reasoning import GrammarGate, OutputText
from .stop_strings import StopFinder
from .text_stream import TextStream
from .tokenizer import Tokenizer

START, CHANNEL, CONSTRAIN, MESSAGE, END = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"
ROLE = "assistant"
CALL_MESSAGE = f"{START}{ROLE}"  # what a message to somebody begins with in the text
MAX_HEADER_TOKENS = 128
_BETWEEN = "\n\n"  # messages


class ChannelMarks(NamedTuple):
    """The tokens of messages and their headers, and whether the prompt ends within a message.

    ``ends`` are those that end a message; ``to`` is the first token of a recipient before the channel.
    """

    start: int
    channel: int
    message: int
    end: int
    role: int
    analysis: int
    final: int
    to: int
    ends: frozenset[int]
    decode: Callable[[Sequence[int]], str]
    is_open: bool = False

    def after(self, prompt_ids: Sequence[int]) -> ChannelMarks:
        """The marks of a completion that follows ``prompt_ids``."""
        return self._replace(is_open=prompt_ids[-1:] == [self.message])

    def output_text(self, make: Callable[[], TextStream], stops: StopFinder | None, min_tokens: int) -> OutputText:
        """The text of such a completion; the arguments are those of ``OutputText``."""
        return ChannelText(make, stops, self, min_tokens)

    def gate(self, allows: Callable[[int], bool]) -> GrammarGate:
        """The analysis, and the header of the final message unless the grammar writes headers itself."""
        return ChannelGate(self, has_headers=allows(self.channel) or allows(self.start))


class ChannelText(OutputText):
    """The text of messages, told apart by their headers. A message without a header is an answer."""

    __slots__ = ("_channels", "_header")

    def __init__(
        self, make: Callable[[], TextStream], stops: StopFinder | None, channels: ChannelMarks, min_tokens: int
    ):
        super().__init__(make, stops, min_tokens=min_tokens)
        self._channels = channels
        self._header: list[int] | None = None if channels.is_open else []  # None within a message

    def _read(self, token_id: int) -> None:
        channels, header = self._channels, self._header
        if header is None:
            self.num_reasoning_tokens += self._is_open
            if token_id in channels.ends:
                self._end()
            elif token_id in (channels.start, channels.channel):  # the end was forgotten
                self._end()
                self._header = [token_id]
            else:
                self._add(self._stream.push(token_id))
        elif token_id == channels.message:
            self._open(header)
        elif header or token_id in (channels.start, channels.channel, channels.to):
            header.append(token_id)
            if len(header) > MAX_HEADER_TOKENS:
                self._begin_message(is_open=False)
                self._add(channels.decode(header))
        elif token_id not in channels.ends:
            self._begin_message(is_open=False)
            self._add(self._stream.push(token_id))

    def _end(self) -> None:
        self._add(self._stream.finish())
        self._header = []

    def _open(self, header: list[int]) -> None:
        """Begins the message behind ``header``."""
        written = self._channels.decode(header).removeprefix(START).removeprefix(ROLE)
        is_analysis = written.strip() == f"{CHANNEL}analysis"
        self._begin_message(is_open=is_analysis)
        if is_analysis:
            self.num_reasoning_tokens += len(header) + 1
        elif "to=" in written:
            self._add(f"{CALL_MESSAGE}{written}{MESSAGE}")

    def _begin_message(self, *, is_open: bool) -> None:
        self._header = None
        self._begin(is_open=is_open)
        if self.thoughts if is_open else self.pieces:
            self._add(_BETWEEN)


class _State(enum.Enum):
    FIRST = enum.auto()  # nothing has come
    CHANNEL = enum.auto()  # its mark has come
    ANALYSIS = enum.auto()  # and its name
    FREE = enum.auto()  # within the analysis
    HEADER = enum.auto()  # of the final message
    GRAMMAR = enum.auto()


class ChannelGate:
    """The analysis, if the completion begins with one, and the header of the final message."""

    def __init__(self, channels: ChannelMarks, *, has_headers: bool):
        """``has_headers``: the grammar writes the headers of messages itself."""
        self._channels, self._has_headers = channels, has_headers
        self._header = [channels.start, channels.role, channels.channel, channels.final, channels.message]
        self._state = _State.GRAMMAR if channels.is_open else _State.FIRST

    @property
    def is_free(self) -> bool:
        return self._state is _State.FREE

    @property
    def pending(self) -> Sequence[int]:
        return (self._channels.channel,) if self._state is _State.CHANNEL and self._has_headers else ()

    @property
    def extra(self) -> Sequence[int]:
        channels = self._channels
        return {_State.FIRST: (channels.channel,), _State.CHANNEL: (channels.analysis,)}.get(self._state, ())

    @property
    def forced(self) -> Sequence[int]:
        channels = self._channels
        if self._state is _State.ANALYSIS:
            return (channels.message,)
        if self._state is _State.HEADER:
            return (self._header[0],)
        if self._has_headers:
            return ()
        return {_State.FIRST: (channels.channel,), _State.CHANNEL: (channels.final,)}.get(self._state, ())

    def feed(self, token_id: int) -> Sequence[int]:
        """The tokens that turn out to be the grammar's once ``token_id`` has come."""
        channels, state = self._channels, self._state
        if state is _State.GRAMMAR:
            return (token_id,)
        if state is _State.FIRST:
            self._state = _State.CHANNEL if token_id == channels.channel else _State.GRAMMAR
            return () if self._state is _State.CHANNEL else (token_id,)
        if state is _State.CHANNEL and token_id == channels.analysis:
            self._state = _State.ANALYSIS
        elif state is _State.CHANNEL and self._has_headers:
            self._state = _State.GRAMMAR
            return (channels.channel, token_id)
        elif state is _State.CHANNEL:  # the final message's, of whose header its mark is still to come
            self._state, self._header = _State.HEADER, [channels.message]
        elif state is _State.ANALYSIS:
            self._state = _State.FREE
        elif state is _State.FREE and token_id == channels.end:
            self._state = _State.GRAMMAR if self._has_headers else _State.HEADER
        elif state is _State.HEADER:
            self._header = self._header[1:]
            self._state = _State.HEADER if self._header else _State.GRAMMAR
        return ()


def find_channels(tokenizer: Tokenizer) -> ChannelMarks | None:
    """The marks of a model that has a token for each part of a header; None for any other model."""
    names = START, CHANNEL, MESSAGE, END, ROLE, "analysis", "final", " to"
    found = [tokenizer.token_of(name) for name in names]
    ids = [each for each in found if each is not None]
    if len(ids) < len(names):
        return None
    ends = {tokenizer.token_of(name) for name in (END, "<|call|>", "<|return|>")}
    known = frozenset(each for each in ends if each is not None)
    start, channel, message, end, role, analysis, final, to = ids
    return ChannelMarks(
        start, channel, message, end, role, analysis, final, to, known, lambda given: tokenizer.decode(given, False)
    )
