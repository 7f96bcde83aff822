"""Rungs and ladders: the formats of a block's K and V in every layer, and the sizes that the books know of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from math import lcm
from typing import TYPE_CHECKING

from qkv_engine.kernels.delta_net import STATE_FORMATS, StateSpec
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
from ..layer_kv import WINDOW_BITS, LayerKV
from ..window import RecentWindow
from .state_slots import with_states

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
        return min(side.element_bits for side in self.layout.sides)

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
class LayerGroup:
    """Layers whose KV lies in the same blocks: the rungs of a block, widest first, and the slots of a request.

    ``layers`` of the model;  ``floors``: for each rung of the ladder the group's own one. At most one of the ``slots``
    holds tokens, and it comes first; states come next, a bank last. Blocks in the ``window`` of a request, its newest
    tokens, stay dense. ``visible``: tokens that a token sees, itself included; None for all before it.
    ``state_floors``: for each rung of the ladder that of a state, of states that step down.
    """

    layers: tuple[int, ...]
    rungs: tuple[Rung, ...]
    floors: tuple[int, ...]
    slots: tuple[RequestSlot, ...]
    window: RecentWindow
    visible: int | None = None
    state_floors: tuple[int, ...] = ()

    @property
    def widest(self) -> Rung:
        return self.rungs[0]

    @property
    def narrowest(self) -> Rung:
        return self.rungs[-1]

    @property
    def row_nbytes(self) -> int:
        """Bytes of a dense row, which holds a token and head; dense slots begin on one."""
        return self.widest.shape.head_dim * self.widest.dtype.itemsize

    @cached_property
    def spec(self) -> GroupSpec:
        """The group as the books see it."""
        last = self.narrowest.layout
        return GroupSpec(
            layers=self.layers,
            block_tokens=self.widest.shape.num_tokens,
            rungs=tuple(rung.size for rung in self.rungs),
            floors=self.floors,
            slots=self.slots,
            recent=self.window,
            visible=self.visible,
            has_bank=last.bank_nbytes > 0,
            num_windows=max(side.num_later for side in last.sides),
            align=lcm(SLOT_ALIGN, self.row_nbytes),  # all slots begin on a cache line, too
            state_floors=self.state_floors,
        )


@dataclass(frozen=True)
class Ladder:
    """The rungs that blocks may step down, by their ``names``, and what they are in each group of layers.

    ``eager``: blocks step to the last rung as soon as they may; otherwise only when memory runs short. ``admit_at``:
    the rung that admission counts with. ``states``: of layers that have one in place of KV, in the same formats, but
    for the convolution's part in ``dtype``, the model's; each is a slot of a request, in the main group.
    """

    name: str
    names: tuple[str, ...]
    groups: tuple[LayerGroup, ...]
    eager: bool
    admit_at: int
    states: tuple[StateSpec, ...]
    dtype: torch.dtype

    @property
    def last(self) -> int:
        """The number of the last rung, the lowest floor."""
        return len(self.names) - 1

    @cached_property
    def spec(self) -> KVSpec:
        """The ladder as the books see it."""
        return KVSpec(self.name, tuple(group.spec for group in self.groups), self.eager, self.admit_at)

    @cached_property
    def main(self) -> LayerGroup:
        """The main group of ``spec``."""
        return self.groups[self.spec.groups.index(self.spec.main)]

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """Rungs of the main group."""
        return self.main.rungs

    @property
    def window(self) -> RecentWindow:
        """The newest tokens of a request that stay dense in the main group."""
        return self.main.window

    @property
    def widest(self) -> Rung:
        return self.main.widest

    @property
    def narrowest(self) -> Rung:
        return self.main.narrowest

    @property
    def sink(self) -> int:
        """Tokens of a request that come before its blocks and stay dense for life."""
        return self.spec.sink

    def at(self, rung: int) -> list[Rung]:
        """What the ladder's ``rung`` is in each group."""
        return [group.rungs[group.floors[rung]] for group in self.groups]

    def block_nbytes(self, rung: int) -> int:
        """Bytes of a block on the ladder's ``rung`` in all layers."""
        return sum(each.block_nbytes for each in self.at(rung))

    def stored(self, rung: int) -> RungConfig:
        """The formats of K and V in which each layer stores blocks on the ladder's ``rung``."""
        found = self.at(rung)
        k, v = zip(*(found[group].layers[index] for group, index in self.places), strict=True)
        return RungConfig(self.names[rung], *(tuple(fmt.name for fmt in side) for side in (k, v)))

    def state_at(self, rung: int) -> StateSpec:
        """The state that stands on a rung of slots, in the format that it has there."""
        slot, step = self.main.spec.place(rung)
        return self.states[slot - self.main.spec.num_token_slots].forms[step]

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The group of each of the model's layers, and its index there."""
        found = {
            layer: (number, index)
            for number, group in enumerate(self.groups)
            for index, layer in enumerate(group.layers)
        }
        return tuple(found[layer] for layer in range(len(found)))


def build_ladder(config: KVConfig, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Ladder:
    """The ladder of ``config`` for a model of equal layers without windows; see ``ladder_of_layers``."""
    return ladder_of_layers(config, [LayerKV(num_kv_heads, head_dim)] * num_layers, dtype)


def ladder_of_layers(
    config: KVConfig, layers: Sequence[LayerKV], dtype: torch.dtype, states: Sequence[StateSpec] = ()
) -> Ladder:
    """The ladder of ``config`` for a model that computes in ``dtype``, with ``states`` in its layers without KV.

    Raises ``ConfigError``, naming the ladder, if the first rung is not dense in one dtype, a rung does not fit the
    model, a step is impossible, rungs need different banks, a bank is larger than a dense block, or layers with a
    window need one.
    """
    try:
        groups = tuple(_build_group(config, layers, group, dtype) for group in group_layers(layers))
    except ConfigError as error:
        why = str(error).removesuffix(f". {error.remedy}")
        raise ConfigError(why, field="kv", value=config.name, remedy=error.remedy) from error
    names = tuple(rung.name for rung in config.rungs)
    admit_at = len(names) - 1 if config.admit_at is None else names.index(config.admit_at)
    widest, *narrower = (STATE_FORMATS[name] for name in config.states)
    stored = tuple(state._replace(format=widest, narrower=tuple(narrower)) for state in states)
    return Ladder(config.name, names, with_states(groups, stored, dtype), config.eager, admit_at, stored, dtype)


def group_layers(layers: Sequence[LayerKV]) -> list[tuple[int, ...]]:
    """The layers of each group, groups in the order of their first layers."""
    found: dict[LayerKV, list[int]] = {}
    for index, layer in enumerate(layers):
        found.setdefault(layer, []).append(index)
    return [tuple(group) for group in found.values()]


def _build_group(config: KVConfig, layers: Sequence[LayerKV], group: tuple[int, ...], dtype: torch.dtype) -> LayerGroup:
    num_kv_heads, head_dim, visible = layers[group[0]]
    shape = PageShape(num_kv_heads, BLOCK_TOKENS, head_dim)
    rungs, floors = list[Rung](), list[int]()
    for rung in config.rungs:
        formats = _formats(rung, len(layers), group, dtype)
        # Layers with a window hold few blocks. Two rungs may differ in the layers of other groups alone.
        is_kept = visible is None or config.narrow_windows or min(f.bits for f in chain(*formats)) >= WINDOW_BITS
        is_new = len(group) == len(layers) or not rungs or formats != rungs[-1].layers
        if not rungs or (is_kept and is_new):
            rungs.append(_build_rung(rung.name, formats, group, shape))
        floors.append(len(rungs) - 1)
    if not rungs[0].is_dense:
        remedy = 'Begin with a rung whose K and V are "dense16"'
        raise ConfigError("the first rung must be dense", field="rungs", value=rungs[0].name, remedy=remedy)
    if len({side.dense_dtype for side in rungs[0].layout.sides}) > 1:
        remedy = "Store K and V of all its layers in one dense format"
        raise ConfigError("the first rung mixes dtypes", field="rungs", value=rungs[0].name, remedy=remedy)
    for wide, narrow in pairwise(rungs):
        _check_step(wide, narrow, group)
    slots = (*_sink_slots(rungs[0], config.sink), *_bank_slots(rungs))
    if visible is None:
        return LayerGroup(group, tuple(rungs), tuple(floors), slots, config.window)
    if rungs[-1].layout.bank_nbytes:
        raise ConfigError(
            f"its patterns are those of a request's first tokens, and layers with a window of {visible:,} forget them",
            field="narrow_windows",
            value=True,
            remedy="Leave narrow_windows out",
        )
    return LayerGroup(group, tuple(rungs), tuple(floors), slots, RecentWindow(config.window.num_tokens), visible)


def _sink_slots(rung: Rung, num_tokens: int) -> Iterator[RequestSlot]:
    """A dense block of ``num_tokens`` tokens, if there are any."""
    if num_tokens:
        nbytes, num_elements = (n * num_tokens // BLOCK_TOKENS for n in (rung.block_nbytes, rung.num_elements))
        yield RequestSlot("sink", num_tokens, nbytes, num_elements)


def _bank_slots(rungs: Sequence[Rung]) -> Iterator[RequestSlot]:
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


def _formats(
    config: RungConfig, num_layers: int, group: tuple[int, ...], dtype: torch.dtype
) -> tuple[tuple[Format, Format], ...]:
    """The formats of K and V of the layers of ``group``."""
    sides = [config.formats(side, num_layers) for side in SIDES]
    k, v = ([make_format(names[layer], dtype) for layer in group] for names in sides)
    return tuple(zip(k, v, strict=True))


def _build_rung(name: str, layers: tuple[tuple[Format, Format], ...], group: tuple[int, ...], shape: PageShape) -> Rung:
    rung = Rung(name, layers, shape)
    for side, formats in zip(SIDES, zip(*layers, strict=True), strict=True):
        below: Side | None = None
        for index, fmt in enumerate(formats):
            if index and group[index - 1] != group[index] - 1:
                below = None  # the layer below is in another group
            below = _check_side(fmt, shape, side, below, f"{side.upper()} of layer {group[index]} of rung {name}")
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


def _check_step(wide: Rung, narrow: Rung, group: tuple[int, ...]) -> None:
    """Raises ``ConfigError`` unless blocks shrink, no layer grows, and the kernels can step every side down."""
    smaller = "Give each rung fewer bits than the one before"
    if narrow.block_nbytes >= wide.block_nbytes:
        raise ConfigError(f"not smaller than rung {wide.name}", field="rung", value=narrow.name, remedy=smaller)
    for index, (old, new) in enumerate(zip(wide.layout.sides, narrow.layout.sides, strict=True)):
        where = f"{old.name.upper()} of layer {group[index // 2]}"
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
