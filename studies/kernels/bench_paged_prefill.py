"""Checks and times prefill attention on a GPU, beside torch's attention on the same values laid out contiguously.

python -m studies.kernels.bench_paged_prefill [--json FILE]

A chunk of 2048 tokens after a history of 0 or 6144 tokens in every format; 32 query heads, 8 KV heads, D = 128.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from qkv_engine.kernels.paged_decode.triton import Tuning
from qkv_engine.kernels.paged_prefill.plan import PrefillWork
from qkv_engine.kernels.paged_prefill.triton import BLOCK_M, paged_prefill, tile_tokens

from .bench_paged_decode import named_pages
from .inputs import Case, T, make_case, prefill_reference
from .timing import time_calls

HEADS, GROUP, HEAD_DIM, CHUNK, SINK = 8, 4, 128, 2048, 32
BF16 = torch.bfloat16
VARIANTS = [  # launch parameters and rows of a query tile
    (Tuning(4, 5, tile=64), 64),
    (Tuning(8, 5, tile=64), 128),
]


def build(
    name: str, history: int, chunk: int = CHUNK, block_m: int = BLOCK_M
) -> tuple[Case, torch.Tensor, PrefillWork]:
    """One request with ``history`` tokens in the format ``name`` (the blocks that are full), and its queries."""
    found = named_pages()
    pages = [found["16"]] if name == "16" else [found["16"], found[name]]
    case = make_case(
        pages,
        [history + chunk],
        group=GROUP,
        sink_tokens=SINK,
        num_layers=1,
        dense_from=[history],
        demote_all=True,
        device="cuda",
    )
    q = torch.randn(chunk, HEADS * GROUP, HEAD_DIM, device="cuda").to(BF16)
    work = PrefillWork.build(
        case.addresses,
        case.rungs,
        torch.tensor([history], device="cuda"),
        torch.tensor([chunk], device="cuda"),
        num_rungs=len(pages),
        tile_tokens=tile_tokens(HEADS * GROUP, HEADS, block_m),
        sink_tokens=SINK,
        block_tokens=T,
        banks=case.banks,
    )
    return case, q, work


def torch_seconds(history: int) -> dict[str, float]:
    """Torch's own attention over contiguous bf16 K and V, by back end."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    length = history + CHUNK
    q = torch.randn(1, HEADS * GROUP, CHUNK, HEAD_DIM, device="cuda", dtype=BF16)
    k, v = (torch.randn(1, HEADS, length, HEAD_DIM, device="cuda", dtype=BF16) for _ in range(2))
    found = {}

    def sdpa(backend: SDPBackend) -> Any:
        with sdpa_kernel(backend):
            if not history:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            bias = causal_lower_right(CHUNK, length)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)

    def packed() -> Any:
        from torch.nn.attention import varlen

        attention: Any = varlen.varlen_attn
        grouped = {} if torch.__version__ < "2.12" else {"enable_gqa": True}  # torch before 2.12 needs no flag
        return attention(*rows, *bounds, CHUNK, length, window_size=(-1, 0), **grouped)

    rows = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    bounds = [torch.tensor([0, n], device="cuda", dtype=torch.int32) for n in (CHUNK, length)]
    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    todo: dict[str, Callable[[], Any]] = {b.name.lower(): partial(sdpa, b) for b in backends} | {"varlen": packed}
    for name, call in todo.items():
        try:
            found[name] = time_calls([call])
        except Exception as error:
            print(f"  torch {name}: {type(error).__name__} {str(error)[:200]}")
    return found


def measure() -> Iterator[dict[str, Any]]:
    """One row a variant; ``tflops`` counts the visible half of the chunk's own square."""
    for history in (0, 6144):
        flops = 4 * HEADS * GROUP * HEAD_DIM * CHUNK * (history + CHUNK / 2)
        for name, seconds in torch_seconds(history).items():
            yield {"kernel": f"torch {name}", "format": "16", "history": history, "seconds": seconds, "flops": flops}
        for tuning, block_m in VARIANTS:
            name = f"ours {block_m} rows w{tuning.num_warps} s{tuning.num_stages} t{tuning.tile}"
            seconds = time_calls([call("16", history, tuning, block_m)])
            yield {"kernel": name, "format": "16", "history": history, "seconds": seconds, "flops": flops}
        for name in named_pages() if history else ():
            seconds = time_calls([call(name, history)])
            yield {"kernel": "ours", "format": name, "history": history, "seconds": seconds, "flops": flops}


def call(name: str, history: int, tuning: Tuning | None = None, block_m: int = BLOCK_M) -> Callable[[], Any]:
    """Attention of one chunk over its history in one layer."""
    case, q, work = build(name, history, block_m=block_m)
    return lambda: paged_prefill(q, case.arena, work, case.pages, HEAD_DIM**-0.5, tuning=tuning)


def check() -> None:
    """Small chunks against float attention."""
    for name in named_pages():
        case, q, work = build(name, 1000, chunk=300)
        out = paged_prefill(q, case.arena, work, case.pages, HEAD_DIM**-0.5).float()
        want = prefill_reference(case, q, [300], HEAD_DIM**-0.5)
        error = float((out - want).norm() / want.norm())
        print(f"{name:10} relative error {error:.2e}")
        assert error <= 3e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    check()
    rows = []
    for row in measure():
        rows.append(row)
        print(
            f"history {row['history']:5} {row['format']:10} {row['kernel']:24} {1e6 * row['seconds']:8.1f} us "
            f"{row['flops'] / row['seconds'] / 1e12:6.0f} TFLOP/s",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
