"""Times seals and demotions of many blocks on a GPU: ``python -m studies.kernels.bench_demote [--json FILE]``.

All layers of qwen3-8b's shape in one call; bytes read and written over the time and 4.3e12 B/s, at 1 to 64 blocks.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from qkv_engine.bench.roofline import BANDWIDTH
from qkv_engine.config import DENSE16, KVConfig, RungConfig
from qkv_engine.device.layouts import Rung, build_ladder
from qkv_engine.kernels.demote import demote
from qkv_engine.kernels.formats.uniform.presets import uniform_rung
from qkv_engine.kernels.seal import seal

from .timing import time_calls

KITTY = RungConfig("kitty-25", "kitty-25", "int2-token-128")
UNIFORM_LADDER = KVConfig(name="uniform", rungs=(DENSE16, *(uniform_rung(bits) for bits in (8, 4, 2, 1))))
KITTY_LADDER = KVConfig(name="kitty", rungs=(DENSE16, uniform_rung(8), uniform_rung(4), KITTY))


def measure(source: Rung, target: Rung, num_blocks: int, device: str = "cuda") -> dict[str, Any]:
    """One transition of ``num_blocks`` blocks, from the front half of a buffer to its back half."""
    size = max(source.block_nbytes, target.block_nbytes)
    memory = torch.zeros(2 * num_blocks * size, dtype=torch.uint8, device=device)
    src = torch.arange(num_blocks, device=device) * size
    move = seal if source.name == DENSE16.name else demote
    us = 1e6 * time_calls([lambda: move(memory, src, src + num_blocks * size, source.layout, target.layout)])
    nbytes = num_blocks * (source.layout.nbytes + target.layout.nbytes)
    share = nbytes / (us * 1e-6 * BANDWIDTH)
    return {"from": source.name, "to": target.name, "blocks": num_blocks, "nbytes": nbytes, "us": us, "share": share}


def steps() -> list[tuple[Rung, Rung]]:
    """Transitions to time: each uniform rung to the next, 16 bits to every rung, and each wider rung to Kitty's."""
    uniform, kitty = (
        build_ladder(config, num_layers=36, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16).rungs
        for config in (UNIFORM_LADDER, KITTY_LADDER)
    )
    return [
        *pairwise(uniform),
        *((uniform[0], rung) for rung in uniform[2:]),
        *((rung, kitty[3]) for rung in kitty[:3]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for source, target in steps():
        for num_blocks in (1, 8, 64):
            row = measure(source, target, num_blocks)
            rows.append(row)
            print(
                f"{row['from']:>8} -> {row['to']:<8} {num_blocks:3} blocks  {row['nbytes'] / 1e6:8.1f} MB "
                f"{row['us']:9.1f} us  share {row['share']:.3f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
