"""Prefill attention on the GPU: one launch for rung 0, and one for each other rung present or each piece of it.

Each launch continues the softmax of the one before. Pages of rung 0 are dense and lie at whole rows of the arena, so
that tiles are fetched by the copy engine. Blocks on other rungs are first written out as such pages, ``STAGED_NBYTES``
of them at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..formats import BlockLayout, PageLayout, Side
from ..formats.dense import DenseSide
from ..formats.loaders import loaded_dtype, page_loaders
from ..fusion import FUSED
from ..nvidia import has_large_shared
from ..paged_decode.triton import LOG2_E, Tuning, bank_arguments
from . import hopper
from .kernel import prefill_kernel
from .plan import PrefillWork
from .stage import stage_kernel

BLOCK_M = 64  # rows of a query tile: tokens times the query heads that share a KV head
WIDE_BLOCK_M = 32  # of heads with more than 256 channels, whose sums take twice the registers a row
LARGE_BLOCK_M = 128  # of heads with 129 to 256 channels in 16 bits, on devices with large shared memory
TUNING = Tuning(num_warps=4, num_stages=5, tile=64)  # of 16-bit pages with head dims up to 128
LARGE_TUNING = Tuning(num_warps=8, num_stages=2, tile=64)  # of LARGE_BLOCK_M rows: two warpgroups of 64
TAIL_STAGES = 3  # of the loop that masks; with more, two programs no longer fit a multiprocessor's shared memory
STAGED_NBYTES = 256 << 20  # of dense pages written out at a time; more saves launches, less saves memory


def tile_tokens(num_heads: int, num_kv_heads: int, block_m: int) -> int:
    """Tokens of a query tile of ``block_m`` rows, an argument of ``PrefillWork.build``."""
    return max(1, block_m // (num_heads // num_kv_heads))


def query_rows(head_dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows of a query tile over dense pages of ``dtype``: as many as shared memory and registers of a device hold."""
    if head_dim > 256:
        return WIDE_BLOCK_M
    is_large = head_dim > 128 and dtype.itemsize <= 2 and has_large_shared(device)
    return LARGE_BLOCK_M if is_large else BLOCK_M


@dataclass(frozen=True)
class Launch:
    """One launch over dense pages in ``memory``: of rung 0, or a ``piece`` of the blocks of another rung."""

    rung: int
    page: PageLayout
    memory: Tensor
    addresses: Tensor
    piece: tuple[int, int] | None = None


def paged_prefill(
    q: Tensor,
    arena: Tensor,
    work: PrefillWork,
    pages: Sequence[PageLayout | None],
    scale: float,
    out: Tensor | None = None,
    tuning: Tuning | None = None,
    softcap: float | None = None,
    null_logits: Tensor | None = None,
) -> Tensor:
    """Attention of chunks, written to their blocks, over themselves and their requests' earlier tokens.

    Shapes:  q [N, HQ, D], any strides of the outer dims;  arena [nbytes] uint8;  null_logits [HQ];
             returns [N, HQ, D] in q's dtype
    ``pages[r]``: this layer's page layout on rung r. Slots and offsets of rung 0, which is dense, are multiples of the
    bytes of D elements. ``tuning``: of the kernel for all devices, which is launched then.
    """
    assert pages[0] is not None and work.rungs[0] == 0
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = pages[0].k.shape.num_kv_heads
    group = num_heads // num_kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    assert arena.dtype == torch.uint8 and q.stride(2) == out.stride(2) == 1 and num_heads % num_kv_heads == 0
    launches = [Launch(0, pages[0], arena, work.addresses)]
    for rung in work.rungs[1:]:
        launches += _pieces(arena, work, rung, pages[rung])
    state = (0,) if len(launches) == 1 else (num_rows, num_heads)
    lse = torch.empty(state, dtype=torch.float32, device=q.device)
    o = torch.empty((*state, head_dim), dtype=torch.float32, device=q.device)
    for launch in launches:
        page = launch.page
        if launch.piece:
            _stage(arena, work, pages[launch.rung], launch)
        kernel, rows, others, options = _kernel_of(launch, group, work, tuning, softcap, q.dtype)
        kernel[(num_kv_heads, len(work.tiles))](
            q,
            q.stride(0),
            q.stride(1),
            rows,
            page.k_place.codes,
            page.v_place.codes,
            work.tiles,
            work.runs[launch.rung],
            launch.addresses,
            work.blocks[launch.rung],
            *(launch.piece or (0, 0)),
            o,
            lse,
            out,
            out.stride(0),
            out.stride(1),
            scale * LOG2_E,
            None if launch.piece else null_logits,
            *others,
            IS_STAGED=launch.piece is not None,
            IS_LAST=launch is launches[-1],
            **options,
            **FUSED,
        )
    return out


def _kernel_of(
    launch: Launch,
    group: int,
    work: PrefillWork,
    tuning: Tuning | None,
    softcap: float | None,
    dtype: torch.dtype,
) -> tuple[Any, Any, tuple[Tensor | None, ...], dict[str, Any]]:
    """The kernel that a launch takes for queries of ``dtype``, a descriptor of its rows, its own arguments, options."""
    page, rows, block_m = launch.page, _rows(launch), triton.next_power_of_2(work.tile_tokens * group)
    if tuning is None and hopper.suits(page, dtype, block_m, work.window, softcap, rows.device):
        return hopper.kernel(), hopper.tile_rows(rows), (), hopper.hopper_options(page, group, work.sink_tokens)
    constexprs, tuned = prefill_variant(page, group, work.sink_tokens, tuning, block_m, work.window, softcap)
    descriptor = TensorDescriptor.from_tensor(rows, [constexprs["TILE"], constexprs["BLOCK_D"]])
    return prefill_kernel, descriptor, (launch.memory, work.positions), {**constexprs, "num_warps": tuned.num_warps}


def _rows(launch: Launch) -> Tensor:
    """The whole rows [R, D] of a launch's memory."""
    k, nbytes = launch.page.k, launch.memory.numel()
    dtype, head_dim = _dense_dtype(k), k.shape.head_dim
    whole = launch.memory[: nbytes - nbytes % (head_dim * dtype.itemsize)]
    return whole.view(dtype).view(-1, head_dim)


def _dense_dtype(side: Side) -> torch.dtype:
    assert side.dense_dtype is not None, "staged pages and those of rung 0 are dense"
    return side.dense_dtype


def _pieces(arena: Tensor, work: PrefillWork, rung: int, page: PageLayout | None) -> list[Launch]:
    """Launches over a staged rung, which share one piece of memory.

    A chunk's blocks are divided by themselves: the softmax of a row is passed on at the same blocks whatever chunks are
    beside its own.
    """
    assert page is not None
    num_blocks = len(work.blocks[rung])
    dtype = loaded_dtype(page)
    staged = BlockLayout.stack([DenseSide("k", page.k.shape, dtype), DenseSide("v", page.v.shape, dtype)])
    step = max(1, min(num_blocks, STAGED_NBYTES // staged.nbytes))
    memory = torch.empty(step * staged.nbytes, dtype=torch.uint8, device=arena.device)
    addresses = torch.empty_like(work.addresses)
    dense = staged.pages[0]
    return [Launch(rung, dense, memory, addresses, piece) for piece in pieces_of(work.chunk_blocks[rung], step)]


def pieces_of(numbers: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Chunks of ``numbers`` of blocks in pieces from and to a block: whole ones, and of one with more ``most`` each."""
    start = end = 0
    for number in numbers:
        if end > start and end + number - start > most:
            yield start, end
            start = end
        end += number
        while end - start > most:
            yield start, start + most
            start += most
    if end > start:
        yield start, end


def _stage(arena: Tensor, work: PrefillWork, page: PageLayout | None, launch: Launch) -> None:
    """Writes the blocks of a launch out as dense pages."""
    assert page is not None and launch.piece is not None
    first, last = launch.piece
    stage_kernel[(last - first, page.k.shape.num_kv_heads, page.k.shape.num_tokens // 32)](
        arena,
        *page.offsets,
        work.blocks[launch.rung],
        first,
        work.addresses,
        launch.memory.view(_dense_dtype(launch.page.k)),
        launch.addresses,
        len(work.addresses) // (1 if work.banks is None else len(work.banks)),
        **bank_arguments(page, work.banks),
        **stage_constexprs(page),
        num_warps=4,
        **FUSED,
    )


def stage_constexprs(page: PageLayout) -> dict[str, Any]:
    """Compile-time arguments of ``stage_kernel`` for pages of one format."""
    shape = page.k.shape
    block_d = max(16, triton.next_power_of_2(shape.head_dim))
    extent = {"H": shape.num_kv_heads, "D": shape.head_dim, "T": shape.num_tokens, "BLOCK_D": block_d, "TILE": 32}
    return {**page_loaders(page), **extent}


def prefill_variant(
    page: PageLayout,
    group: int,
    sink_tokens: int,
    tuning: Tuning | None = None,
    block_m: int = BLOCK_M,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[dict[str, Any], Tuning]:
    """Compile-time arguments (but for the launch's place in the order) and launch parameters; dense pages."""
    shape, dtype = page.k.shape, _dense_dtype(page.k)
    block_d = max(16, triton.next_power_of_2(shape.head_dim))
    tuning = tuning or TUNING
    if block_d == 256 and block_m >= LARGE_BLOCK_M and dtype.itemsize == 2:
        tuning = LARGE_TUNING
    elif block_d > 128 or dtype == torch.float32:  # larger tiles do not fit shared memory and registers
        tuning = replace(tuning, num_warps=8, num_stages=min(4, tuning.num_stages), tile=32)
    if block_d > 256:
        tuning = replace(tuning, num_stages=2, tile=16)
    if dtype == torch.float32:  # float32 dots have no matrix instructions and take every register
        tuning = replace(tuning, num_stages=1)
    constexprs = {
        "SIDE": page.k.spec,
        "H": shape.num_kv_heads,
        "G": group,
        "D": shape.head_dim,
        "T": shape.num_tokens,
        "S": sink_tokens,
        "BLOCK_M": max(16, block_m),
        "BLOCK_D": block_d,
        "TILE": tuning.tile,
        "STAGES": tuning.num_stages,
        "TAIL_STAGES": min(TAIL_STAGES, tuning.num_stages),
        "WINDOW": window,
        "SOFTCAP": softcap,
    }
    return constexprs, tuning
