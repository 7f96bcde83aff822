"""The state of a submission after a step, as it is handed to the reader.

No garbage collector looks at reports and outputs (``gc=False``): with one for each request and step it would run all
the time. They refer to nothing that refers to them.
"""

from __future__ import annotations

import msgspec

from ..request import CompletionOutput, Logprob, Request, RequestOutput


class OutputLength(msgspec.Struct, gc=False, frozen=True):
    """The length of a completion, or of the part that its reader has had: tokens, pieces of text and of reasoning."""

    num_tokens: int = 0
    num_pieces: int = 0
    num_thoughts: int = 0


class Had(msgspec.Struct, gc=False, frozen=True):
    """The part of a completion that its reader has had; ``text`` and ``reasoning`` are kept for whole outputs alone."""

    length: OutputLength = OutputLength()
    text: str = ""
    reasoning: str = ""


class CompletionReport(msgspec.Struct, gc=False):
    """The state of a completion; ``output`` has no text and no lists yet.

    ``length`` says how much of ``pieces``, ``thoughts``, ``logprobs`` and the request's tokens belongs to the state;
    up to there they never change.
    """

    output: CompletionOutput
    request: Request
    logprobs: list[dict[int, Logprob]] | None
    pieces: list[str]
    thoughts: list[str] | None
    length: OutputLength

    def fill(self, had: Had, is_delta: bool) -> Had:
        """Copies text and lists into ``output``; returns the part that its reader has had after that.

        ``is_delta``: only those that are new to a reader who has had ``had``.
        """
        output, last, prompt = self.output, self.length, self.request.num_prompt_tokens
        first = had.length
        token_ids = self.request.token_ids
        output.delta = "".join(self.pieces[first.num_pieces : last.num_pieces])
        output.delta_token_ids = token_ids[prompt + first.num_tokens : prompt + last.num_tokens]
        if self.thoughts is not None:
            output.reasoning_delta = "".join(self.thoughts[first.num_thoughts : last.num_thoughts])
        if is_delta:
            text, reasoning, start = output.delta, output.reasoning_delta, first.num_tokens
            had = Had(last)
        else:
            text, reasoning, start = had.text + output.delta, had.reasoning + output.reasoning_delta, 0
            had = Had(last, text, reasoning)
        output.text = text
        output.reasoning = None if self.thoughts is None else reasoning
        output.token_ids = token_ids[prompt + start : prompt + last.num_tokens]
        output.logprobs = None if self.logprobs is None else self.logprobs[start : last.num_tokens]
        return had


class Report(msgspec.Struct, gc=False):
    """An output whose text and lists are copied only when it is read.

    Copied after every step they would take time that grows with the square of their length.
    """

    output: RequestOutput
    completions: list[CompletionReport]
    is_delta: bool = False  # the reader wants what is new alone

    def read(self, had: list[Had]) -> tuple[RequestOutput, list[Had]]:
        """The output for a reader who has had ``had`` of each completion, and the parts that it has had after that.

        For the reader's thread; interrupted, it may be called again.
        """
        before = had or [Had()] * len(self.completions)
        after = [one.fill(had, self.is_delta) for one, had in zip(self.completions, before, strict=True)]
        return self.output, after
