"""An arena with dense blocks to seal, for the tests of page formats; every other byte is 0xFF, which reads as NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv_engine.kernels.layout import BlockLayout, Side
from qkv_engine.kv.formats import PageShape
from qkv_engine.kv.formats.dense import Dense
from qkv_engine.kv.formats.uniform import AXES, GROUPS, Uniform

HEAD_DIMS = (64, 80, 96, 128, 256)


@dataclass
class Blocks:
    """``x`` [n, sides, H, T, D] lies at ``src`` in ``memory``; slots of ``target`` are free at ``dst`` and ``next``."""

    memory: Tensor
    x: Tensor
    src: Tensor
    dst: Tensor
    next: Tensor
    source: BlockLayout
    target: BlockLayout


def all_sides(bits: int, shape: PageShape) -> list[Side]:
    """Every axis, group and orientation of ``bits``-bit pages."""
    formats = [Uniform(bits, axis, group) for axis in AXES for group in GROUPS]
    return [fmt.layout(shape, side) for fmt in formats for side in ("k", "v")]


def make_blocks(
    sides: Sequence[Side],
    shape: PageShape,
    *,
    num_blocks: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    x: Tensor | None = None,
    seed: int = 0,
) -> Blocks:
    """Blocks of random values (or ``x``) in slots of random order, 16-byte aligned."""
    generator = torch.Generator().manual_seed(seed)
    extent = (num_blocks, len(sides), shape.num_kv_heads, shape.num_tokens, shape.head_dim)
    if x is None:
        x = torch.randn(extent, generator=generator) * torch.rand(extent[-1], generator=generator) * 3
    x = x.to(dtype).expand(extent).contiguous()
    source = BlockLayout((Dense("dense", dtype).layout(shape, "k"),) * len(sides))
    target = BlockLayout(tuple(sides))
    spans = [source.nbytes] * num_blocks + [target.nbytes] * (2 * num_blocks)
    addresses, end = [0] * len(spans), 48
    for i in torch.randperm(len(spans), generator=generator).tolist():
        addresses[i] = end
        end += spans[i] + 48
    memory = torch.full((end,), 255, dtype=torch.uint8)
    for address, block in zip(addresses, x, strict=False):
        memory[address : address + source.nbytes] = block.reshape(-1).view(torch.uint8)
    src, dst, following = torch.tensor(addresses).view(3, num_blocks)
    return Blocks(memory, x, src, dst, following, source, target)


def slot(memory: Tensor, address: Tensor | int, layout: BlockLayout) -> Tensor:
    """The bytes of one block."""
    return memory[int(address) : int(address) + layout.nbytes]
