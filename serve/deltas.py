"""What is new in the completions of a request, which outputs hold whole."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from qkv_engine import CompletionOutput

from .logprobs import Entry


class Delta(msgspec.Struct, frozen=True):
    """A part of one completion: its text, reasoning and tokens, and how the completion ended if this is the end."""

    index: int
    text: str
    reasoning: str
    token_ids: list[int]
    logprobs: Sequence[Entry | None] | None  # None for a prompt's first token
    finish_reason: str | None
    stop_reason: int | str | None

    @classmethod
    def whole(cls, completion: CompletionOutput) -> Delta:
        """All of ``completion``."""
        return cls.of(completion, completion.text, completion.reasoning or "", 0)

    @classmethod
    def of(cls, completion: CompletionOutput, text: str, reasoning: str, start: int) -> Delta:
        """``text`` and ``reasoning`` of ``completion``, with its tokens from ``start`` on."""
        logprobs = None if completion.logprobs is None else completion.logprobs[start:]
        return cls(
            index=completion.index,
            text=text,
            reasoning=reasoning,
            token_ids=completion.token_ids[start:],
            logprobs=logprobs,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )


class DeltaReader:
    """Takes from each output of a stream what the outputs before did not have."""

    def __init__(self) -> None:
        self._num_read: dict[int, int] = {}  # tokens by completion
        self._finished: set[int] = set()

    def read(self, completion: CompletionOutput) -> Delta | None:
        """The new part of ``completion``; None for one whose end was read."""
        if completion.index in self._finished:
            return None
        if completion.finished:
            self._finished.add(completion.index)
        start = self._num_read.get(completion.index, 0)
        self._num_read[completion.index] = len(completion.token_ids)
        return Delta.of(completion, completion.delta, completion.reasoning_delta, start)
