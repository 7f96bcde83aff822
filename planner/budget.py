"""Memory budgets of plans: effective bits an element, or bytes for a number of requests, with all that they hold."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from qkv_engine.config import BLOCK_TOKENS, KVConfig
from qkv_engine.device.layouts import Ladder, build_ladder
from qkv_engine.errors import CapacityError, ConfigError
from qkv_engine.fingerprint import ModelFingerprint
from qkv_engine.kv.slabs import make_tables
from qkv_engine.sizes import MAX_SIZE, format_least, parse_size

from .allocate import Choice, allocate

MAX_BITS = 64  # an element, in a budget: above 16, as the last block of a short request is mostly empty
MAX_CONTEXT, MAX_REQUESTS = 2**24, 2**20  # tokens and requests of a budget; more is taken for a typing error
MAX_LEAST_BITS = 8  # the widest codes of any format
SHRINK = 0.99  # of the room, at each retry while a floor with its reserve misses the budget; larger: more retries
_BITS = re.compile(r"\s*([0-9]{1,2}(?:\.[0-9]{0,9})?)\s*bits?\s*", re.IGNORECASE | re.ASCII)
_SHARE = re.compile(r"\s*[0-9.]+\s*%?\s*", re.ASCII)
_REMEDY = 'Give effective bits such as "2.5bits", or bytes such as "6GiB"'


@dataclass(frozen=True)
class Budget:
    """Memory for requests of ``context`` tokens: ``bits`` an element of each, or ``nbytes`` for ``requests`` at once.

    A request's sink, recent window and open block are at 16 bits, its other blocks on the floor. One of ``bits`` and
    ``nbytes`` is None. Raises ``ConfigError`` for a value out of range.
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

    def block_nbytes(self, ladder: Ladder) -> int:
        """The most bytes that a block on the floor may take beside the dense blocks and the slots of ``ladder``.

        Raises ``ConfigError`` if no block of a request ever leaves the window.
        """
        dense, narrow = self._split(ladder)
        if not narrow:
            remedy = f"Give more than {ladder.sink + ladder.window.num_tokens + 2 * BLOCK_TOKENS:,} tokens"
            raise ConfigError("no block leaves the window", field="context", value=self.context, remedy=remedy)
        if self.nbytes is not None:
            each = self.nbytes / self.requests
        else:
            each = (self.bits or 0) * self._num_elements(ladder) / 8
        return max(0, int((each - self._dense_nbytes(ladder, dense)) / narrow))

    def bits_at(self, ladder: Ladder, floor_nbytes: int) -> float:
        """Effective bits an element of a request whose blocks on the floor take ``floor_nbytes`` each."""
        dense, narrow = self._split(ladder)
        return 8 * (self._dense_nbytes(ladder, dense) + narrow * floor_nbytes) / self._num_elements(ladder)

    def holds(self, ladder: Ladder) -> bool:
        """Whether requests at the floor of ``ladder`` fit the budget; one in bytes is tried on a cache's books."""
        if self.nbytes is None:
            return self.bits_at(ladder, ladder.narrowest.block_nbytes) <= (self.bits or 0)
        try:
            tables = make_tables(ladder.spec, self.nbytes)
        except CapacityError:
            return False
        return tables.max_requests(self.context, ladder.last) >= self.requests

    def least(self, ladder: Ladder) -> str:
        """The smallest budget that ``ladder`` fits, in the unit of this one."""
        if self.nbytes is None:
            return f"{math.ceil(100 * self.bits_at(ladder, ladder.narrowest.block_nbytes)) / 100:g}bits"
        low, high = 0, self.nbytes
        while not Budget(self.context, self.requests, nbytes=high).holds(ladder):
            low, high = high, 2 * high
        while high - low > high // 1000 + 1:
            middle = (low + high) // 2
            fits = Budget(self.context, self.requests, nbytes=middle).holds(ladder)
            low, high = (low, middle) if fits else (middle, high)
        return format_least(high).replace(" ", "")

    def _split(self, ladder: Ladder) -> tuple[int, int]:
        """Numbers of a request's blocks at 16 bits and on the floor."""
        return ladder.spec.main.split(self.context, 1)

    def _dense_nbytes(self, ladder: Ladder, num_blocks: int) -> int:
        return num_blocks * ladder.widest.block_nbytes + sum(slot.nbytes for slot in ladder.slots)

    def _num_elements(self, ladder: Ladder) -> int:
        return ladder.widest.num_elements * self.context // BLOCK_TOKENS


def check_least_bits(bits: int) -> None:
    """Raises ``ConfigError`` unless ``bits`` is a possible width of a plan's narrowest codes."""
    if not 1 <= bits <= MAX_LEAST_BITS:
        remedy = f"Give an integer from 1 to {MAX_LEAST_BITS}"
        raise ConfigError("out of range", field="least_bits", value=bits, remedy=remedy)


def ladder_of(kv: KVConfig, model: ModelFingerprint) -> Ladder:
    """The ladder of ``kv`` for a model of this shape; the model's dtype changes no bytes of a plan."""
    return build_ladder(
        kv,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=torch.bfloat16,
    )


def solve(
    budget: Budget,
    text: str,
    items: Sequence[Sequence[Choice]],
    make: Callable[[Sequence[Choice], int], KVConfig],
    num_rungs: int,
    model: ModelFingerprint,
) -> KVConfig:
    """The ladder of at most ``num_rungs`` rungs that ``make`` builds on the floor of least cost within ``budget``.

    ``text`` is the budget as its user wrote it. Raises ``CapacityError``, naming the smallest budget that has a floor,
    if this one has none, and ``ConfigError`` if an item has no choice.
    """

    def ladder_on(floor: Sequence[Choice]) -> Ladder:
        return ladder_of(make(floor, num_rungs), model)

    if not all(items):
        remedy = "Profile the model again with qkv-engine plan"
        raise ConfigError("no format in it fits the model's heads and least_bits", field="profile", remedy=remedy)
    narrowest = allocate(items, sum(min(choice.nbytes for choice in choices) for choices in items))
    assert narrowest is not None, "every item has a choice of its fewest bytes"
    least = ladder_on(narrowest)
    room = budget.block_nbytes(least)
    if not budget.holds(least):
        remedy = f"Give at least {budget.least(least)}"
        raise CapacityError("no plan is as small", field="budget", value=text, remedy=remedy)
    floor = allocate(items, room) or narrowest
    while floor != narrowest and not budget.holds(ladder_on(floor)):
        room = int(room * SHRINK)
        floor = allocate(items, room) or narrowest
    return make(floor, num_rungs)
