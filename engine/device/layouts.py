"""Rungs and ladders: the formats of a block's K and V in every layer, and the sizes that the books know of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import lcm
from typing import TYPE_CHECKING

from qkv_engine.kernels.formats import (
    BlockLayout,
    Format,
    PageShape,
    Side,
    check_step,
    make_format,
    narrower_formats,
)
from qkv_engine.kernels.formats.family import SideName

from ..config import BLOCK_TOKENS, KVConfig, RungConfig
from ..errors import ConfigError
from ..kv.spec import GroupSpec, KVSpec, RequestSlot, RungSize
from ..window import RecentWindow

if TYPE_CHECKING:
    import torch

SIDES: tuple[SideName, SideName] = ("k", "v")
SLOT_ALIGN = 128  # bytes: slots start on a cache line


@dataclass(frozen=True)
class Rung:
    """A format for the K side and one for the V side of each layer; a whole block stands on one rung."""

    name: str
    layers: tuple[tuple[Format, Format], ...]
    shape: PageShape

    @cached_property
    def layout(self) -> BlockLayout:
        """The pages of a slot: layer after layer, K side then V side."""
        return BlockLayout.stack(
            side for k, v in self.layers for side in (k.layout(self.shape, "k"), v.layout(self.shape, "v"))
        )

    @cached_property
    def block_nbytes(self) -> int:
        """Bytes of a slot on this rung."""
        return -(-self.layout.nbytes // SLOT_ALIGN) * SLOT_ALIGN

    @cached_property
    def codes_nbytes(self) -> int:
        """Code bytes of a block, its dense sides not counted."""
        return sum(side.codes_nbytes for side in self.layout.sides if side.dense_dtype is None)

    @cached_property
    def dense_nbytes(self) -> int:
        return sum(side.codes_nbytes for side in self.layout.sides if side.dense_dtype is not None)

    @property
    def meta_nbytes(self) -> int:
        """All other bytes of a block: metadata and padding."""
        return self.block_nbytes - self.codes_nbytes - self.dense_nbytes

    @property
    def is_dense(self) -> bool:
        return self.dense_nbytes == self.block_nbytes

    @property
    def bits(self) -> float:
        """The fewest code bits of any side."""
        return min(f.bits for pair in self.layers for f in pair)

    @property
    def size(self) -> RungSize:
        """The rung as the books see it."""
        return RungSize(self.name, self.block_nbytes, self.bits, self.layout.has_dense)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of a dense rung's elements."""
        dtype = self.layout.sides[0].dense_dtype
        assert dtype is not None, "ladders begin dense"
        return dtype

    @property
    def token_nbytes(self) -> float:
        return self.block_nbytes / self.shape.num_tokens

    @property
    def num_elements(self) -> int:
        """KV elements of a block."""
        return 2 * len(self.layers) * self.shape.num_kv_heads * self.shape.num_tokens * self.shape.head_dim

    @property
    def effective_bits(self) -> float:
        """Bits per KV element with every byte of the slot counted."""
        return 8 * self.block_nbytes / self.num_elements


@dataclass(frozen=True)
class Ladder:
    """The rungs a block may step down, widest first, and the slots of a request that never do.

    At most one of the ``slots`` holds tokens, and it comes first; a bank comes last. Blocks in the ``window`` of a
    request stay dense.
    ``eager``: blocks step to the last rung as soon as they may; otherwise only when memory runs short.
    """

    name: str
    rungs: tuple[Rung, ...]
    slots: tuple[RequestSlot, ...]
    window: RecentWindow
    eager: bool
    admit_at: int  # rung that admission counts with

    @property
    def widest(self) -> Rung:
        return self.rungs[0]

    @property
    def narrowest(self) -> Rung:
        return self.rungs[-1]

    @property
    def sink(self) -> int:
        """Tokens of a request that come before its blocks and stay dense for life."""
        return self.spec.sink

    @cached_property
    def spec(self) -> KVSpec:
        """The ladder as the books see it."""
        shape, last = self.widest.shape, self.narrowest.layout
        group = GroupSpec(
            layers=tuple(range(len(self.widest.layers))),
            block_tokens=shape.num_tokens,
            rungs=tuple(rung.size for rung in self.rungs),
            floors=tuple(range(len(self.rungs))),
            slots=self.slots,
            recent=self.window,
            has_bank=last.bank_nbytes > 0,
            num_windows=max(side.num_later for side in last.sides),
            # Dense slots begin on a row of a token and head, all on a cache line.
            align=lcm(SLOT_ALIGN, shape.head_dim * self.widest.dtype.itemsize),
        )
        return KVSpec(self.name, (group,), self.eager, self.admit_at)


def build_ladder(config: KVConfig, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Ladder:
    """The ladder of ``config`` for a model that computes in ``dtype``.

    Raises ``ConfigError``, naming the ladder, if the first rung is not dense in one dtype, a rung does not fit the
    model, a step is impossible, rungs need different banks, or a bank is larger than a dense block.
    """
    try:
        return _build_ladder(config, num_layers, num_kv_heads, head_dim, dtype)
    except ConfigError as error:
        why = str(error).removesuffix(f". {error.remedy}")
        raise ConfigError(why, field="kv", value=config.name, remedy=error.remedy) from error


def _build_ladder(config: KVConfig, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Ladder:
    shape = PageShape(num_kv_heads, BLOCK_TOKENS, head_dim)
    rungs = tuple(_build_rung(rung, num_layers, shape, dtype) for rung in config.rungs)
    if not rungs[0].is_dense:
        remedy = 'Begin with a rung whose K and V are "dense16"'
        raise ConfigError("the first rung must be dense", field="rungs", value=rungs[0].name, remedy=remedy)
    if len({side.dense_dtype for side in rungs[0].layout.sides}) > 1:
        remedy = "Store K and V of all its layers in one dense format"
        raise ConfigError("the first rung mixes dtypes", field="rungs", value=rungs[0].name, remedy=remedy)
    for wide, narrow in pairwise(rungs):
        _check_step(wide, narrow)
    slots = (*_sink_slots(rungs[0], config.sink), *_bank_slots(rungs))
    names = [rung.name for rung in rungs]
    admit_at = len(rungs) - 1 if config.admit_at is None else names.index(config.admit_at)
    return Ladder(config.name, rungs, slots, config.window, config.eager, admit_at)


def _sink_slots(rung: Rung, num_tokens: int) -> Iterator[RequestSlot]:
    """A dense block of ``num_tokens`` tokens, if there are any."""
    if num_tokens:
        nbytes, num_elements = (n * num_tokens // BLOCK_TOKENS for n in (rung.block_nbytes, rung.num_elements))
        yield RequestSlot("sink", num_tokens, nbytes, num_elements)


def _bank_slots(rungs: tuple[Rung, ...]) -> Iterator[RequestSlot]:
    """The bank's slot, if blocks are sealed under patterns. Raises ``ConfigError`` if rungs need different banks."""
    for rung in rungs[2:]:
        if _patterns(rung) != _patterns(rungs[1]):
            remedy = "Give patterns to the same sides on all rungs but the first"
            problem = f"its patterns are not those of rung {rungs[1].name}"
            raise ConfigError(problem, field="rung", value=rung.name, remedy=remedy)
    layout, block = rungs[-1].layout, rungs[0].block_nbytes
    if not layout.bank_nbytes:
        return
    nbytes = -(-layout.bank_nbytes // SLOT_ALIGN) * SLOT_ALIGN
    if nbytes > block:
        most = block // sum(side.pattern_nbytes for side in layout.sides if side.num_patterns)
        raise ConfigError(
            f"those of a request take {nbytes:,} bytes, a dense block {block:,}",
            field="patterns",
            value=max(map(sum, _patterns(rungs[-1]))),
            remedy=f"Use at most {1 << most.bit_length() - 1}",
        )
    yield RequestSlot("bank", num_tokens=0, nbytes=nbytes, num_elements=0)


def _patterns(rung: Rung) -> list[tuple[int, int]]:
    """Patterns of each side: of the prompt and of later windows."""
    return [(side.num_patterns, side.num_later) for side in rung.layout.sides]


def _build_rung(config: RungConfig, num_layers: int, shape: PageShape, dtype: torch.dtype) -> Rung:
    sides = [[make_format(name, dtype) for name in config.formats(side, num_layers)] for side in SIDES]
    rung = Rung(config.name, tuple(zip(*sides, strict=True)), shape)
    for name, formats in zip(SIDES, zip(*rung.layers, strict=True), strict=True):
        below: Side | None = None
        for layer, fmt in enumerate(formats):
            below = _check_side(fmt, shape, name, below, f"{name.upper()} of layer {layer} of rung {config.name}")
    return rung


def _check_side(fmt: Format, shape: PageShape, name: SideName, below: Side | None, where: str) -> Side:
    """The side of a layer. Raises ``ConfigError`` unless it fits the model and the side one layer below."""
    try:
        side = fmt.layout(shape, name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", field="format", value=fmt.name, remedy=error.remedy) from error
    if side.dominant not in (None, below):
        remedy = "Give the layer below the same format with codes of its own"
        raise ConfigError(f"{where}: no such codes one layer below", field="format", value=fmt.name, remedy=remedy)
    return side


def _check_step(wide: Rung, narrow: Rung) -> None:
    """Raises ``ConfigError`` unless blocks shrink, no layer grows, and the kernels can step every side down."""
    smaller = "Give each rung fewer bits than the one before"
    if narrow.block_nbytes >= wide.block_nbytes:
        raise ConfigError(f"not smaller than rung {wide.name}", field="rung", value=narrow.name, remedy=smaller)
    for index, (old, new) in enumerate(zip(wide.layout.sides, narrow.layout.sides, strict=True)):
        where = f"{old.name.upper()} of layer {index // 2}"
        if new.nbytes > old.nbytes:
            raise ConfigError(f"{where} grows from rung {wide.name}", field="rung", value=narrow.name, remedy=smaller)
        try:
            check_step(old, new)
        except ValueError as error:
            problem = f"{where}: no step leads here from rung {wide.name}: {error}"
            raise ConfigError(problem, field="rung", value=narrow.name, remedy=_steps_from(old)) from error


def _steps_from(old: Side) -> str:
    """Choices for the next rung of a side."""
    choices = [f.name for f in narrower_formats(old)]
    return f"Choose from {', '.join(choices)}" if choices else "End the ladder there"
