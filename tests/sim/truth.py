"""Ground truth of a request: its answer when it runs alone, from its tokens, without books or device."""

from __future__ import annotations

from dataclasses import dataclass, field

from qkv_engine.request import Request

from .device import mix
from .options import Group


@dataclass(slots=True, eq=False)
class Truth:
    """The KV values and the answer of one request that runs alone."""

    request: Request
    groups: tuple[Group, ...]
    values: list[int] = field(default_factory=list)  # by position
    tokens: list[int] = field(default_factory=list)  # prompt, and tokens given by the device
    _folds: list[list[int]] = field(default_factory=list)  # by group, over all full blocks, by their number
    emitted: tuple[int, ...] = ()  # tokens that reached the request

    def __post_init__(self) -> None:
        self.tokens = list(self.request.token_ids)
        self._folds = [[] for _ in self.groups]

    def value(self, position: int) -> int:
        """The KV of the token at ``position``; stands for all tokens up to it."""
        values, tokens = self.values, self.tokens
        while len(values) <= position:
            values.append(mix(values[-1] if values else 1, tokens[len(values)]))
        return values[position]

    def value_in(self, index: int, position: int) -> int:
        """The KV of that token in a group."""
        return mix(index, self.value(position)) if index else self.value(position)

    def state(self, index: int, length: int) -> int:
        """The state of a layer after the first ``length`` tokens."""
        return mix(-1 - index, self.value(length - 1))

    def spans(self, length: int) -> list[tuple[int, int]]:
        """Ranges of the sink and the blocks of ``length`` tokens, the same in all groups."""
        sink, block = self.groups[0].sink, self.groups[0].block
        first = min(length, sink)
        spans = [(0, first)] if first else []
        return spans + [(start, min(length, start + block)) for start in range(sink, length, block)]

    def fold(self, length: int) -> int:
        """All KV that the last of the first ``length`` tokens sees, in one number."""
        folds = [self._fold(index, length) for index in range(len(self.groups))]
        return folds[0] if len(folds) == 1 else mix(*folds)

    def _fold(self, index: int, length: int) -> int:
        """The same in one group."""
        spans, group = self.spans(length), self.groups[index]
        if group.visible is not None:
            fold, first = 0, group.first_seen(length - 1)
            for start, end in spans:
                if end > first:
                    fold = mix(fold, end - start, self.value_in(index, end - 1))
            return fold
        full, folds = [span for span in spans if span[1] < length], self._folds[index]
        for start, end in full[len(folds) :]:
            folds.append(mix(folds[-1] if folds else 0, end - start, self.value_in(index, end - 1)))
        start, end = spans[-1]
        return mix(folds[len(full) - 1] if full else 0, end - start, self.value_in(index, end - 1))

    def next_token(self, length: int) -> int:
        """The token that follows the first ``length``."""
        return token(self.request.seed, length, self.fold(length))


def token(seed: int, position: int, fold: int) -> int:
    """The token that the fake model gives after ``fold``."""
    return mix(seed, position, fold) % 50
