"""Cases of the small fused kernels for benchmarks: inputs, launches with any parameters, torch's operators beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv_engine.kernels.fusion import FUSED
from qkv_engine.kernels.rms_norm.triton import rms_norm_kernel, rms_norm_variant
from qkv_engine.kernels.rope_kv_write.basis_triton import (
    rope_basis_kv_write_kernel,
    rope_basis_kv_write_variant,
)
from qkv_engine.kernels.rope_kv_write.key_basis import in_basis
from qkv_engine.kernels.rope_kv_write.triton import rope_kv_write_kernel, rope_kv_write_variant
from qkv_engine.kernels.swiglu import reference as swiglu_reference
from qkv_engine.kernels.swiglu.triton import swiglu_kernel, swiglu_variant
from qkv_engine.models.config import ModelConfig
from qkv_engine.models.rope import RotaryEmbedding

from .token_rows import token_rows

BF16 = torch.bfloat16
L2_NBYTES = 200 << 20  # bytes; copies of a case's inputs together exceed it where a few dozen can
MAX_COPIES = 48  # of a case's inputs at most: tiny ones stay in L2 even so
BASIS_TILES = [{"TILE_N": n, "BLOCK_K": k} for n in (16, 32, 64) for k in (32, 64)]
BLOCK, SINK, LAYERS = 128, 32, 4  # of the arena that K and V are written to

Constexprs = dict[str, Any]
Launch = Callable[[Constexprs, int, dict[str, Any]], Any]  # compile-time arguments, warps, launch options


@dataclass(frozen=True)
class Case:
    """One kernel at one size. ``variants``: compile-time arguments and warps, the default ones first."""

    kernel: str
    tokens: int
    nbytes: int
    launches: list[Launch]  # one a copy of the inputs
    separate: list[Callable[[], Any]]  # torch's operators on the same copies
    variants: list[tuple[Constexprs, int]]


def make_cases(config: ModelConfig, tokens: int) -> Iterator[Case]:
    """All kernels for ``tokens`` tokens of a model, on the GPU in bf16."""
    yield norm_case(config, tokens, add=False)
    yield norm_case(config, tokens, add=True)
    yield swiglu_case(config, tokens)
    yield rope_case(config, tokens, basis=False)
    yield rope_case(config, tokens, basis=True)


def norm_case(config: ModelConfig, tokens: int, *, add: bool) -> Case:
    size, eps = config.hidden_size, config.norm_eps
    nbytes = (4 if add else 2) * tokens * size * 2
    weight = _random(size)
    launches: list[Launch] = []
    separate: list[Callable[[], Any]] = []
    for _ in range(_copies(nbytes)):
        x, residual, out = (_random(tokens, size) for _ in range(3))

        def launch(
            constexprs: Constexprs,
            warps: int,
            options: dict[str, Any],
            x: Tensor = x,
            r: Tensor = residual,
            o: Tensor = out,
        ) -> None:
            grid = (-(-tokens // constexprs["ROWS"]),)
            rms_norm_kernel[grid](
                x, None, r if add else None, weight, o, None, tokens, **constexprs, num_warps=warps, **options, **FUSED
            )

        def apart(x: Tensor = x, r: Tensor = residual) -> Tensor:
            return F.rms_norm(r.add_(x) if add else x, (size,), None, eps).mul_(weight)

        launches.append(launch)
        separate.append(apart)
    constexprs, warps = rms_norm_variant(size, eps, add=add)
    variants = [(constexprs, w) for w in (warps, warps // 2, warps * 2)]
    return Case("add_rms_norm" if add else "rms_norm", tokens, nbytes, launches, separate, variants)


def swiglu_case(config: ModelConfig, tokens: int) -> Case:
    inner = config.intermediate_size
    nbytes = 3 * tokens * inner * 2
    launches: list[Launch] = []
    separate: list[Callable[[], Any]] = []
    for _ in range(_copies(nbytes)):
        x, out = _random(tokens, 2 * inner), _random(tokens, inner)

        def launch(constexprs: Constexprs, warps: int, options: dict[str, Any], x: Tensor = x, o: Tensor = out) -> None:
            grid = (tokens * -(-inner // constexprs["TILE"]),)
            swiglu_kernel[grid](x, o, **constexprs, num_warps=warps, **options, **FUSED)

        launches.append(launch)
        separate.append(partial(swiglu_reference.swiglu, x))
    constexprs, warps = swiglu_variant(inner)
    others = [({"INNER": inner, "TILE": tile}, w) for tile, w in ((512, 2), (2048, 4), (2048, 8))]
    return Case("swiglu", tokens, nbytes, launches, separate, [(constexprs, warps), *others])


def rope_case(config: ModelConfig, tokens: int, *, basis: bool) -> Case:
    """Single tokens of many requests, or, of more than 256, chunks of one; K and V go to random blocks."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    all_heads, eps, layer = heads + 2 * kv_heads, config.norm_eps, LAYERS - 1
    nbytes = tokens * (2 * all_heads * dim * 2 + dim * 4 + 16)
    weight = _random(heads + kv_heads, dim) if config.qk_norm else None
    matrices = _random(2, kv_heads, dim, dim) if basis else None
    slot_rows = LAYERS * 2 * kv_heads * BLOCK
    pages = torch.zeros(256 * slot_rows, dim, dtype=BF16, device="cuda")
    block_rows = pages[2 * layer * kv_heads * BLOCK :], pages[(2 * layer + 1) * kv_heads * BLOCK :]
    launches: list[Launch] = []
    separate: list[Callable[[], Any]] = []
    for copy in range(_copies(nbytes)):
        rows, positions = _place(tokens, copy, slot_rows * dim * 2, dim * 2)
        cos, sin = RotaryEmbedding(config.ropes[0], dim)(positions)
        qkv = _random(tokens, all_heads, dim)
        where = (rows[:, :1] + torch.arange(kv_heads, device="cuda") * BLOCK).flatten()

        def launch(
            constexprs: Constexprs, warps: int, options: dict[str, Any],
            qkv: Tensor = qkv, cos: Tensor = cos, sin: Tensor = sin, rows: Tensor = rows,
        ) -> None:  # fmt: skip
            if matrices is None:
                grid: tuple[int, ...] = (tokens * -(-all_heads // constexprs["TILE_H"]),)
                rope_kv_write_kernel[grid](
                    qkv, cos, sin, rows, pages, weight, layer, **constexprs, num_warps=warps, **options, **FUSED
                )
                return
            grid = (all_heads, -(-tokens // constexprs["TILE_N"]))
            rope_basis_kv_write_kernel[grid](
                qkv,
                cos,
                sin,
                rows,
                pages,
                weight,
                *matrices,
                tokens,
                layer,
                **constexprs,
                num_warps=warps,
                num_stages=2,
                **options,
                **FUSED,
            )

        def apart(qkv: Tensor = qkv, cos: Tensor = cos, sin: Tensor = sin, where: Tensor = where) -> None:
            qk, v = qkv.split_with_sizes((heads + kv_heads, kv_heads), dim=1)
            if weight is not None:
                qk = F.rms_norm(qk, (dim,), None, eps).mul_(weight)
            qk = (qk * cos).addcmul_(qk.roll(dim // 2, -1), sin).to(BF16)
            if matrices is not None:
                parts = zip(qk.split_with_sizes((heads, kv_heads), 1), matrices, strict=True)
                qk = torch.cat([in_basis(*part) for part in parts], 1)
            block_rows[0].index_copy_(0, where, qk[:, heads:].reshape(-1, dim))
            block_rows[1].index_copy_(0, where, v.reshape(-1, dim))

        launches.append(launch)
        separate.append(apart)
    name = "norm_rope_kv_write" if config.qk_norm else "rope_kv_write"
    if basis:
        constexprs, warps = rope_basis_kv_write_variant(heads, kv_heads, dim, eps, norm=config.qk_norm, itemsize=2)
        others = [({**constexprs, **tiles}, w) for tiles in BASIS_TILES for w in (2, 4, 8)]
        return Case(f"{name}, basis", tokens, nbytes, launches, separate, [(constexprs, warps), *others])
    constexprs, warps = rope_kv_write_variant(heads, kv_heads, dim, eps, norm=config.qk_norm)
    others = [({**constexprs, "TILE_H": tile}, w) for tile, w in ((4, 1), (8, 4), (16, 4), (16, 8))]
    return Case(name, tokens, nbytes, launches, separate, [(constexprs, warps), *others])


def _place(tokens: int, copy: int, slot_nbytes: int, row_nbytes: int) -> tuple[Tensor, Tensor]:
    """Rows and positions of ``tokens`` tokens after the sink, in blocks of their own or in whole ones."""
    num_blocks = tokens if tokens <= 256 else -(-tokens // BLOCK)
    slots = torch.randperm(256, device="cuda")[:num_blocks] * slot_nbytes
    addresses = torch.cat((slots.new_zeros(1), slots))[None]
    index = torch.arange(tokens, device="cuda")
    positions = SINK + (index * BLOCK + copy % BLOCK if tokens <= 256 else index)
    rows = token_rows(
        addresses, torch.zeros_like(index), positions, sink_tokens=SINK, block_tokens=BLOCK, row_nbytes=row_nbytes
    )
    return rows, positions


def _copies(nbytes: int) -> int:
    return max(2, min(MAX_COPIES, L2_NBYTES // nbytes + 1))


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(BF16)
