"""The planner: a format of any family for K and V of each layer, of least predicted loss within a memory budget.

The floor is solved first, exactly. The rungs above it follow from the lowest up: their budgets fall in equal ratios,
and each may only have formats from which the rung below can be reached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import msgspec
import torch

from qkv_engine.config import DENSE16, KVConfig, RungConfig
from qkv_engine.device.layouts import SIDES
from qkv_engine.errors import ConfigError
from qkv_engine.fingerprint import ModelFingerprint
from qkv_engine.kernels.formats import Side, check_step, make_format

from .allocate import Choice, allocate
from .budget import Budget, check_least_bits, solve, weigh
from .profile import Profile
from .sensitivity import DENSE, Candidates

SINK, RECENT = 32, 128  # tokens that stay at 16 bits: the first and the newest
LEAST_RUNGS, MOST_RUNGS = 2, 12  # of a plan, the dense one included
WIDE_BITS = 8  # code bits of the first step under pressure: formats that it cannot reach are left out


class Mixed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method", tag="mixed"):
    """Settings of the planner, which turns a profile into a ladder. Raises ``ConfigError`` for a value out of range.

    ``budget``: memory at the floor, such as "2.5bits" or "6GiB"; see ``Budget`` for ``context`` and ``requests``.
    ``least_bits``: of codes, 1 to 8. ``rungs``: of the ladder, at most. ``eager``: blocks go to the floor at once.
    ``sink``, ``recent``: first and newest tokens of a request that stay dense.
    """

    budget: str
    context: int
    requests: int = 1
    least_bits: int = 1
    rungs: int = 8
    eager: bool = False
    sink: int = SINK
    recent: int = RECENT

    def __post_init__(self) -> None:
        self.parsed()
        self._ladder(())  # checks the windows
        check_least_bits(self.least_bits)
        if not LEAST_RUNGS <= self.rungs <= MOST_RUNGS:
            remedy = f"Give an integer from {LEAST_RUNGS} to {MOST_RUNGS}"
            raise ConfigError("out of range", field="rungs", value=self.rungs, remedy=remedy)

    def parsed(self) -> Budget:
        return Budget.parse(self.budget, self.context, self.requests)

    def solve(self, profile: Profile, model: ModelFingerprint) -> KVConfig:
        """The ladder of least predicted loss. Raises ``CapacityError``, naming the smallest budget that has one."""
        items, sides = list[list[Choice]](), list[Mapping[str, Side]]()
        layers = zip(model.kv_of_layers, Candidates.of_layers(model.kv_of_layers, torch.bfloat16), strict=True)
        for layer, (kv, candidates) in enumerate(layers):
            for costs, each in ((profile.sensitivities.k, candidates.k), (profile.sensitivities.v, candidates.v)):
                items.append(self._choices(costs, each, layer, kv.least_bits(self.least_bits)))
                sides.append(each)

        budget = self.parsed()
        shares = budget.shares(self._ladder(()), model)
        shares_of_sides = [share for share in shares for _ in SIDES]

        def make(floor: Sequence[Choice], number: int) -> KVConfig:
            return self._ladder(nested(floor, items, sides, shares_of_sides, number))

        numbers = range(LEAST_RUNGS if self.eager else self.rungs, LEAST_RUNGS - 1, -1)
        return solve(budget, self.budget, items, make, numbers, shares, model)

    def _choices(
        self, costs: Mapping[str, Sequence[float]], sides: Mapping[str, Side], layer: int, least_bits: int
    ) -> list[Choice]:
        """The formats that K, or V, of a layer may have at the floor."""
        wide = [sides[name] for name in sides if name != DENSE and _bits(name) == WIDE_BITS]
        return [
            Choice(name, side.nbytes, costs[name][layer])
            for name, side in sides.items()
            if name in costs
            and _bits(name) >= least_bits
            and (self.eager or name == DENSE or any(can_step(old, side) for old in wide))
        ]

    def _ladder(self, levels: Sequence[Sequence[Choice]]) -> KVConfig:
        """The ladder of ``levels``, widest first, below the dense rung."""
        rungs = [DENSE16]
        for number, level in enumerate(levels, 1):
            k, v = (tuple(choice.name for choice in side) for side in (level[::2], level[1::2]))
            rungs.append(RungConfig(f"mixed-{number}", k, v))
        return KVConfig(name="plan", rungs=tuple(rungs), sink=self.sink, recent=self.recent, eager=self.eager)


def nested(
    floor: Sequence[Choice],
    items: Sequence[Sequence[Choice]],
    sides: Sequence[Mapping[str, Side]],
    shares: Sequence[Fraction],
    number: int,
) -> list[list[Choice]]:
    """At most ``number`` - 1 levels, widest first and ``floor`` last; no item grows from one level to the next.

    Every step is possible for a block (``check_step``). ``sides``: the formats of each item by name;  ``shares``: by
    which the bytes of each item count.
    """
    items = [[weigh(choice, share) for choice in choices] for choices, share in zip(items, shares, strict=True)]
    found = [[weigh(choice, share) for choice, share in zip(floor, shares, strict=True)]]
    widest = [weigh(Choice(DENSE, of[DENSE].nbytes, 0.0), share) for of, share in zip(sides, shares, strict=True)]
    dense, least = (sum(choice.nbytes for choice in level) for level in (widest, found[0]))
    if least == dense:
        return []
    for step in range(number - 2, 0, -1):
        budget = int(dense * (least / dense) ** (step / (number - 1)))
        allowed = [
            [choice for choice in choices if can_step(of[choice.name], of[below.name])]
            for choices, of, below in zip(items, sides, found[0], strict=True)
        ]
        level = allocate(allowed, budget)
        if level is not None and sum(c.nbytes for c in found[0]) < sum(c.nbytes for c in level) < dense:
            found.insert(0, level)
    return found


def can_step(old: Side, new: Side) -> bool:
    """Whether a side can be rewritten from ``old`` to ``new``, which is not larger."""
    try:
        check_step(old, new)
    except ValueError:
        return False
    return new.nbytes <= old.nbytes


def _bits(name: str) -> float:
    return make_format(name, torch.bfloat16).bits
