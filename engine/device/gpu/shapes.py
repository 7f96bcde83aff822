"""Launch shapes of decode attention: few, so that few captured graphs serve all steps. No torch.

Bounds are whole numbers of work items for each request of a padded batch. An H200 takes about 0.75 ns for a program
without an item, so that an item too many costs a step of 36 layers and 8 KV heads 0.2 us: half an item for each of 256
requests 0.03 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qkv_engine.kernels.paged_decode.split import (
    SHORT_ITEM,
    Bounds,
    choose_split,
    has_deep_items,
    most_items,
    window_blocks,
)

LEAST_ITEMS = 64  # of a launch; so many programs leave multiprocessors free, and idle ones take no time
SHORT, LONG, MOST = 2, 4, 8  # items a request: least bounds for short ones and others, and the most of large batches
CODES_FIRST = 8  # requests, above which codes with two pages under way are worth 3 % of a step if launched first
FEW_REQUESTS = 64  # of a batch; up to here bounds are powers of two items a request, whose idle programs cost 0.06 ms


@dataclass(frozen=True)
class LaunchShapes:
    """The rule that finds a step's launch shape, for the heads of a model and a device.

    ``item_blocks``: the most blocks of a work item whatever the step, so that a request's attention does not depend on
    its neighbours; None for those of the shortest launch.
    """

    num_kv_heads: int
    head_dim: int
    num_multiprocessors: int
    item_blocks: int | None = None

    def split(
        self, counts: Sequence[int], num_decodes: int, batch: int, beside_chunks: bool = False
    ) -> tuple[int, Bounds]:
        """The most blocks of a work item and the launch shape of single tokens' attention.

        ``counts``: blocks by rung that the tables hold;  ``batch``: padded size of the step's ``num_decodes`` requests.
        A step with chunks of prompts is long beside idle programs, so ``beside_chunks`` leaves one shape a batch: items
        are made large enough for it, and the launch for other rungs is there even if no block is.
        """
        if self.item_blocks is not None:
            return self._steady_split(counts, num_decodes, batch, self.item_blocks, beside_chunks)
        total = sum(counts)
        size = self._choose(total, num_decodes, 2 * counts[0] > total)
        is_short = counts[0] <= SHORT_ITEM * num_decodes and not beside_chunks
        least = max(LEAST_ITEMS, (SHORT if is_short else LONG) * batch)
        most = least if beside_chunks else MOST * batch if batch > FEW_REQUESTS else total
        while True:
            first, *narrow = (most_items(count, num_decodes, size) for count in counts)
            others = sum(narrow)
            if size >= total or (max(first, others) <= most and (first <= least or not is_short)):
                break
            size *= 2
        if is_short:
            return size, _short(others, batch)
        # One bound for both launches stays while blocks step down.
        return size, _long(max(first, others), batch, has_others=bool(others or (beside_chunks and narrow)))

    def _choose(self, num_blocks: int, num_requests: int, is_dense: bool) -> int:
        return choose_split(
            num_blocks, num_requests, self.num_kv_heads, self.head_dim, self.num_multiprocessors, is_dense
        )

    def _steady_split(
        self, counts: Sequence[int], num_decodes: int, batch: int, size: int, beside_chunks: bool
    ) -> tuple[int, Bounds]:
        """``split`` into items of a given ``size``: bounds have room for all, however many shapes that makes."""
        first, *narrow = (most_items(count, num_decodes, size) for count in counts)
        others = sum(narrow)
        if first <= max(LEAST_ITEMS, SHORT * batch) and not beside_chunks:
            bounds = _short(others, batch)
        else:
            bounds = _long(max(first, others), batch, has_others=bool(others or (beside_chunks and narrow)))
        return size, _steady(bounds)

    def split_window(self, window: int, block_tokens: int, num_rungs: int, batch: int) -> tuple[int, Bounds]:
        """``split`` for the plan of a ``window``: the same for all lengths of requests, whatever has stepped down."""
        blocks, num_others = window_blocks(window, block_tokens), num_rungs - 1
        size = self.item_blocks or self._choose(batch * blocks, batch, is_dense=True)
        first = batch * most_items(blocks, 1, size)
        others = batch * most_items(blocks, num_others, size) if num_others else 0
        return size, Bounds(first, others, is_steady=self.item_blocks is not None)

    def all_bounds(self, batch: int, states: Iterable[Sequence[int]], numbers: Sequence[int]) -> list[Bounds]:
        """The launch shapes of ``numbers`` single tokens alone, padded to ``batch``, for ``states`` and smaller ones.

        ``states`` have blocks by rung.
        """
        found = {self.split(counts, number, batch)[1] for counts in states for number in numbers}
        has_others, least = any(bounds.others for bounds in found), MOST * batch if batch > FEW_REQUESTS else 0
        most_short = max(least, *(bounds.others for bounds in found if bounds.is_short), 0) if has_others else 0
        most_long = max(least, *(bounds.first for bounds in found if not bounds.is_short), 0)
        short = {_short(number, batch) for number in range(0, most_short + 1, batch)}
        long = {_long(n, batch, others) for n in range(0, most_long + 1, batch) for others in {False, has_others}}
        if self.item_blocks is not None:
            return sorted({_steady(bounds) for bounds in short | long})
        return sorted(short | long)


def _short(others: int, batch: int) -> Bounds:
    """The launch shape for ``others`` items on other rungs than the first, where items are short."""
    first = max(LEAST_ITEMS, SHORT * batch)
    is_deep = batch <= FEW_REQUESTS and has_deep_items(others, batch)
    # The launch of more items goes first, behind which sinks and open blocks then hide.
    least = first + 1 if is_deep and batch > CODES_FIRST else first
    most = _rounded_up(max(least, others), batch, batch > FEW_REQUESTS) if others else 0
    return Bounds(first, most, is_short=True, is_deep=is_deep)


def _steady(bounds: Bounds) -> Bounds:
    """The launch shape whose kernels do the same arithmetic, however many items there are."""
    return bounds._replace(is_steady=True, is_deep=False)


def _long(items: int, batch: int, has_others: bool) -> Bounds:
    """The launch shape for up to ``items`` on the first rung and, if it ``has_others``, as many on the others."""
    most = _rounded_up(max(LEAST_ITEMS, LONG * batch, items), batch)
    return Bounds(most, most if has_others else 0)


def _rounded_up(number: int, batch: int, is_fine: bool = False) -> int:
    """The smallest bound that is not below ``number``: a power of two items a request, or one of four an octave."""
    octave = 1 << (-(-number // batch) - 1).bit_length()
    step = batch * (max(1, octave // 4) if is_fine else octave)
    return max(LEAST_ITEMS, -(-number // step) * step)
