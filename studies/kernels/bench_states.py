"""Times a layer of gated delta-nets on a GPU in other launches than the engine's: us of all its kernels.

python -m studies.kernels.bench_states [--requests 1,16,64] [--tokens 16384]

Single tokens with other columns and warps of the state's kernel, chunks with other rows, channels and warps of the
convolution.
States of several layers take turns, which together exceed L2. ``error``: of the largest output, against the engine's
launch. ``share``: bytes of states, or of the rows in and out of the convolution, at 4.3e12 B/s over the time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from qkv_engine.bench.roofline import BANDWIDTH
from qkv_engine.kernels.delta_net import DeltaWeights, StateSpec, triton
from qkv_engine.kernels.delta_net.plan import ChunkWork, StepWork
from qkv_engine.table_words import RUNG_BITS

from .code_weights import print_line
from .timing import time_calls

SPEC = StateSpec(16, 32, 128, 128, 4)  # of qwen3.5-4b
LAYERS = 4
STEPS = [(columns, warps) for columns in (16, 32, 64, 128) for warps in (1, 2, 4, 8)]
CHUNKS = [(rows, channels, warps) for rows in (4, 8, 16) for channels in (512, 1024, 2048) for warps in (2, 4, 8)]

Variant = Callable[..., tuple[dict[str, Any], int]]


class Timed(NamedTuple):
    """A launch: what it changes, its microseconds, its share and its error."""

    launch: str
    us: float
    share: float
    error: float


def changed(variant: Variant, num_warps: int, **constexprs: int) -> Variant:
    """``variant`` with other compile-time arguments."""
    return lambda *args: ({**variant(*args)[0], **constexprs}, num_warps)


class Layers:
    """States of ``number`` requests in several layers, and the inputs of their next tokens."""

    def __init__(self, spec: StateSpec, number: int, num_rows: int):
        size = -(-spec.nbytes(torch.bfloat16) // 256) * 256
        self.spec, self.number = spec, number
        self.words = torch.randperm(LAYERS * number).view(LAYERS, number) * size << RUNG_BITS
        states = (torch.randn(LAYERS * number, size // 4) / 8).view(torch.uint8)
        states[:, spec.conv_offset :] = 0  # 16 bits each, of which some would be NaN
        self._first, self.memory = states.flatten(), torch.empty(states.numel(), dtype=torch.uint8)
        conv = (torch.randn(spec.num_channels, spec.conv_width) / 2).bfloat16()
        self.weights = DeltaWeights(spec, conv, torch.rand(spec.num_v_heads), torch.randn(spec.num_v_heads))
        self.qkv = torch.randn(num_rows, spec.num_channels).bfloat16()
        self.b, self.a = torch.randn(num_rows, 2 * spec.num_v_heads).bfloat16().chunk(2, dim=1)
        self.out = torch.empty(num_rows, spec.num_v_heads, spec.v_dim, dtype=torch.bfloat16)

    def calls(self, product: Callable[..., None], work: StepWork | ChunkWork) -> list[Callable[[], None]]:
        """``product`` in each layer."""
        inputs = self.memory, self.qkv, self.b, self.a, self.weights, work
        return [partial(product, *inputs, layer, self.out) for layer in range(LAYERS)]

    def first(self, calls: list[Callable[[], None]]) -> Tensor:
        """What the first of ``calls`` gives from the first states."""
        self.memory.copy_(self._first)
        calls[0]()
        return self.out.float()


def compare(
    layers: Layers, calls: list[Callable[[], None]], name: str, launches: dict[str, Variant], nbytes: int
) -> Iterator[Timed]:
    """The engine's launch, then those in which ``triton``'s function called ``name`` is another one."""
    expected = layers.first(calls)
    for launch, variant in {"as launched": getattr(triton, name), **launches}.items():
        with patch.object(triton, name, variant):
            error = float((layers.first(calls) - expected).abs().max() / expected.abs().max())
            seconds = time_calls(calls)
        yield Timed(launch, 1e6 * seconds, nbytes / BANDWIDTH / seconds, error)


def steps(spec: StateSpec, number: int) -> Iterator[Timed]:
    """A token of each of ``number`` requests."""
    layers = Layers(spec, number, number)
    work = StepWork(layers.words, torch.full((number,), 100, dtype=torch.int32))
    launches = {
        f"{columns} columns, {warps} warps": changed(triton.delta_step_variant, warps, BLOCK_V=max(16, columns))
        for columns, warps in STEPS
        if columns <= spec.v_dim
    }
    calls = layers.calls(triton.delta_net_step_triton, work)
    yield from compare(layers, calls, "delta_step_variant", launches, 2 * number * spec.nbytes(torch.bfloat16))


def chunks(spec: StateSpec, tokens: int) -> Iterator[Timed]:
    """Two prompts of half of ``tokens`` each."""
    layers = Layers(spec, 2, tokens)
    work = ChunkWork.build(layers.words.T.tolist(), [0, 0], [tokens // 2] * 2).to(layers.qkv.device)
    launches = {
        f"{rows} rows, {channels} channels, {warps} warps": changed(
            triton.conv_chunk_variant, warps, ROWS=rows, HEADS=max(1, channels // spec.k_dim)
        )
        for rows, channels, warps in CHUNKS
    }
    calls = layers.calls(triton.delta_net_chunk_triton, work)
    yield from compare(layers, calls, "conv_chunk_variant", launches, 2 * layers.qkv.nbytes)


def main() -> None:
    """Lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="1,16,64", metavar="LIST", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=16384, metavar="N", help="default: %(default)s")
    args = parser.parse_args()
    with torch.device("cuda"):
        for number in map(int, args.requests.split(",")):
            for timed in steps(SPEC, number):
                print_line(requests=number, **timed._asdict())
        for timed in chunks(SPEC, args.tokens):
            print_line(tokens=args.tokens, **timed._asdict())


if __name__ == "__main__":
    main()
