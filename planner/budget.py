"""Memory budgets of plans: effective bits an element, or bytes for a number of requests, with all that they hold."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch

from qkv_engine.config import BLOCK_TOKENS, KVConfig
from qkv_engine.device.layouts import SLOT_ALIGN, Ladder, ladder_of_layers
from qkv_engine.errors import CapacityError, ConfigError
from qkv_engine.fingerprint import ModelFingerprint
from qkv_engine.kernels.delta_net import StateSpec
from qkv_engine.kv.slabs import make_tables
from qkv_engine.sizes import MAX_SIZE, least_size, parse_size

from .allocate import Choice, allocate

MAX_BITS = 64  # an element, in a budget: above 16, as the last block of a short request is mostly empty
MAX_CONTEXT, MAX_REQUESTS = 2**24, 2**20  # tokens and requests of a budget; more is taken for a typing error
MAX_LEAST_BITS = 8  # the widest codes of any format
Floor = Sequence[Choice]  # a choice for each item
TRIES = 8  # at most, to find the room of a floor that fits with its reserve: each halves what is left unknown
_BITS = re.compile(r"\s*([0-9]{1,2}(?:\.[0-9]{0,9})?)\s*bits?\s*", re.IGNORECASE | re.ASCII)
_SHARE = re.compile(r"\s*[0-9.]+\s*%?\s*", re.ASCII)
_REMEDY = 'Give effective bits such as "2.5bits", or bytes such as "6GiB"'


@dataclass(frozen=True)
class Budget:
    """Memory for requests of ``context`` tokens: ``bits`` an element of each, or ``nbytes`` for ``requests`` at once.

    The elements are K and V of the tokens that the request's last one sees, layer by layer. A request's sink, recent
    window and open block are at 16 bits, its other blocks on the floor. States of layers without KV count in
    ``nbytes``, and have no ``bits``. One of the two is None. Raises ``ConfigError`` for a value out of range.
    """

    context: int
    requests: int = 1
    bits: float | None = None
    nbytes: int | None = None

    def __post_init__(self) -> None:
        for field, most in (("context", MAX_CONTEXT), ("requests", MAX_REQUESTS)):
            value = getattr(self, field)
            if not 1 <= value <= most:
                remedy = f"Give an integer from 1 to {most:,}"
                raise ConfigError("out of range", field=field, value=value, remedy=remedy)

    @classmethod
    def parse(cls, text: str, context: int, requests: int = 1) -> Budget:
        """The budget that ``text`` names. Raises ``ConfigError`` for anything but bits, up to 64, or a size."""
        found = _BITS.fullmatch(text)
        if found is not None:
            bits = float(found[1])
            if not 0 < bits <= MAX_BITS:
                remedy = f"Give more than 0 and up to {MAX_BITS} bits"
                raise ConfigError("out of range", field="budget", value=text, remedy=remedy)
            return cls(context, requests, bits=bits)
        if _SHARE.fullmatch(text):
            raise ConfigError("neither bits nor a size", field="budget", value=text, remedy=_REMEDY)
        return cls(context, requests, nbytes=parse_size(text, field="budget", free=MAX_SIZE))

    def shares(self, kv: KVConfig, model: ModelFingerprint) -> list[Fraction]:
        """For each layer the number of a request's blocks on the floor, in parts of the most of any layer.

        They follow from the windows of ``kv`` and of ``model`` alone, whatever the rungs. Raises ``ConfigError`` if no
        block of a request ever leaves the recent window.
        """
        ladder = ladder_of(kv, model)
        narrow = [narrow for _, narrow in self._splits(ladder)]
        most = max(narrow)
        if not most:
            raise self._too_short(ladder)
        return [Fraction(narrow[group], most) for group, _ in ladder.places]

    def room(self, ladder: Ladder) -> int:
        """The most bytes of a block on the floor beside what is dense in ``ladder``, each layer's counted by its share.

        Raises ``ConfigError`` as ``shares``.
        """
        most = max(narrow for _, narrow in self._splits(ladder))
        if self.nbytes is not None:
            each = self.nbytes / self.requests
        else:
            each = (self.bits or 0) * self._num_elements(ladder) / 8
        return max(0, int((each - self._dense_nbytes(ladder)) / most))

    def bits_at(self, ladder: Ladder) -> float:
        """Effective bits an element of a request at the floor of ``ladder``."""
        splits = zip(ladder.groups, self._splits(ladder), strict=True)
        narrow = sum(number * group.narrowest.block_nbytes for group, (_, number) in splits)
        return 8 * (self._dense_nbytes(ladder) + narrow) / self._num_elements(ladder)

    def holds(self, ladder: Ladder) -> bool:
        """Whether requests at the floor of ``ladder`` fit the budget; one in bytes is tried on a cache's books."""
        if self.nbytes is None:
            return self.bits_at(ladder) <= (self.bits or 0)
        try:
            tables = make_tables(ladder.spec, self.nbytes)
        except CapacityError:
            return False
        return tables.max_requests(self.context, ladder.last) >= self.requests

    def least(self, ladder: Ladder) -> str:
        """The smallest budget that ``ladder`` fits, in the unit of this one."""
        if self.nbytes is None:
            return f"{math.ceil(100 * self.bits_at(ladder)) / 100:g}bits"
        return least_size(self.nbytes, lambda nbytes: replace(self, nbytes=nbytes).holds(ladder))

    def _too_short(self, ladder: Ladder) -> ConfigError:
        """No block of a request leaves the recent window; says from which context on one does, if any."""

        def any_narrow(context: int) -> bool:
            return any(narrow for _, narrow in replace(self, context=context)._splits(ladder))

        too_short = bisect_left(range(1, MAX_CONTEXT + 1), True, key=any_narrow)
        if too_short == MAX_CONTEXT:
            message = f"no layer sees a whole block before the {ladder.window.num_tokens:,} recent tokens"
            return ConfigError(message, remedy="Serve the model without a plan")
        remedy = f"Give more than {too_short:,} tokens"
        return ConfigError("no block leaves the window", field="context", value=self.context, remedy=remedy)

    def _splits(self, ladder: Ladder) -> list[tuple[int, int]]:
        """Numbers of a request's blocks at 16 bits and on the floor, by group of layers."""
        return [group.split(self.context, 1) for group in ladder.spec.groups]

    def _dense_nbytes(self, ladder: Ladder) -> int:
        splits = zip(ladder.groups, self._splits(ladder), strict=True)
        blocks = sum(number * group.widest.block_nbytes for group, (number, _) in splits)
        slots = [slot for group in ladder.groups for slot in group.slots]
        return blocks + sum(slot.nbytes for slot in slots if self.nbytes is not None or not slot.is_state)

    def _num_elements(self, ladder: Ladder) -> int:
        return sum(
            group.widest.num_elements * min(self.context, group.visible or self.context) // BLOCK_TOKENS
            for group in ladder.groups
        )


def check_least_bits(bits: int) -> None:
    """Raises ``ConfigError`` unless ``bits`` is a possible width of a plan's narrowest codes."""
    if not 1 <= bits <= MAX_LEAST_BITS:
        remedy = f"Give an integer from 1 to {MAX_LEAST_BITS}"
        raise ConfigError("out of range", field="least_bits", value=bits, remedy=remedy)


def ladder_of(kv: KVConfig, model: ModelFingerprint) -> Ladder:
    """The ladder of ``kv`` for a model of this shape; the model's dtype changes no bytes of a plan's blocks."""
    return ladder_of_layers(kv, model.kv_of_layers, torch.bfloat16, [StateSpec(*state) for state in model.states])


def solve(
    budget: Budget,
    text: str,
    items: Sequence[Sequence[Choice]],
    make: Callable[[Floor, int], KVConfig],
    numbers: Sequence[int],
    shares: Sequence[Fraction],
    model: ModelFingerprint,
) -> KVConfig:
    """The ladder that ``make`` builds on the floor of least cost within ``budget``.

    ``items`` are equally many of each layer, in order, and count by their layer's ``shares``. ``numbers`` of rungs are
    tried in turn, until one leaves room for the narrowest floor: each rung may cost a slab. ``text`` is the budget as
    its user wrote it. Raises ``CapacityError``, naming the smallest budget that has a floor, if this one has none, and
    ``ConfigError`` if an item has no choice.
    """
    if not all(items):
        remedy = "Profile the model again with qkv-engine plan and this --method"
        raise ConfigError("no format in it fits the model's heads and least_bits", field="profile", remedy=remedy)
    shares_of_items = [share for share in shares for _ in range(len(items) // len(shares))]
    weighed = [[weigh(each, share) for each in of] for of, share in zip(items, shares_of_items, strict=True)]

    def floor_in(nbytes: int) -> Floor | None:
        picked = allocate(weighed, nbytes)
        if picked is None:
            return None
        return [next(c for c in choices if c.name == one.name) for choices, one in zip(items, picked, strict=True)]

    fewest = sum(min(choice.nbytes for choice in choices) for choices in weighed)
    narrowest = floor_in(fewest)
    assert narrowest is not None, "every item has a choice of its fewest bytes"
    for number in numbers:
        least = ladder_of(make(narrowest, number), model)
        if budget.holds(least):
            break
    else:
        remedy = f"Give at least {budget.least(least)}"
        raise CapacityError("no plan is as small", field="budget", value=text, remedy=remedy)

    def holds(floor: Floor) -> bool:
        return budget.holds(ladder_of(make(floor, number), model))

    room = budget.room(least)
    floor = floor_in(room) or narrowest
    if not holds(floor):
        floor = _widest_held(floor_in, holds, fewest, room) or narrowest
    return make(floor, number)


def _widest_held(
    floor_in: Callable[[int], Floor | None], holds: Callable[[Floor], bool], held: int, missed: int
) -> Floor | None:
    """The floor of most bytes that holds; one of ``held`` bytes does, one of ``missed`` does not. None for the former.

    What the ladder and its reserve take beside a floor is only known once it is made.
    """
    floor = None
    for _ in range(TRIES):
        room = (held + missed) // 2
        tried = floor_in(room)
        assert tried is not None, "there is room for the narrowest floor"
        if holds(tried):
            floor, held = tried, room
        else:
            missed = room
    return floor


def weigh(choice: Choice, share: Fraction) -> Choice:
    """``choice`` with ``share`` of its bytes: few sizes with a large divisor, so that tables stay small."""
    return choice._replace(nbytes=math.ceil(choice.nbytes * share / SLOT_ALIGN) * SLOT_ALIGN)
