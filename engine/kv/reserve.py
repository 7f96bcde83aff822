"""The reserve: bytes that are kept for demotions, so that blocks always reach their floors. No torch."""

from __future__ import annotations

from collections.abc import Sequence


def reserve_nbytes(
    chains: Sequence[Sequence[int]], block_nbytes: int, slab_nbytes: int, num_floors: Sequence[int] | None = None
) -> int:
    """Bytes to keep so that some block finds a slot to step down into while one stands above its floor.

    ``chains``: bytes of a block of each group, and of states, on each rung, widest first. Dense blocks of
    ``block_nbytes`` lie side by side, all others in slabs. ``num_floors``: distinct floors below the first rung, by
    chain; None for one each. A slab, and what slabs that are begun may leave free. The proof is in docs/kv_cache.md.
    """
    if all(len(rungs) == 1 for rungs in chains):
        return 0
    left = [[slab_nbytes - slab_nbytes // (slab_nbytes // size) for size in rungs[1:]] for rungs in chains]
    floors = [max(1, number) for number in num_floors or [1] * len(chains)]
    stuck = [
        _largest(sizes[:-1] if f == 1 else sizes, min(f, len(sizes) - 1)) for sizes, f in zip(left, floors, strict=True)
    ]
    others = [_largest(sizes, f) for sizes, f in zip(left, floors, strict=True)]
    most = max(stuck[k] + sum(others) - others[k] for k, sizes in enumerate(left) if sizes)
    dense = {rungs[0] for rungs in chains} - {block_nbytes}
    return slab_nbytes + most + sum(slab_nbytes - slab_nbytes // (slab_nbytes // size) for size in dense)


def _largest(sizes: Sequence[int], number: int) -> int:
    """The sum of the ``number`` largest ``sizes``."""
    return sum(sorted(sizes, reverse=True)[:number])
