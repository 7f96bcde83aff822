"""Checks and times sampling on a GPU, beside the same arithmetic in torch.

python -m studies.kernels.bench_sample --check --time [--json FILE]

Bf16 logits. ``device`` is the time of the launches in a graph, ``eager`` from the first launch to the last one's end,
``host`` that until the launches are queued. ``torch`` is the reference on the GPU, eager; it synchronises.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv_engine.bench.roofline import BANDWIDTH
from qkv_engine.kernels.sample import (
    UNSEEN,
    Edits,
    Settings,
    edit,
    edit_reference,
    pack_settings,
    sample,
    sample_reference,
)

from .timing import time_calls

ROWS, VOCABULARIES = (1, 32, 256), (32_000, 128_256, 151_936)
BF16 = torch.bfloat16


class Mode(NamedTuple):
    """Settings of all rows, None for greedy, and the spread of their logits."""

    settings: dict[str, float] | None
    spread: float = 3.0


MODES = {
    "greedy": Mode(None),
    "temperature": Mode({}),
    "min_p .05": Mode({"min_p": 0.05}),
    "top_k 20, top_p .95": Mode({"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
    "top_p .9": Mode({"temperature": 0.6, "top_p": 0.9}),
    "top_p .95, flat": Mode({"top_p": 0.95}, spread=0.5),
    "top_k 5000": Mode({"top_k": 5000}),
}


def make_logits(num_rows: int, vocab_size: int, spread: float, dtype: torch.dtype = BF16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(num_rows + vocab_size)
    return (torch.randn(num_rows, vocab_size, generator=generator, device="cuda") * spread).to(dtype)


def make_settings(num_rows: int, mode: Mode, device: str = "cuda") -> Settings | None:
    """Rows that differ in their seeds and positions only."""
    if mode.settings is None:
        return None
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | mode.settings
    rows = bytearray().join(pack_settings(seed=seed, **values) for seed in range(num_rows))  # type: ignore[arg-type]
    table = torch.frombuffer(rows, dtype=torch.int64).view(num_rows, -1).to(device)
    limited = bool(values["top_k"]) or values["top_p"] < 1
    return Settings(table, torch.arange(num_rows, device=device), limited)


def make_edits(num_rows: int, vocab_size: int, num_seen: int = 500) -> Edits:
    """A hundred biases, ``num_seen`` penalized tokens and two bans a row."""
    sizes = (100, num_seen, 2)
    tokens = [torch.randperm(vocab_size)[:size].repeat(num_rows) for size in sizes]
    rows = [torch.arange(num_rows).repeat_interleave(size) for size in sizes]
    counts = [torch.full_like(tokens[0], UNSEEN), tokens[1] % 4, torch.full_like(tokens[2], UNSEEN)]
    biases = [torch.randn(len(tokens[0])), torch.zeros(len(tokens[1])), torch.full(tokens[2].shape, -torch.inf)]
    row_index, all_tokens, all_counts = (torch.cat(x).int().cuda() for x in (rows, tokens, counts))
    ends = (len(rows[0]), len(rows[0]) + len(rows[1]), sum(map(len, rows)))
    penalties = torch.tensor([1.2, 0.3, 0.1, 0.0]).repeat(num_rows, 1).cuda()
    return Edits(penalties, row_index, all_tokens, all_counts, torch.cat(biases).cuda(), ends)


def check() -> dict[str, int]:
    """Rows whose token or fault differs from the reference's on the CPU, by case."""
    found = {}
    for vocab_size in (1, 130, 50_257, *VOCABULARIES, 262_144):
        for dtype in (BF16, torch.float16, torch.float32):
            for name, mode in MODES.items():
                num_rows = 256 if (vocab_size, dtype) == (VOCABULARIES[0], BF16) else 8
                logits = make_logits(num_rows, vocab_size, mode.spread, dtype)
                logits[1, vocab_size // 2], logits[2], logits[3, -1] = torch.nan, -torch.inf, torch.inf
                table = make_settings(num_rows, mode, "cpu")
                ours, want = sample(logits, make_settings(num_rows, mode)).cpu(), sample(logits.cpu(), table)
                same = (ours[1] == want[1]) & ((ours[0] == want[0]) | (want[1] != 0))
                found[f"{vocab_size} {str(dtype)[6:]} {name}"] = int((~same).sum())
        if vocab_size > 1000:
            logits, edits = make_logits(8, vocab_size, 3.0), make_edits(8, vocab_size)
            (ours, peak), (want, raw_peak) = edit(logits, edits), edit_reference(logits, edits)
            found[f"{vocab_size} edits"] = int((ours != want).sum()) + int((peak != raw_peak).sum())
    return found


def seconds(call: Callable[[], Any], repeats: int = 20) -> tuple[float, float]:
    """Median seconds of an eager call: until it returns, and until the device has ended."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        times.append((returned - start, time.perf_counter() - start))
    host, total = (sorted(column)[repeats // 2] for column in zip(*times, strict=True))
    return host, total


def measure() -> Iterator[dict[str, Any]]:
    """One row a case; ``limit`` is the time of reading the logits once."""
    for vocab_size in VOCABULARIES:
        for num_rows in ROWS:
            for name, mode in MODES.items():
                logits, settings = make_logits(num_rows, vocab_size, mode.spread), make_settings(num_rows, mode)
                yield timed(name, logits, partial(sample, logits, settings), partial(reference, logits, settings))
            logits, edits = make_logits(num_rows, vocab_size, 3.0), make_edits(num_rows, vocab_size)
            yield timed("edits", logits, partial(edit, logits, edits), partial(edit_reference, logits, edits))


def reference(logits: Tensor, settings: Settings | None) -> Tensor:
    return sample_reference(logits, settings, None)


def timed(name: str, logits: Tensor, ours: Callable[[], Any], torchs: Callable[[], Any]) -> dict[str, Any]:
    host, eager = seconds(ours)
    row = {"mode": name, "rows": logits.shape[0], "vocab": logits.shape[1], "device": time_calls([ours])}
    row |= {"host": host, "eager": eager, "torch": seconds(torchs, 5)[1]}
    return row | {"limit": logits.numel() * logits.element_size() / BANDWIDTH}


def print_row(row: dict[str, Any]) -> None:
    columns = "  ".join(f"{key} {1e6 * row[key]:8.1f}" for key in ("device", "host", "eager", "torch", "limit"))
    print(f"{row['rows']:4} x {row['vocab']:6}  {row['mode']:20} {columns} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    if args.check:
        result["wrong"] = wrong = {name: count for name, count in check().items() if count}
        for name, count in wrong.items():
            print(f"{name}: {count} differ")
        assert not wrong, "kernels are wrong: nothing is timed"
        print("every token is the reference's", flush=True)
    rows = []
    for row in measure() if args.time else ():
        print_row(row)
        rows.append(row)
    if args.json:
        args.json.write_text(json.dumps(result | {"rows": rows}, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
