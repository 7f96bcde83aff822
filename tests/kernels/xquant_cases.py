"""Child of ``test_xquant``: Triton seals of XQuant's rungs beside KIVI's bytes and KIVI's own arithmetic."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from qkv_engine.config import DENSE16, KVConfig, RungConfig
from qkv_engine.device.layouts import build_ladder
from qkv_engine.kernels.formats import BlockLayout, PageShape
from qkv_engine.kernels.formats.uniform.presets import uniform_rung, xquant_rung
from qkv_engine.kernels.seal.triton import seal_triton
from qkv_engine.layer_schedule import ALL
from qkv_engine.presets import PRESETS
from studies.papers import quantizers
from studies.papers.cache import by_channel, by_token

from .format_cases import seal_case
from .format_pages import Blocks, make_blocks, side_rows
from .interpreted import report

SHAPE = PageShape(2, 128, 64)


def layout_of(rung: RungConfig, num_layers: int) -> BlockLayout:
    config = KVConfig(name="x", rungs=(DENSE16, rung))
    sizes = {"num_kv_heads": SHAPE.num_kv_heads, "head_dim": SHAPE.head_dim}
    return build_ladder(config, num_layers=num_layers, **sizes, dtype=torch.float16).narrowest.layout


def sealed(layout: BlockLayout, x: Tensor) -> Blocks:
    blocks = make_blocks(list(layout.sides), SHAPE, dtype=torch.float16, x=x)
    seal_triton(
        blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target, torch.ones_like(blocks.src, dtype=bool)
    )
    return blocks


def kivi_case(bits: int, group: int) -> float:
    """Bytes that differ from KIVI's rung, and values from KIVI's arithmetic, without calibration and sharing.

    Ranges and steps are exact in fp16, and no value lies between the two levels of one bit.
    """
    extents = (ALL, ALL, ALL) if bits == 2 else (0, 0, ALL)
    plain, kivi = layout_of(xquant_rung("x", extents, group, ("0", "0")), 2), layout_of(uniform_rung(bits, group), 2)
    x = torch.randint(0, 25, (1, 4, 2, 128, 64), generator=torch.Generator().manual_seed(group)) / 8
    x = torch.where(x == 1.5, 1.25, x) if bits == 1 else x
    x[..., ::32, :], x[..., 1::32, :], x[..., ::32], x[..., 1::32] = 0, 3, 0, 3
    ours, theirs = sealed(plain, x.half()), sealed(kivi, x.half())
    wrong = float((ours.memory != theirs.memory).sum()) + (plain != kivi)
    for i, side in enumerate(plain.sides):
        found = side.family.dequantize(side_rows(ours.memory, ours.dst, plain, i), side)[0]
        simulate = (by_channel, by_token)[i % 2](lambda groups: quantizers.kivi(groups, bits).values(), group)
        wrong += float((found != simulate(ours.x[0, i].float())).sum())
    return wrong


def preset_case(name: str) -> float:
    """Bytes that differ from the reference, in a rung with sides of every kind."""
    return seal_case(list(layout_of(PRESETS[name].rungs[1], 8).sides), torch.bfloat16)


def main() -> None:
    cases = {f"kivi {bits} bits, {group}": partial(kivi_case, bits, group) for bits in (2, 1) for group in (32, 128)}
    report(cases | {name: partial(preset_case, name) for name in ("xquant-g32", "xquant-1.16")})


if __name__ == "__main__":
    main()
