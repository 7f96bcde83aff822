"""PM-KVQ by its own rules: codes of 16 bits that are halved layer by layer as each layer's own budget fills up.

Source:  PM-KVQ (arXiv 2505.18610), its real backend; the shifts of its ablation
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qkv_engine.planner.pm_kvq import progressive

from .cache import LayerCache, Scheme, Side
from .quantizers import Codes

TOP_BITS = 16  # of codes when they are made
LEAST_BITS = 2  # the narrowest codes of the release
SINK, WINDOW = 1, 128  # tokens at 16 bits: the first, and the most of the newest
LEAST_STEP, MOST_STEP = 1e-5, 1e5  # the release's bounds of a step

Shift = Callable[[Tensor, int], Tensor]  # codes of 2b bits and b -> codes of b bits, all int64


def equivalent_shift(codes: Tensor, bits: int) -> Tensor:
    """codes / (2^b + 1) to the nearest integer, as one product and one shift."""
    return ((1 << 2 * bits) - (1 << bits) + 1) * (codes + (1 << bits - 1)) >> 3 * bits


def plain_shift(codes: Tensor, bits: int) -> Tensor:
    """The high half of the bits."""
    return codes >> bits


@dataclass(frozen=True)
class Variant:
    """A way to halve codes: the shift, and the factor of the step; both ablations keep the high bits."""

    shift: Shift
    factor: Callable[[int], int]


EQUIVALENT = Variant(equivalent_shift, lambda bits: 2**bits + 1)
MODIFIED = Variant(plain_shift, lambda bits: 2**bits + 1)  # the paper names it and does not define it: a guess
DIRECT = Variant(plain_shift, lambda bits: 2**bits)


def quantize(groups: Tensor, bits: int, dtype: torch.dtype = torch.bfloat16) -> Codes:
    """Codes of groups [..., G] to the nearest, halves to even; step and minimum in ``dtype``, bf16 as released."""
    low, high = groups.float().amin(-1, keepdim=True), groups.float().amax(-1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp(LEAST_STEP, MOST_STEP).to(dtype)
    low = low.to(dtype)
    codes = ((groups.float() - low.float()) / step.float()).round().clamp(0, 2**bits - 1)
    return Codes(codes.long(), step, low)


def halve(found: Codes, bits: int, variant: Variant = EQUIVALENT) -> Codes:
    """Codes of ``bits`` bits from codes of twice as many; the minimum stays."""
    return Codes(variant.shift(found.codes, bits), found.step * variant.factor(bits), found.minimum)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., n] as words of 16 bits, the first in the most significant ones: [..., n * bits / 16] int32."""
    shifts = torch.arange(TOP_BITS - bits, -1, -bits)
    return (torch.unflatten(codes.int(), -1, (-1, len(shifts))) << shifts).sum(-1).int()


@dataclass
class Trigger:
    """The condition on which a layer halves its codes: ``budget_bits`` an element of ``max_len`` tokens, codes alone.

    Bits may fall below ``budget_bits`` (as released), down to ``floor``; below 2 bits it raises ``MemoryError``.
    """

    budget_bits: int
    max_len: int
    floor: int = 0
    bits: int = TOP_BITS

    def halves(self, num_tokens: int) -> bool:
        """Halves the layer's bits if ``num_tokens`` stored tokens exceed the budget; returns whether it did."""
        body = max(0, num_tokens - SINK) // WINDOW * WINDOW
        held = (num_tokens - body) * TOP_BITS + body * self.bits
        if held <= self.budget_bits * self.max_len or self.bits // 2 < self.floor:
            return False
        if self.bits // 2 < LEAST_BITS:
            raise MemoryError(f"{num_tokens} tokens at {self.bits} bits, and none has fewer")
        self.bits //= 2
        return True


def shrink_steps(trigger: Trigger, num_tokens: int) -> Iterator[tuple[int, int]]:
    """(tokens stored, bits from then on) of a sequence that grows token by token."""
    for stored in range(1, num_tokens + 1):
        if trigger.halves(stored):
            yield stored, trigger.bits


class ShrinkingSide(Side):
    """Keys or values whose body, whole windows behind the first token, is codes that can be halved."""

    def __init__(self, variant: Variant):
        super().__init__(lambda full: full // WINDOW * WINDOW, self._enter, SINK)
        self.variant, self.bits = variant, TOP_BITS
        self._parts: list[Codes] = []

    def _enter(self, x: Tensor) -> Tensor:
        found, bits = quantize(x, TOP_BITS), TOP_BITS
        while bits > self.bits:
            bits //= 2
            found = halve(found, bits, self.variant)
        self._parts.append(found)
        return found.values()

    def halve(self) -> None:
        """Halves the bits of the whole body."""
        self.bits //= 2
        self._parts = [halve(part, self.bits, self.variant) for part in self._parts]
        if self._parts:
            body = self.tokens[:, SINK : SINK + self.quantized]
            body.copy_(torch.cat([part.values() for part in self._parts], 1))


@dataclass
class ShrinkingLayer(LayerCache):
    """A layer whose K and V are halved together, at most once a step, after it has attended and stored."""

    trigger: Trigger | None = None

    def settle(self) -> None:
        super().settle()
        if self.trigger is not None and self.trigger.halves(self.k.length):
            for side in (self.k, self.v):
                assert isinstance(side, ShrinkingSide), "as ``layer`` makes them"
                side.halve()


def layer(trigger: Trigger, variant: Variant = EQUIVALENT) -> ShrinkingLayer:
    """A layer's cache, empty."""
    return ShrinkingLayer(ShrinkingSide(variant), ShrinkingSide(variant), trigger=trigger)


def scheme(floor: int, num_layers: int, *, max_len: int, variant: Variant = EQUIVALENT) -> Scheme:
    """All layers down to ``floor`` bits in ``max_len`` tokens, beside blocks that go to the same floor at once."""
    preset = replace(progressive(f"pm-kvq-{floor} blocks", [floor] * num_layers), eager=True)
    return Scheme(lambda _: layer(Trigger(floor, max_len, floor), variant), preset)
