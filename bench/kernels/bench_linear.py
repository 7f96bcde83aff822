"""Times a decode step's matrix products on a GPU: torch's, and those that ``fastest_product`` finds.

python -m qkv_engine.bench.kernels.bench_linear [--shape NAME] [--rows 1,32,128,200,224] [--json FILE]

Every product reads a weight that the cache does not hold. ``limit`` is the longer of reading it at 4.3e12 B/s and of
its arithmetic at 788e12 FLOP/s; ``same``: both results are equal in every bit; ``ms`` is the time the search takes.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from qkv_engine.kernels.linear import fastest_product
from qkv_engine.models import SHAPES, ModelConfig
from qkv_engine.models.layers import Linear
from qkv_engine.models.llama import DecoderLayer

from ..roofline import Weights, limit_seconds
from .timing import time_calls

COPIES_NBYTES = 4e8  # of one weight's copies: several times the L2
CALLS = 12


def layer_weights(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The matrices [O, I] of one layer, by the names of their layers; none is made."""
    with torch.device("meta"):
        layer = DecoderLayer(config, 0)
    found = {name: module.weight.shape for name, module in layer.named_modules() if isinstance(module, Linear)}
    return {name.rpartition(".")[2]: (shape[0], shape[1]) for name, shape in found.items()}


def measure(name: str, shape: tuple[int, int], num_rows: int) -> dict[str, Any]:
    """One product, both ways."""
    num_out, num_in = shape
    nbytes = 2 * num_out * num_in
    read = Weights(nbytes, nbytes, num_out * num_in)
    copies = 2 + int(COPIES_NBYTES / nbytes)
    weights = [0.02 * torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(copies)]
    x = torch.randn(num_rows, num_in, dtype=torch.bfloat16, device="cuda")
    begin = time.perf_counter()
    product = fastest_product(weights, num_rows)
    search = time.perf_counter() - begin
    run = F.linear if product is None else product
    times = [
        time_calls([lambda w=w, f=f: f(x, w) for w, _ in zip(cycle(weights), range(CALLS), strict=False)])  # type: ignore[misc]
        for f in (F.linear, run)
    ]
    return {
        "product": name,
        "rows": num_rows,
        "limit": 1e6 * limit_seconds(read, num_rows, 0),
        "torch": 1e6 * times[0],
        "found": 1e6 * times[1],
        "same": torch.equal(F.linear(x, weights[1]), run(x, weights[1])),
        "ms": 1e3 * search,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--rows", default="1,8,32,64,128,200,208,224")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config, rows = ModelConfig.from_hf(SHAPES[args.shape]), []
    for num_rows in map(int, args.rows.split(",")):
        for name, shape in layer_weights(config).items():
            row = measure(name, shape, num_rows)
            rows.append(row)
            print(
                f"{name:12} {num_rows:4} rows  limit {row['limit']:6.1f} us  torch {row['torch']:6.1f}  found "
                f"{row['found']:6.1f}  same {row['same']!s:5}  search {row['ms']:6.1f} ms",
                flush=True,
            )
        layer = rows[-len(layer_weights(config)) :]
        sums = {key: config.num_layers * sum(row[key] for row in layer) / 1e3 for key in ("limit", "torch", "found")}
        print(
            f"{'all':12} {num_rows:4} rows  " + "  ".join(f"{key} {ms:.3f} ms" for key, ms in sums.items()), flush=True
        )
    if args.json:
        args.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
