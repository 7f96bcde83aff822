"""The miss of graded blocks: how much more their last channels with codes vary than they did in calibration.

A block's metadata have the range of each channel with codes. Of 128 Gaussian samples of variance L, range^2 is 27.28 L
on average; L is known from calibration. A head's miss is the mean of range^2 / (27.28 L) over the last 16 channels
with codes, K and V apart. What a basis does not know appears there first, and in some heads far more than in others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qkv_engine.kernels.formats.graded import GradedSide
from qkv_engine.kernels.formats.graded.layout import UNIT

from ..kv.block import Block
from .host_copy import CopyToHost
from .layouts import Ladder, LayerGroup, Rung

SQUARED_RANGE = 27.28  # mean of (largest - least)^2 of 128 samples of a Gaussian of variance 1
# Least variance, of the largest of its head: a channel of less counts for nothing, and rounding alone may exceed it.
LEAST_VARIANCE = 1e-3
WORST = 4  # one of so many heads counts, those that miss most: of the demo model it tells texts apart best

Variances = Sequence[tuple[Tensor, Tensor]]  # of K and V by layer, [H, D] float32 each


class RangePlaces(NamedTuple):
    """The ranges of a block's last channels with codes, in all its graded sides and their heads.

    ``offsets`` [heads, 16] int64: from the block's address, in fp16;  ``scales`` [heads, 16] float32: 1 / (27.28 L).
    """

    offsets: Tensor
    scales: Tensor


class MissMeter:
    """Measures blocks of ``memory``, rank 0's KV heads alone."""

    def __init__(self, memory: Tensor, ladder: Ladder, variances: Variances):
        """``variances``: of the channels of all layers, as calibrated."""
        self._elements = memory.view(torch.float16)
        found = {
            (number, rung): _places(group, each, variances)
            for number, group in enumerate(ladder.groups)
            for rung, each in enumerate(group.rungs)
        }
        self._places = {
            kind: RangePlaces(*(x.to(memory.device) for x in places)) for kind, places in found.items() if places
        }
        self.rungs = {ladder.groups[group].rungs[rung].name for group, rung in self._places}

    def is_graded(self, block: Block) -> bool:
        """Whether the block stands on a rung with graded sides."""
        return (block.group, block.rung) in self._places

    @torch.inference_mode()
    def begin(self, blocks: Sequence[Block]) -> CopyToHost:
        """Enqueues the miss of graded blocks [1] float32: the mean of the worst quarter of heads.

        Of a head it is the mean of all ``blocks``, of which there is at least one.
        """
        heads = []
        for kind, (offsets, scales) in self._places.items():
            starts = [block.slot.address // 2 for block in blocks if (block.group, block.rung) == kind]
            if starts:  # numbers go to a GPU with the launch; a tensor of them would wait for the step under way
                ranges = torch.stack([self._elements[start + offsets] for start in starts]).float()
                heads.append((ranges.square() * scales).mean((0, 2)))
        found = torch.cat(heads)
        return CopyToHost(found.topk(-(-len(found) // WORST)).values.mean(0, keepdim=True))


def _places(group: LayerGroup, rung: Rung, variances: Variances) -> RangePlaces | None:
    """The ranges of a block of ``group`` on ``rung``; None if no side is graded."""
    offsets, scales = list[Tensor](), list[Tensor]()
    for index, (side, place) in enumerate(zip(rung.layout.sides, rung.layout.places, strict=True)):
        if isinstance(side, GradedSide):
            last = slice(side.coded - UNIT, side.coded)
            heads = torch.arange(side.shape.num_kv_heads)[:, None] * side.head_meta_nbytes
            offsets.append((place.meta + heads) // 2 + side.coded + torch.arange(UNIT) + last.start)
            scales.append(_scales(variances[group.layers[index // 2]][index % 2].cpu())[:, last])
    return RangePlaces(torch.cat(offsets), torch.cat(scales)) if offsets else None


def _scales(variance: Tensor) -> Tensor:
    """1 / (27.28 L), 0 in heads that never vary. [H, D]"""
    least = torch.maximum(variance, LEAST_VARIANCE * variance.amax(-1, keepdim=True))
    return torch.where(least > 0, 1 / (SQUARED_RANGE * least), 0)
