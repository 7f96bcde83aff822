"""Times launches that were changed beside those before on a GPU: ``python -m studies.gpu_check --parts tiles``.

Products of qwen3-8b and qwen3.5-4b and attention of heads with 256 channels, each by turns with what was launched
before and against the plain product. Tiles by bulk copies are beside those without, and tiles that wait for tensor
cores within a step beside the same without the wait. Times are those of graph replays over copies of a weight that
exceed L2.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv_engine.kernels.linear import codes_reference, linear, linear_swiglu
from qkv_engine.kernels.linear.float8 import TUNINGS as FLOAT8_TUNINGS
from qkv_engine.kernels.linear.float8 import Float8Tuning, scaled_tiles
from qkv_engine.kernels.linear.float8_rows import quantize_rows
from qkv_engine.kernels.linear.integer import TUNINGS, CodeTuning, Tuning, code_tuning, linear_codes
from qkv_engine.kernels.linear.packed import PackedCodes, pack
from qkv_engine.kernels.linear.triton import TileTuning, linear_few_rows
from qkv_engine.kernels.nvidia import has_large_shared
from qkv_engine.kernels.paged_decode.layer import LayerFormats
from qkv_engine.kernels.paged_decode.plan import DecodeWork
from qkv_engine.kernels.paged_decode.triton import paged_decode
from qkv_engine.kernels.swiglu import swiglu

from .code_checks import MAX_FLOAT8_ERROR
from .code_weights import random_rows, random_weight
from .inputs import T, dense_page
from .linear_codes import copies, nbytes_of
from .timing import time_calls

# Rows and columns of weights.
WEIGHTS = {
    "8b qkv": (6144, 4096),
    "8b o": (4096, 4096),
    "8b gate_up": (24576, 4096),
    "8b down": (4096, 12288),
    "4b in": (12352, 2560),
    "4b qkv": (6144, 2560),
    "4b gate": (4096, 2560),
    "4b o": (2560, 4096),
    "4b gate_up": (18432, 2560),
    "4b down": (2560, 9216),
}
INT4, INT8, FLOAT8, BF16 = "int4/128", "int8", "float8", "bf16"
RUNS = 5  # of a product, which must agree: a race shows in some
# Of ||out||: with SwiGLU, both of its sides and scaled elements of 4 bits are rounded.
MAX_ERRORS = {INT4: 5e-3, INT8: 5e-3, FLOAT8: MAX_FLOAT8_ERROR, BF16: 5e-3}
NO_SLOWER = 1.03  # runs of one launch differ by up to 3 %
TURNS = 3  # of both launches; the median counts
CONTEXT, ITEMS = 8150, {16: (8, 12), 64: (16, 24)}  # tokens a request; blocks an item before and now, by requests

Product = Callable[..., Tensor]  # of rows and a weight, with ``gated`` its SwiGLU


class Compared(NamedTuple):
    """Two launches of a product with ``num_rows`` rows; the second one is what the engine takes."""

    what: str
    kind: str
    weight: str
    num_rows: int
    before: Product
    now: Product

    @property
    def gated(self) -> bool:
        """Whether SwiGLU is in the product."""
        return self.weight.endswith("gate_up")


class Found(NamedTuple):
    """Microseconds before and now, and the relative error of the second, infinity where runs differ."""

    before: float
    now: float
    error: float


def compared() -> Iterator[Compared]:
    """Every product to time."""
    slices, tile = CodeTuning(16, 32, 8, 1, 8, 4), CodeTuning(16, 32, 4, 2, 4, 4)
    for weight in ("8b qkv", "8b o", "8b down"):
        yield Compared("tile", INT8, weight, 16, _codes(slices), _codes())
    yield Compared("tile", INT4, "8b qkv", 16, _codes(tile), _codes())
    for kind, num_rows in ((INT4, 256), (INT4, 128), (INT4, 64), (INT8, 128)):
        for weight in ("8b qkv", "8b o", "8b gate_up", "8b down"):
            yield Compared("bulk copies", kind, weight, num_rows, _without_copies, _codes())
    for weight in ("8b o", "8b down"):
        yield Compared("bulk copies", FLOAT8, weight, 256, partial(_float8, tuning=FLOAT8_TUNINGS[256]), _float8)
    for num_rows in (64, 256):
        launched = TUNINGS[8][num_rows]
        assert isinstance(launched, CodeTuning)
        for weight in ("8b o", "8b gate_up"):
            hasty = _codes(launched._replace(waits=False))
            yield Compared("waits", INT8, weight, num_rows, hasty, _codes(launched))
    few = TileTuning(16, 64, 128, 4, 5)
    for weight in WEIGHTS:
        yield Compared("tile", BF16, weight, 16, partial(_few_rows, tuning=few), _ours)
    some = TileTuning(32, 64, 128, 4, 5)
    for weight in ("4b gate_up", "8b gate_up", "4b down", "8b down"):
        yield Compared("tile or torch's", BF16, weight, 32, partial(_few_rows, tuning=some), _ours)
    for weight in ("4b in", "4b qkv", "4b gate", "4b o", "8b qkv", "8b o"):
        for num_rows in (40, 64):
            yield Compared("ours for torch's", BF16, weight, num_rows, _torchs, _ours)


def compare(case: Compared) -> Found:
    """Both launches checked and timed by turns."""
    shape = WEIGHTS[case.weight]
    values, first = _weight(case.kind, shape)
    weights = [first, *copies(lambda: _weight(case.kind, shape)[1], nbytes_of(first))[1:]]
    x = random_rows(case.num_rows, shape[1])
    exact = F.linear(x.float(), values()).to(x.dtype)
    expected = (swiglu(exact) if case.gated else exact).float()
    outs = [case.now(x, first, gated=case.gated) for _ in range(RUNS)]
    error = float((outs[0].float() - expected).norm() / expected.norm())
    if not all(torch.equal(out, outs[0]) for out in outs[1:]):
        error = float("inf")
    launches = [[partial(product, x, w, gated=case.gated) for w in weights] for product in (case.before, case.now)]
    before, now = zip(*([1e6 * time_calls(calls) for calls in launches] for _ in range(TURNS)), strict=True)
    return Found(statistics.median(before), statistics.median(now), error)


def attention(num_requests: int) -> Found:
    """Attention of one layer, 4 KV heads of 256 channels and 16 query heads; the error is that between both."""
    page, num_blocks = dense_page(torch.bfloat16, 4, 256), -(-CONTEXT // T)
    layer, row = LayerFormats.of([page], torch.get_default_device()), page.k.nbytes + page.v.nbytes
    arena = torch.randn(num_requests * num_blocks * row // 2, dtype=torch.bfloat16).view(torch.uint8)
    q = random_rows(num_requests, 16 * 256).view(num_requests, 16, 256)
    slots = torch.randperm(num_requests * num_blocks).view(num_requests, num_blocks) * row
    lengths = torch.full((num_requests,), CONTEXT)
    calls = []
    for size in ITEMS[num_requests]:
        work = DecodeWork.build(
            slots, torch.zeros_like(slots), lengths, num_rungs=1, item_blocks=size, sink_tokens=0, block_tokens=T
        )
        calls.append(partial(paged_decode, q, arena, work, layer, 256**-0.5))
    expected, found = (call().float() for call in calls)
    error = float((found - expected).norm() / expected.norm())
    before, now = zip(*([1e6 * time_calls([call] * 4) for call in calls] for _ in range(TURNS)), strict=True)
    return Found(statistics.median(before), statistics.median(now), error)


def _weight(kind: str, shape: tuple[int, int]) -> tuple[Callable[[], Tensor], Tensor | PackedCodes]:
    """Makes a random weight: what gives its float32 values, and the weight as products take it."""
    if kind == BF16:
        weight = random_rows(*shape)
        return weight.float, weight
    codes = random_weight(kind, *shape)
    return partial(codes_reference.dequantize, codes), pack(codes)


def _codes(tuning: Tuning | None = None) -> Product:
    return partial(linear_codes, tuning=tuning)


def _without_copies(x: Tensor, weight: PackedCodes, *, gated: bool) -> Tensor:
    return linear_codes(x, weight, gated=gated, tuning=code_tuning(weight, len(x), large=has_large_shared(x.device)))


def _float8(x: Tensor, weight: PackedCodes, *, gated: bool, tuning: Float8Tuning | None = None) -> Tensor:
    return scaled_tiles(quantize_rows(x), weight, gated=gated, tuning=tuning)


def _few_rows(x: Tensor, weight: Tensor, *, gated: bool, tuning: TileTuning) -> Tensor:
    return linear_few_rows(x, weight, gated=gated, tuning=tuning)


def _ours(x: Tensor, weight: Tensor, *, gated: bool) -> Tensor:
    return linear_swiglu(x, weight) if gated else linear(x, weight)


def _torchs(x: Tensor, weight: Tensor, *, gated: bool) -> Tensor:
    out = F.linear(x, weight)
    return swiglu(out) if gated else out
