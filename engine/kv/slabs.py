"""Books of a given size: the arena whose slabs waste least, and the tokens that it holds. No torch."""

from __future__ import annotations

from collections import Counter
from math import lcm

from ..errors import CapacityError
from ..sizes import format_least, format_size
from .arena import Arena
from .reserve import reserve_nbytes
from .spec import GroupSpec, KVSpec
from .table import BlockTables

MAX_SLAB_BLOCKS = 16  # widest blocks of a slab: larger ones save little, and cost copies where one is emptied


RESIZE_STEPS = 256  # chunks at most that memory is given back in: more would cost a GPU calls, fewer are coarse


def make_tables(spec: KVSpec, nbytes: int, granule: int = 1) -> BlockTables:
    """Empty block tables over ``nbytes``, which the device gives and takes in multiples of ``granule``.

    Raises ``CapacityError`` if a request alone finds no room in them.
    """
    least = least_nbytes(spec)
    if nbytes < least:
        raise CapacityError(
            f"no room for one block of {spec.block_tokens} tokens, the slots of its request and the reserve",
            field="kv_memory",
            value=format_size(nbytes),
            remedy=f"Give at least {format_least(least)}",
        )
    return BlockTables(make_arena(spec, nbytes, granule), spec)


def make_arena(spec: KVSpec, nbytes: int, granule: int = 1) -> Arena:
    """An arena for blocks of ``spec`` in ``nbytes``, aligned, with the slabs that waste least.

    ``nbytes``: at least ``least_nbytes``;  ``granule``: of the chunks in which it may be resized.
    """
    block, chunk = spec.main.widest.nbytes, -(-nbytes // RESIZE_STEPS // granule) * granule
    if not _slab_sizes(spec):
        return Arena(nbytes // block * block, block, block_nbytes=block, chunk_nbytes=chunk)
    nbytes -= nbytes % _align(spec)
    fitting = [slab for slab in _slabs(spec) if least_with(spec, slab) <= nbytes]
    slab = min(fitting, key=lambda slab: (_expected_loss(spec, slab, nbytes), slab))
    return Arena(nbytes, slab, _reserve(spec, slab), block_nbytes=block, chunk_nbytes=chunk)


def least_nbytes(spec: KVSpec) -> int:
    """The least memory in which a request alone has a block on each rung beside an open one, or a window of them."""
    if not _slab_sizes(spec):
        return least_with(spec, spec.main.widest.nbytes)
    return min(least_with(spec, slab) for slab in _slabs(spec))


def _align(spec: KVSpec) -> int:
    return lcm(*(group.align for group in spec.groups))


def _slab_sizes(spec: KVSpec) -> set[int]:
    """Bytes of the slots that lie in slabs: all but those of the main group's blocks on the widest rung."""
    rungs = {rung.nbytes for group in spec.groups for rung in group.rungs}
    slots = {size for group in spec.groups for slot in group.slots for size in slot.sizes}
    return (rungs | slots) - {spec.main.widest.nbytes}


def _slabs(spec: KVSpec) -> list[int]:
    """Sizes of a slab that may waste least: a few slots of some size, of at most ``MAX_SLAB_BLOCKS`` blocks.

    A slab is no larger than the blocks that fill it when they step down, so that steps down never take more bytes.
    """
    block, align, in_slabs = spec.main.widest.nbytes, _align(spec), _slab_sizes(spec)
    most = max(MAX_SLAB_BLOCKS * max(group.widest.nbytes for group in spec.groups), *in_slabs)
    first = [chain.sizes[1] for chain in spec.chains if len(chain.sizes) > 1 and chain.sizes[0] == block]
    sizes = (
        -(-number * size // align) * align
        for size in in_slabs | {block}
        for number in range(-(-max(in_slabs) // size), most // size + 1)
    )
    return [slab for slab in sizes if all(slab // size * block >= slab for size in first)]


def _reserve(spec: KVSpec, slab: int) -> int:
    return reserve_nbytes([chain.sizes for chain in spec.chains], spec.main.widest.nbytes, slab)


def least_with(spec: KVSpec, slab: int) -> int:
    """``least_nbytes`` with slabs of ``slab`` bytes."""
    return sum(_least_of(group, spec.main.widest.nbytes, slab) for group in spec.groups) + _reserve(spec, slab)


def _least_of(group: GroupSpec, block: int, slab: int) -> int:
    """Bytes of a lone request in a group: its open block or window, its slots, a slab for blocks that stepped down."""
    number, dense = 1 if group.visible is None else group.most_visible, group.widest.nbytes
    open_nbytes = number * block if dense == block else -(-number // (slab // dense)) * slab
    sizes = Counter(slot.nbytes for slot in group.slots)
    slots = sum(n * block if size == block else -(-n // (slab // size)) * slab for size, n in sizes.items())
    return open_nbytes + slots + slab * (len(group.rungs) > 1)


def _expected_loss(spec: KVSpec, slab: int, nbytes: int) -> float:
    """Bytes that hold no KV: the reserve, half of what a slab of each size may leave free, and the mean of rests.

    Small slabs leave rests, large ones a large reserve.
    """
    halves = sum(slab - slab // (slab // size) for size in _slab_sizes(spec)) / 2
    sizes = [rung.nbytes for group in spec.groups for rung in group.rungs[1:]]
    sizes += [group.widest.nbytes for group in spec.groups if group.widest.nbytes != spec.main.widest.nbytes]
    states = (slot for group in spec.groups for slot in group.slots if slot.is_state)
    sizes += {size for slot in states for size in slot.sizes} & _slab_sizes(spec)
    rests = [1 - slab // size * size / slab for size in sizes]
    return _reserve(spec, slab) + halves + nbytes * sum(rests) / max(1, len(rests))
