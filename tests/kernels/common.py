"""Builders and the one error measure of the kernel tests."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv_engine.kernels.request_pages import LayerPages, RequestPages

BLOCK_TOKENS = 128


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of the reference; a NaN anywhere compares as a failure."""
    out, reference = out.double(), reference.double()
    return ((out - reference).norm() / reference.norm()).item()


def block_tables(lengths: list[int], num_slots: int, *, order: str, seed: int = 0) -> list[list[int]]:
    """Slots of requests of ``lengths`` tokens: in "sequence", "interleaved" over requests, or "shuffled"."""
    needed = [-(-n // BLOCK_TOKENS) for n in lengths]
    slots = list(range(num_slots))
    if order == "shuffled":
        slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed)).tolist()
    if order != "interleaved":
        supply = iter(slots)
        return [[next(supply) for _ in range(n)] for n in needed]
    tables: list[list[int]] = [[] for _ in lengths]
    supply = iter(slots)
    for level in range(max(needed)):
        for table, n in zip(tables, needed, strict=True):
            if level < n:
                table.append(next(supply))
    return tables


def locate(tables: list[list[int]], lengths: list[int]) -> list[RequestPages]:
    """Requests whose blocks are all dense, in slots ``tables``."""
    found = []
    for table, length in zip(tables, lengths, strict=True):
        num_full, rest = divmod(length, BLOCK_TOKENS)
        open_ = (table[num_full], rest) if rest else None
        found.append(RequestPages(length, full=table[:num_full], open=open_))
    return found


def dense_pages(num_slots: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> LayerPages:
    """The middle one of three layers, so that slots are not adjacent in memory."""
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randn(num_slots, 3, 2, num_kv_heads, BLOCK_TOKENS, head_dim, generator=generator).to(dtype)
    return LayerPages(1, blocks.view(torch.uint8).flatten(), blocks[:, 1], None, ())


def poison_unused(pages: Tensor, tables: list[list[int]], value: float) -> None:
    """Fills every slot no request owns."""
    used = {slot for table in tables for slot in table}
    for slot in range(len(pages)):
        if slot not in used:
            pages[slot] = value
