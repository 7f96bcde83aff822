"""Ground truth of a request: its answer when it runs alone, from its tokens, without books or device."""

from __future__ import annotations

from dataclasses import dataclass, field

from qkv_engine.request import Request

from .device import mix


@dataclass(slots=True, eq=False)
class Truth:
    """The KV values and the answer of one request that runs alone."""

    request: Request
    block: int
    sink: int
    values: list[int] = field(default_factory=list)  # by position
    tokens: list[int] = field(default_factory=list)  # prompt, and tokens given by the device
    _folds: list[int] = field(default_factory=list)  # over all full blocks, by their number
    emitted: tuple[int, ...] = ()  # tokens that reached the request

    def __post_init__(self) -> None:
        self.tokens = list(self.request.token_ids)

    def value(self, position: int) -> int:
        """The KV of the token at ``position``; stands for all tokens up to it."""
        values, tokens = self.values, self.tokens
        while len(values) <= position:
            values.append(mix(values[-1] if values else 1, tokens[len(values)]))
        return values[position]

    def spans(self, length: int) -> list[tuple[int, int]]:
        """Ranges of the sink and the blocks of ``length`` tokens."""
        first = min(length, self.sink)
        spans = [(0, first)] if first else []
        return spans + [(start, min(length, start + self.block)) for start in range(self.sink, length, self.block)]

    def fold(self, length: int) -> int:
        """All KV of the first ``length`` tokens in one number."""
        spans, folds = self.spans(length), self._folds
        full = [span for span in spans if span[1] < length]
        for start, end in full[len(folds) :]:
            folds.append(mix(folds[-1] if folds else 0, end - start, self.value(end - 1)))
        start, end = spans[-1]
        return mix(folds[len(full) - 1] if full else 0, end - start, self.value(end - 1))

    def next_token(self, length: int) -> int:
        """The token that follows the first ``length``."""
        return token(self.request.seed, length, self.fold(length))


def token(seed: int, position: int, fold: int) -> int:
    """The token that the fake model gives after ``fold``."""
    return mix(seed, position, fold) % 50
