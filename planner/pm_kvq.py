"""PM-KVQ: K and V per token, halved in bits as memory runs short, each layer down to a floor of its own.

Source: PM-KVQ (arXiv 2505.18610). Floors follow from a memory budget: the least sum of sensitivities, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import torch

from qkv_engine.config import DENSE16, KVConfig, RungConfig
from qkv_engine.errors import ConfigError
from qkv_engine.fingerprint import ModelFingerprint

from .allocate import Choice
from .budget import Budget, check_least_bits, solve
from .profile import Profile
from .sensitivity import DENSE, Candidates

WIDTHS = (16, 8, 4, 2, 1)  # bits of a layer's K and V: floors, and the rungs that lead there
FORMATS = {width: DENSE if width == 16 else f"int{width}-token-128" for width in WIDTHS}
SINK, RECENT = 1, 128  # tokens that stay at 16 bits: the first and the newest


class PMKVQ(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method", tag="pm-kvq"):
    """Settings of PM-KVQ, which turns a profile into a ladder. Raises ``ConfigError`` for a value out of range.

    ``budget``: memory at the floor, such as "2.5bits" or "6GiB"; see ``Budget`` for ``context`` and ``requests``.
    ``least_bits``: of codes, 1 to 8; ``most_bits``: of a layer's floor, one of ``WIDTHS``: with 4 and 8 the paper's
    candidates for large budgets, with 2 and 4 those for small ones. ``sink``, ``recent``: first and newest tokens of a
    request that stay at 16 bits.
    """

    budget: str
    context: int
    requests: int = 1
    least_bits: int = 2  # one bit without calibration loses most answers
    most_bits: int = 16
    sink: int = SINK
    recent: int = RECENT

    def __post_init__(self) -> None:
        self.parsed()
        check_least_bits(self.least_bits)
        if self.most_bits not in WIDTHS or self.most_bits < self.least_bits:
            fitting = [width for width in WIDTHS if width >= self.least_bits]
            remedy = f"Choose from {', '.join(map(str, fitting))}, the widths of {self.least_bits} bits or more"
            raise ConfigError("not supported", field="most_bits", value=self.most_bits, remedy=remedy)
        KVConfig(name="plan", rungs=(DENSE16,), sink=self.sink, recent=self.recent)  # checks the windows

    def parsed(self) -> Budget:
        return Budget.parse(self.budget, self.context, self.requests)

    def solve(self, profile: Profile, model: ModelFingerprint) -> KVConfig:
        """The ladder of least predicted loss. Raises ``CapacityError``, naming the smallest budget that has one."""
        candidates = Candidates.of_layers(model.kv_of_layers, torch.bfloat16)
        items = [
            self._choices(profile, each, layer, kv.least_bits(self.least_bits))
            for layer, (kv, each) in enumerate(zip(model.kv_of_layers, candidates, strict=True))
        ]

        def make(floors: Sequence[Choice], num_rungs: int) -> KVConfig:
            """The ladder of some floors; ``WIDTHS`` fixes its rungs, whatever ``num_rungs`` is."""
            return progressive("plan", [int(floor.name) for floor in floors], self.sink, self.recent)

        budget, dense = self.parsed(), KVConfig(name="plan", rungs=(DENSE16,), sink=self.sink, recent=self.recent)
        return solve(budget, self.budget, items, make, (len(WIDTHS),), budget.shares(dense, model), model)

    def _choices(self, profile: Profile, candidates: Candidates, layer: int, least_bits: int) -> list[Choice]:
        """The widths that K and V of a layer may have, both the same."""
        k, v = profile.sensitivities.k, profile.sensitivities.v
        most_bits = max(self.most_bits, least_bits)
        return [
            Choice(
                str(width),
                candidates.k[name].nbytes + candidates.v[name].nbytes,
                k[name][layer] + v[name][layer],
            )
            for width, name in FORMATS.items()
            if least_bits <= width <= most_bits and name in candidates.k and name in k and name in v
        ]


def progressive(name: str, floors: Sequence[int], sink: int = SINK, recent: int = RECENT) -> KVConfig:
    """The ladder called ``name`` in which all layers are halved together, each down to its floor in bits."""
    steps = [tuple(max(width, floor) for floor in floors) for width in WIDTHS]
    rungs = [DENSE16]
    for width, (before, after) in zip(WIDTHS[1:], pairwise(steps), strict=True):
        if after != before:
            sides = tuple(FORMATS[bits] for bits in after)
            rungs.append(RungConfig(f"pm-kvq-{width}", sides, sides))
    return KVConfig(name=name, rungs=tuple(rungs), sink=sink, recent=recent)
