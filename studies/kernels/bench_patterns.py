"""Checks and times PatternKV's work outside attention on a GPU: mining of a prompt, centres and seals of blocks.

python -m studies.kernels.bench_patterns [--patterns 32,64] [--tokens 128,1024,8192] [--json FILE]

All layers of qwen3-8b's shape. Sealed bytes are compared with the references', at a smaller shape: tokens whose two
nearest patterns are equally far may differ. Mining has launches of its own a prompt, which no graph holds: its time is
that of a whole call, host included. Seals without patterns stand beside those with.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkv_engine.kernels.centre import write_centres
from qkv_engine.kernels.formats import Banks, BlockLayout, PageShape, make_format
from qkv_engine.kernels.formats.dense import Dense
from qkv_engine.kernels.mine import mine, num_mined
from qkv_engine.kernels.seal import seal, seal_reference

from .inputs import SIDES, T
from .timing import time_calls

LAYERS, HEADS, HEAD_DIM = 36, 8, 128
BF16 = torch.bfloat16


class Blocks:
    """Dense blocks of one request, clustered tokens, slots to seal them to and a bank, on a device."""

    def __init__(self, k: str, v: str, num_blocks: int, num_layers: int, heads: int, device: str):
        shape = PageShape(heads, T, HEAD_DIM)
        self.source = BlockLayout.stack(Dense("dense", BF16).layout(shape, s) for _ in range(num_layers) for s in SIDES)
        names = dict(zip(SIDES, (k, v), strict=True))
        sides = [make_format(names[s], BF16).layout(shape, s) for _ in range(num_layers) for s in SIDES]
        self.target = BlockLayout.stack(sides)
        sizes = self.source.nbytes * num_blocks, self.target.nbytes * num_blocks, self.target.bank_nbytes
        generator = torch.Generator(device).manual_seed(0)
        centres = torch.randn(16, HEAD_DIM, device=device, generator=generator)
        number = num_blocks * len(sides) * heads * T
        at = torch.randint(16, (number,), device=device, generator=generator)
        self.memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        x = self.memory[: sizes[0]].view(BF16).view(number, HEAD_DIM)
        for part, rows in zip(torch.split(x, 1 << 16), torch.split(at, 1 << 16), strict=True):
            part.copy_(centres[rows] + 0.4 * torch.randn(part.shape, device=device, generator=generator))
        self.src = torch.arange(num_blocks, device=device) * self.source.nbytes
        self.dst = torch.arange(num_blocks, device=device) * self.target.nbytes + sizes[0]
        self.bank = sizes[0] + sizes[1]

    def banks(self, limit: int) -> Banks | None:
        """Every block may use ``limit`` patterns and adds one of the last of them."""
        if not self.target.bank_nbytes:
            return None
        number = torch.arange(len(self.src), device=self.src.device)
        return Banks(torch.full_like(number, self.bank), torch.full_like(number, limit), limit - 1 - number)

    def mine(self, num_tokens: int) -> None:
        blocks = self.src[: -(-num_tokens // T)].tolist()
        mine(self.memory, blocks, num_tokens, self.bank, self.source, self.target)


def check(number: int, device: str = "cuda") -> dict[str, float]:
    """Shares of bytes that differ from the references', of the bank's first centre and of sealed blocks."""
    k, v = _names(2, number)
    blocks = Blocks(k, v, 3, 2, 2, device)
    blocks.mine(256)
    expected, banks = blocks.memory.cpu(), blocks.banks(min(number, 33))
    assert banks is not None
    where = blocks.src.cpu(), blocks.dst.cpu(), blocks.source, blocks.target
    seal_reference(expected, *where, Banks(*(part.cpu() for part in banks)))
    seal(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target, banks=banks)
    wrong = (blocks.memory.cpu() != expected).float()
    return {"bank": float(wrong[blocks.bank :].mean()), "blocks": float(wrong[int(where[1][0]) : blocks.bank].mean())}


def measure(patterns: list[int], tokens: list[int]) -> Iterator[dict[str, Any]]:
    """Milliseconds of mining, microseconds a block of centres and seals."""
    for bits in (4, 2):
        plain = Blocks(f"int{bits}-channel-128", f"int{bits}-token-128", 8, LAYERS, HEADS, "cuda")
        yield {"what": f"seal to {bits} bits", "patterns": 0, "us": _seal_us(plain, 0)}
    for number in patterns:
        for num_tokens in tokens:
            blocks = Blocks(*_names(2, number), -(-num_tokens // T), LAYERS, HEADS, "cuda")
            ms = 1e3 * _seconds(lambda blocks=blocks, n=num_tokens: blocks.mine(n))  # type: ignore[misc]
            mined = num_mined(number, num_tokens)
            yield {"what": f"mine {mined} of {num_tokens} tokens", "patterns": number, "us": 1e3 * ms}
            del blocks
        for bits in (4, 2):
            blocks = Blocks(*_names(bits, number), 8, LAYERS, HEADS, "cuda")
            blocks.mine(8 * T)
            banks = blocks.banks(number)
            assert banks is not None

            def centres(blocks: Blocks = blocks, banks: Banks = banks) -> None:
                write_centres(blocks.memory, blocks.src, blocks.source, blocks.target, banks)

            yield {"what": "centre", "patterns": number, "us": 1e6 * time_calls([centres]) / len(blocks.src)}
            yield {"what": f"centre, seal to {bits} bits", "patterns": number, "us": _seal_us(blocks, number)}


def _names(bits: int, number: int) -> tuple[str, str]:
    return f"int{bits}-channel-128-patterns{number}", f"int{bits}-token-128-patterns{number}"


def _seal_us(blocks: Blocks, limit: int) -> float:
    """Microseconds a block."""
    finite, banks = torch.ones_like(blocks.src), blocks.banks(limit)

    def call() -> Tensor:
        return seal(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target, finite, banks)

    return 1e6 * time_calls([call]) / len(blocks.src)


def _seconds(call: Callable[[], Any], repeats: int = 9) -> float:
    """Median time of a call that no graph holds, on the device or the host, whichever is later."""
    events: Any = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]  # type: ignore[no-untyped-call]
    found = []
    for start, end in events:
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(float(start.elapsed_time(end)) / 1e3)
    return statistics.median(found[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--patterns", default="32,64")
    parser.add_argument("--tokens", default="128,1024,8192")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": []}
    for number in (3, *map(int, args.patterns.split(","))):
        found = check(number)
        print(
            f"{number:3} patterns  " + "  ".join(f"{k}: {x:.1e} of bytes differ" for k, x in found.items()), flush=True
        )
        assert found["bank"] == 0 and found["blocks"] < 1e-3, "kernels are wrong: nothing is timed"
    for row in measure([int(n) for n in args.patterns.split(",")], [int(n) for n in args.tokens.split(",")]):
        result["rows"].append(row)
        print(f"{row['what']:32} {row['patterns']:4} patterns {row['us']:10.1f} us", flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
