"""Books of a given size: the arena whose slabs waste least, and the tokens that it holds. No torch."""

from __future__ import annotations

from ..errors import CapacityError
from ..sizes import format_least, format_size
from .arena import Arena
from .spec import GroupSpec, KVSpec
from .table import BlockTables, reserve_nbytes

MAX_SLAB_BLOCKS = 16  # widest blocks of a slab: larger ones save little, and cost copies where one is emptied


def make_tables(spec: KVSpec, nbytes: int) -> BlockTables:
    """Empty block tables over ``nbytes``. Raises ``CapacityError`` if a request alone finds no room in them."""
    least = least_nbytes(spec)
    if nbytes < least:
        raise CapacityError(
            f"no room for one block of {spec.group.block_tokens} tokens, the slots of its request and the reserve",
            field="kv_memory",
            value=format_size(nbytes),
            remedy=f"Give at least {format_least(least)}",
        )
    return BlockTables(make_arena(spec, nbytes), spec)


def capacity(spec: KVSpec, nbytes: int, rung: int) -> int:
    """Tokens of one request that fits alone on ``rung`` in ``nbytes``. Raises ``CapacityError`` as ``make_tables``."""
    return make_tables(spec, nbytes).max_tokens(rung)


def make_arena(spec: KVSpec, nbytes: int) -> Arena:
    """An arena for blocks of ``spec`` in ``nbytes``, aligned, with the slabs that waste least.

    ``nbytes``: at least ``least_nbytes``.
    """
    group = spec.group
    block = group.widest.nbytes
    if not _slab_sizes(group):
        return Arena(nbytes // block * block, block, block_nbytes=block)
    nbytes -= nbytes % group.align
    fitting = [slab for slab in _slabs(group) if _least_with(group, slab) <= nbytes]
    slab = min(fitting, key=lambda slab: (_expected_loss(group, slab, nbytes), slab))
    return Arena(nbytes, slab, _reserve(group, slab), block_nbytes=block)


def least_nbytes(spec: KVSpec) -> int:
    """The least memory in which a request alone has a block on each rung beside an open one."""
    group = spec.group
    if not _slab_sizes(group):
        return group.widest.nbytes * (1 + len(group.slots))
    return min(_least_with(group, slab) for slab in _slabs(group))


def _slab_sizes(group: GroupSpec) -> set[int]:
    """Bytes of the slots that lie in slabs: all but those of blocks on the widest rung."""
    sizes = {rung.nbytes for rung in group.rungs} | {slot.nbytes for slot in group.slots}
    return sizes - {group.widest.nbytes}


def _slabs(group: GroupSpec) -> list[int]:
    """Sizes of a slab that may waste least: a few slots of some size, of at most ``MAX_SLAB_BLOCKS`` blocks.

    A slab is no larger than the blocks that fill it when they step down, so that steps down never take more bytes.
    """
    block, narrow = group.widest.nbytes, _slab_sizes(group)
    most, rungs = MAX_SLAB_BLOCKS * block, [rung.nbytes for rung in group.rungs[1:]]
    sizes = (
        -(-number * size // group.align) * group.align
        for size in narrow | {block}
        for number in range(-(-max(narrow) // size), most // size + 1)
    )
    return [slab for slab in sizes if not rungs or slab // rungs[0] * block >= slab]


def _reserve(group: GroupSpec, slab: int) -> int:
    return reserve_nbytes([rung.nbytes for rung in group.rungs], slab)


def _least_with(group: GroupSpec, slab: int) -> int:
    block = group.widest.nbytes
    slots = sum(block if slot.nbytes == block else slab for slot in group.slots)
    return block + slots + slab * (len(group.rungs) > 1) + _reserve(group, slab)


def _expected_loss(group: GroupSpec, slab: int, nbytes: int) -> float:
    """Bytes that hold no KV: the reserve, half of what a slab of each size may leave free, and the mean of rests.

    Small slabs leave rests, large ones a large reserve.
    """
    halves = sum(slab - slab // (slab // size) for size in _slab_sizes(group)) / 2
    rests = [1 - slab // rung.nbytes * rung.nbytes / slab for rung in group.rungs[1:]]
    return _reserve(group, slab) + halves + nbytes * sum(rests) / max(1, len(rests))
