"""Times a layer of gated delta-nets on a GPU in other launches than the engine's: us of all its kernels.

python -m studies.kernels.bench_states [--requests 1,16,64] [--tokens 16384] [--prompts 1,2,4]
    [--state-dtype float32,int16]

From the convolution to the gated norm: single tokens with other columns and warps of the state's kernel, of parts of
heads and of whole ones, chunks with other rows, channels and warps of the convolution, and of the scan. Of several
formats of states requests have one each by turns.
States of several layers take turns, which together exceed L2. ``error``: of the largest output, against the engine's
launch. ``share``: bytes of states, or of the rows in and out of the convolution, at 4.3e12 B/s over the time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from qkv_engine.bench.roofline import BANDWIDTH
from qkv_engine.kernels.delta_net import STATE_FORMATS, DeltaWeights, StateSpec, triton
from qkv_engine.kernels.delta_net.plan import ChunkWork, StepWork
from qkv_engine.table_words import RUNG_BITS

from .code_weights import print_line
from .timing import time_calls

SPEC = StateSpec(16, 32, 128, 128, 4)  # of qwen3.5-4b
LAYERS = 4
STEPS = [(columns, warps) for columns in (16, 32, 64, 128) for warps in (1, 2, 4, 8)]
WHOLE_WARPS = (2, 4, 8)
CHUNKS = [(rows, channels, warps) for rows in (4, 8, 16) for channels in (512, 1024, 2048) for warps in (2, 4, 8)]
SCANS = [(64, 4), (64, 8), (128, 8)]  # columns of a head's values, and warps

Variant = Callable[..., tuple[dict[str, Any], int]]
Launch = dict[str, Callable[..., Any]]  # functions of ``triton`` by name, in place of the engine's


class Timed(NamedTuple):
    """A launch: what it changes, its microseconds, its share and its error."""

    launch: str
    us: float
    share: float
    error: float


def changed(variant: Variant, num_warps: int, **constexprs: int) -> Variant:
    """``variant`` with other compile-time arguments."""
    return lambda *args, **options: ({**variant(*args, **options)[0], **constexprs}, num_warps)


class Layers:
    """States of ``number`` requests in several layers, and the inputs of their next tokens."""

    def __init__(self, spec: StateSpec, number: int, num_rows: int):
        size = -(-spec.nbytes(torch.bfloat16) // 256) * 256
        self.spec, self.number = spec, number
        steps = torch.arange(number) % len(spec.forms)
        self.words = torch.randperm(LAYERS * number).view(LAYERS, number) * size << RUNG_BITS | steps
        states = (torch.randn(LAYERS * number, size // 4) / 8).view(torch.uint8)
        for form in spec.forms:  # 16 bits each, of which some would be NaN
            states[:, form.conv_offset : form.nbytes(torch.bfloat16)] = 0
        self._first, self.memory = states.flatten(), torch.empty(states.numel(), dtype=torch.uint8)
        conv = (torch.randn(spec.num_channels, spec.conv_width) / 2).bfloat16()
        decay, dt_bias = torch.rand(spec.num_v_heads), torch.randn(spec.num_v_heads)
        self.weights = DeltaWeights(spec, conv, decay, dt_bias, torch.rand(spec.v_dim).bfloat16(), 1e-6)
        self.qkv = torch.randn(num_rows, spec.num_channels).bfloat16()
        self.b, self.a = torch.randn(num_rows, 2 * spec.num_v_heads).bfloat16().chunk(2, dim=1)
        self.z = torch.randn(num_rows, spec.num_v_heads, spec.v_dim).bfloat16()
        self.out = torch.empty_like(self.z)

    def calls(self, product: Callable[..., None], work: StepWork | ChunkWork) -> list[Callable[[], None]]:
        """``product`` in each layer."""
        inputs = self.memory, self.qkv, self.z, self.b, self.a, self.weights, work
        return [partial(product, *inputs, layer, self.out) for layer in range(LAYERS)]

    def first(self, calls: list[Callable[[], None]]) -> Tensor:
        """What the first of ``calls`` gives from the first states."""
        self.memory.copy_(self._first)
        calls[0]()
        return self.out.float()


def compare(
    layers: Layers, calls: list[Callable[[], None]], launches: dict[str, Launch], nbytes: int
) -> Iterator[Timed]:
    """The engine's launch, then others."""
    expected = layers.first(calls)
    for launch, functions in {"as launched": Launch(), **launches}.items():
        with ExitStack() as stack:
            for name, function in functions.items():
                stack.enter_context(patch.object(triton, name, function))
            error = float((layers.first(calls) - expected).abs().max() / expected.abs().max())
            seconds = time_calls(calls)
        yield Timed(launch, 1e6 * seconds, nbytes / BANDWIDTH / seconds, error)


def step_launch(num_warps: int, *, is_whole: bool, **constexprs: int) -> Launch:
    """A step by programs of whole heads, or of parts of them and with the norm as a launch of its own."""
    variant = changed(triton.delta_step_variant, num_warps, **constexprs)
    return {"has_whole_heads": lambda *args: is_whole, "delta_step_variant": variant}


def steps(spec: StateSpec, number: int) -> Iterator[Timed]:
    """A token of each of ``number`` requests."""
    layers = Layers(spec, number, number)
    work = StepWork(layers.words, torch.full((number,), 100, dtype=torch.int32))
    launches = {
        f"{columns} columns, {warps} warps": step_launch(warps, is_whole=False, BLOCK_V=max(16, columns))
        for columns, warps in STEPS
        if columns <= spec.v_dim
    }
    launches |= {f"whole heads, {warps} warps": step_launch(warps, is_whole=True) for warps in WHOLE_WARPS}
    calls = layers.calls(triton.delta_net_step_triton, work)
    nbytes = sum(spec.forms[i % len(spec.forms)].nbytes(torch.bfloat16) for i in range(number))
    yield from compare(layers, calls, launches, 2 * nbytes)


def chunks(spec: StateSpec, tokens: int, number: int) -> Iterator[Timed]:
    """``number`` prompts of equal parts of ``tokens``."""
    layers = Layers(spec, number, tokens)
    work = ChunkWork.build(layers.words.T.tolist(), [0] * number, [tokens // number] * number).to(layers.qkv.device)
    launches: dict[str, Launch] = {
        f"{rows} rows, {channels} channels, {warps} warps": {
            "conv_chunk_variant": changed(
                triton.conv_chunk_variant, warps, ROWS=rows, HEADS=max(1, channels // spec.k_dim)
            )
        }
        for rows, channels, warps in CHUNKS
    }
    launches |= {
        f"scan of {columns} columns, {warps} warps": {
            "chunk_scan_variant": changed(triton.chunk_scan_variant, warps, BLOCK_V=columns)
        }
        for columns, warps in SCANS
    }
    calls = layers.calls(triton.delta_net_chunk_triton, work)
    yield from compare(layers, calls, launches, 2 * layers.qkv.nbytes)


def main() -> None:
    """Lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="1,16,64", metavar="LIST", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=16384, metavar="N", help="default: %(default)s")
    parser.add_argument("--prompts", default="2", metavar="LIST", help="of as many tokens in all; default: %(default)s")
    parser.add_argument("--state-dtype", default="float32", metavar="LIST", help="default: %(default)s")
    args = parser.parse_args()
    widest, *narrower = (STATE_FORMATS[name] for name in args.state_dtype.split(","))
    spec = SPEC._replace(format=widest, narrower=tuple(narrower))
    with torch.device("cuda"):
        for number in map(int, args.requests.split(",")):
            for timed in steps(spec, number):
                print_line(requests=number, **timed._asdict())
        for number in map(int, args.prompts.split(",")):
            for timed in chunks(spec, args.tokens, number):
                print_line(tokens=args.tokens, prompts=number, **timed._asdict())


if __name__ == "__main__":
    main()
