"""Checks and times PatternKV's work outside attention on a GPU: mining of a prompt, and seals of blocks.

python -m studies.kernels.bench_patterns [--patterns 32,64] [--tokens 128,1024,8192] [--json FILE]

All layers of qwen3-8b's shape. Sealed bytes are compared with the references', at a smaller shape: tokens whose two
nearest patterns are equally far may differ. Mining has launches of its own a prompt, which no graph holds: its time is
that of a whole call, beside that of the host until the call returns. Seals are timed with patterns and without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkv_engine.kernels.formats import BlockLayout, PageShape, make_format
from qkv_engine.kernels.formats.dense import Dense
from qkv_engine.kernels.mine import mine
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

    def banks(self) -> Tensor | None:
        return torch.full_like(self.src, self.bank) if self.target.bank_nbytes else None

    def mine(self, num_tokens: int) -> None:
        blocks = self.src[: -(-num_tokens // T)].tolist()
        mine(self.memory, blocks, num_tokens, self.bank, self.source, self.target)


def check(number: int, device: str = "cuda") -> dict[str, float]:
    """Shares of bytes that differ from the references', of the bank and of sealed blocks."""
    k, v = _names(2, number)
    blocks = Blocks(k, v, 3, 2, 2, device)
    blocks.mine(256)
    expected, banks = blocks.memory.cpu(), blocks.banks()
    assert banks is not None
    where = blocks.src.cpu(), blocks.dst.cpu(), blocks.source, blocks.target
    seal_reference(expected, *where, banks.cpu())
    seal(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target, banks=banks)
    wrong = (blocks.memory.cpu() != expected).float()
    return {"bank": float(wrong[blocks.bank :].mean()), "blocks": float(wrong[int(where[1][0]) : blocks.bank].mean())}


def measure(patterns: list[int], tokens: list[int]) -> Iterator[dict[str, Any]]:
    """Microseconds of a mining, and of seals a block."""
    for bits in (4, 2):
        plain = Blocks(f"int{bits}-channel-128", f"int{bits}-token-128", 8, LAYERS, HEADS, "cuda")
        yield {"what": f"seal to {bits} bits", "patterns": 0, "us": _seal_us(plain)}
    for number in patterns:
        for num_tokens in tokens:
            blocks = Blocks(*_names(2, number), -(-num_tokens // T), LAYERS, HEADS, "cuda")
            seconds, host = _seconds(partial(blocks.mine, num_tokens))
            yield {"what": f"mine {num_tokens} tokens", "patterns": number, "us": 1e6 * seconds}
            yield {"what": f"mine {num_tokens} tokens, host", "patterns": number, "us": 1e6 * host}
            del blocks
        for bits in (4, 2):
            blocks = Blocks(*_names(bits, number), 8, LAYERS, HEADS, "cuda")
            blocks.mine(8 * T)
            yield {"what": f"seal to {bits} bits", "patterns": number, "us": _seal_us(blocks)}


def _names(bits: int, number: int) -> tuple[str, str]:
    return f"int{bits}-channel-128-patterns{number}", f"int{bits}-token-128-patterns{number}"


def _seal_us(blocks: Blocks) -> float:
    """Microseconds a block."""
    finite, banks = torch.ones_like(blocks.src), blocks.banks()

    def call() -> Tensor:
        return seal(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target, finite, banks)

    return 1e6 * time_calls([call]) / len(blocks.src)


def _seconds(call: Callable[[], Any]) -> tuple[float, float]:
    """Median times of a call outside of graphs: until the device is done, and until the host is."""
    events: Any = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(9)]  # type: ignore[no-untyped-call]
    found = []
    for start, end in events:
        torch.cuda.synchronize()
        start.record()
        began = time.perf_counter()
        call()
        host = time.perf_counter() - began
        end.record()
        torch.cuda.synchronize()
        found.append((float(start.elapsed_time(end)) / 1e3, host))
    device_seconds, host_seconds = zip(*found[2:], strict=True)
    return statistics.median(device_seconds), statistics.median(host_seconds)


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
