"""The state of a submission after a step, as it is handed to the reader.

No garbage collector looks at reports and outputs (``gc=False``): with one for each request and step it would run all
the time. They refer to nothing that refers to them.
"""

from __future__ import annotations

import msgspec

from ..request import CompletionOutput, Logprob, Request, RequestOutput


class CompletionReport(msgspec.Struct, gc=False):
    """The state of a completion when it had ``num_tokens`` output tokens; ``output`` has no lists yet."""

    output: CompletionOutput
    request: Request
    logprobs: list[dict[int, Logprob]] | None
    num_tokens: int

    def fill(self) -> None:
        """Copies the lists into ``output``. Their first ``num_tokens`` entries never change."""
        start = self.request.num_prompt_tokens
        self.output.token_ids = self.request.token_ids[start : start + self.num_tokens]
        self.output.logprobs = None if self.logprobs is None else self.logprobs[: self.num_tokens]


class Report(msgspec.Struct, gc=False):
    """An output whose lists are copied only when it is read.

    Copied after every step they would take time that grows with the square of their length.
    """

    output: RequestOutput
    completions: list[CompletionReport]

    def read(self) -> RequestOutput:
        """The whole output. For the reader's thread; interrupted, it may be called again."""
        for completion in self.completions:
            completion.fill()
        return self.output
