"""Sensitivity of K and V to formats: errors of the formats' own quantizers times the loss's gradients.

Keys are those that a cache holds, after q/k norm and rotation. Source: PM-KVQ (arXiv 2505.18610), keyed by layer,
where the release multiplies a layer's errors with the gradients of its mirror image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qkv_engine.config import BLOCK_TOKENS
from qkv_engine.errors import ConfigError
from qkv_engine.kernels.formats import FAMILIES, PageShape, Side, SideBytes, make_format
from qkv_engine.kernels.formats.family import SideName
from qkv_engine.layer_kv import LayerKV

DENSE = "dense16"
SINK = 32  # first tokens of a text, dense in every plan: their errors are not counted
PIECE_PAGES = 16  # quantized at a time; more of them make larger temporaries


class Candidates(NamedTuple):
    """Candidate formats of K and of V: sides by format name, widest first, as plan files list their sensitivities."""

    k: Mapping[str, Side]
    v: Mapping[str, Side]

    @classmethod
    def none(cls) -> Candidates:
        """No formats, for plans that are made from a model's moments alone."""
        return cls({}, {})

    @classmethod
    def of(cls, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Candidates:
        """All formats of plans that fit heads of this shape, in a model that computes in ``dtype``."""
        shape = PageShape(num_kv_heads, BLOCK_TOKENS, head_dim)
        return cls(_sides(shape, "k", dtype), _sides(shape, "v", dtype))

    @classmethod
    def of_layers(cls, layers: Sequence[LayerKV], dtype: torch.dtype) -> list[Candidates]:
        """The candidates of each layer: the formats that fit the heads of all layers, in the same order."""
        shapes = dict.fromkeys((layer.num_kv_heads, layer.head_dim) for layer in layers)
        found = {shape: cls.of(*shape, dtype) for shape in shapes}
        k, v = (_shared([getattr(each, side) for each in found.values()]) for side in cls._fields)
        same = {
            shape: cls({name: each.k[name] for name in k}, {name: each.v[name] for name in v})
            for shape, each in found.items()
        }
        return [same[layer.num_kv_heads, layer.head_dim] for layer in layers]


def _shared(sides: Sequence[Mapping[str, Side]]) -> list[str]:
    """The formats that all of ``sides`` have, in the order of the first."""
    return [name for name in sides[0] if all(name in each for each in sides)]


def _sides(shape: PageShape, side: SideName, dtype: torch.dtype) -> dict[str, Side]:
    found = {}
    for name in (name for family in FAMILIES for name in getattr(family.candidates, side)):
        try:
            found[name] = make_format(name, dtype).layout(shape, side)
        except ConfigError:  # does not fit these heads
            continue
    return dict(sorted(found.items(), key=lambda item: item[1].nbytes, reverse=True))


def side_sensitivities(x: Tensor, gradient: Tensor, sides: Mapping[str, Side]) -> Tensor:
    """Sum of |error x gradient| of each of ``sides``: [formats] float32.

    Shapes:  x and gradient [N, H, D], keys or values of one layer and the loss's gradients there
    """
    found = x.new_zeros(len(sides), dtype=torch.float32)
    if len(x) <= SINK:
        return found
    values, weights = pages(x[SINK:]), pages(gradient[SINK:].abs(), fill=False)
    for piece, weight in zip(torch.split(values, PIECE_PAGES), torch.split(weights, PIECE_PAGES), strict=True):
        for index, side in enumerate(sides.values()):
            found[index] += ((round_trip(piece, side) - piece).abs() * weight).sum()
    return found


def pages(x: Tensor, *, fill: bool = True) -> Tensor:
    """Tokens [N, H, D] as pages [n, H, T, D] float32; the rest of the last repeats the first tokens, or is zero."""
    num_tokens = len(x)
    order = torch.arange(-(-num_tokens // BLOCK_TOKENS) * BLOCK_TOKENS, device=x.device)
    if num_tokens == len(order):
        whole = x.float()
    else:
        whole = x[order % num_tokens].float()
        if not fill:
            whole[num_tokens:] = 0
    return whole.view(-1, BLOCK_TOKENS, *x.shape[1:]).transpose(1, 2).contiguous()


def round_trip(x: Tensor, side: Side) -> Tensor:
    """Pages x [n, H, T, D] float32, quantized and dequantized by ``side``."""
    family = side.family
    if x.is_cuda:
        return family.dequantize(family.quantize(x, side, None), side)
    codes, meta = (torch.empty(len(x), n, dtype=torch.uint8) for n in (side.codes_nbytes, side.meta_nbytes))
    rows = SideBytes(codes, meta)
    family.cpu.seal(x, rows, side)
    return family.cpu.dequantize(rows, side, torch.float32)
