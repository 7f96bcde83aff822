"""Decode attention of our kernels and other engines' on one GPU: ``python -m studies.peers attention --kernels DIR``.

Every kernel attends with one query a request to requests of equal length, K and V in its own format, pages in random
order. Times are those of the device, by graph replay where the kernel can be captured; of a kernel's launch shapes the
fastest counts. eta = bytes that must be read / (time * 4.3e12 B/s).
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qkv_engine.bench.report import number
from qkv_engine.bench.roofline import BANDWIDTH
from qkv_engine.bench.table import Table
from qkv_engine.errors import ConfigError

from . import results
from .peer_kernels import KERNELS, Call, PeerKernel, Shape, load, reference

OK, SKIPPED, FAILED, WRONG = "ok", "skipped", "failed", "wrong"
OURS = "qkv-engine"
TOLERANCE = 0.02  # relative error of a result against plain attention over the values the codes stand for
CHECKED = 2  # requests compared
PACKAGES = ("qkv-engine", "torch", "triton", "flashinfer-python")  # whose versions are told
EAGER_CALLS = 20  # timed together where a kernel cannot be captured


@dataclass(frozen=True, kw_only=True)
class AttentionRow:
    """One kernel: microseconds a call, and the ratio of its time to our kernel's at equal code bits.

    ``stored_bits`` are bits per element with metadata, ``error`` is relative to plain attention.
    """

    kernel: str
    bits: int
    stored_bits: float | None = None
    us: float | None = None
    eta: float | None = None
    tera_elements_s: float | None = None
    error: float | None = None
    times_ours: float | None = None
    batch: int
    length: int
    device: str | None = None
    status: str
    detail: str | None = None


class Entry(NamedTuple):
    """A kernel to time; ``prepare`` raises ``ConfigError`` or ``ImportError`` where it is not installed."""

    name: str
    bits: int
    prepare: Callable[[Shape, str], list[Call]]


def entries(folder: Path | None) -> list[Entry]:
    """Everything that can be compared, by falling bits, ours first."""
    found = [Entry(OURS, bits, partial(prepare_ours, bits)) for bits in (16, 8, 4, 2)]
    found += [Entry("torch sdpa", 16, prepare_torch), Entry("FlashInfer", 16, prepare_flashinfer)]
    found += [Entry(kernel.name, kernel.bits, partial(prepare_peer, kernel, folder)) for kernel in KERNELS]
    return sorted(found, key=lambda entry: -entry.bits)


def prepare_peer(kernel: PeerKernel, folder: Path | None, shape: Shape, device: str) -> list[Call]:
    if folder is None:
        raise ConfigError("needs a folder with its file", field="kernels", value=None)
    return kernel.prepare(load(kernel, folder), shape, device)


def prepare_ours(bits: int, shape: Shape, device: str) -> list[Call]:
    """Our decode attention of one layer, complete: sink, sealed blocks, open block, merge."""
    from .kernels.bench_paged_decode import GROUP, HEAD_DIM, HEADS, calls, long_case, named_pages

    if shape[2:] != (HEADS * GROUP, HEADS, HEAD_DIM):
        raise ConfigError("our kernel's benchmark has one shape of heads", field="heads", value=shape[2:])
    page = named_pages()["16" if bits == 16 else f"K{bits}V{bits}"]
    case = long_case(page, shape.batch, shape.length, 1, device=device)
    # That benchmark checks its own result, against float attention over poisoned pages.
    return [Call(call, None, case.nbytes) for split in (8, 16, 32) for call in calls(case, split, None)]


def prepare_torch(shape: Shape, device: str) -> list[Call]:
    """Torch's attention over contiguous bf16 K and V, by each of its back ends."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    b, hq, h, d = shape.batch, shape.num_heads, shape.num_kv_heads, shape.head_dim
    k, v = (torch.randn(b, h, shape.length, d, device=device, dtype=torch.bfloat16) for _ in "kv")
    q = torch.randn(b, hq, 1, d, device=device, dtype=torch.bfloat16)

    def run(backend: Any) -> torch.Tensor:
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=shape.scale, enable_gqa=True)
        return out[:, :, 0]

    def values(i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return q[i, :, 0], k[i].transpose(0, 1), v[i].transpose(0, 1)

    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    if device == "cpu":
        backends = [SDPBackend.MATH]
    return [Call(partial(run, backend), values, k.nbytes + v.nbytes) for backend in backends]


def prepare_flashinfer(shape: Shape, device: str) -> list[Call]:
    """FlashInfer's paged decode, with and without tensor cores, pages of 16 tokens in random order."""
    flashinfer: Any = importlib.import_module("flashinfer")

    from .peer_kernels import page_table

    page, b, d = 16, shape.batch, shape.head_dim
    table = page_table(shape, page, device)
    size = (table.numel(), page, shape.num_kv_heads, d)
    k, v = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in "kv")
    q = torch.randn(b, shape.num_heads, d, device=device, dtype=torch.bfloat16)
    starts = torch.arange(b + 1, device=device, dtype=torch.int32) * table.shape[1]
    last = torch.full((b,), (shape.length - 1) % page + 1, device=device, dtype=torch.int32)

    def prepare(use_tensor_cores: bool) -> Callable[[], torch.Tensor]:
        workspace = torch.zeros(256 * 2**20, dtype=torch.uint8, device=device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=use_tensor_cores)
        wrapper.plan(
            starts, table.flatten(), last, shape.num_heads, shape.num_kv_heads, d, page, q_data_type=q.dtype,
            kv_data_type=k.dtype, sm_scale=shape.scale,
        )  # fmt: skip

        def run() -> torch.Tensor:
            out: torch.Tensor = wrapper.run(q, (k, v))
            return out

        return run

    def values(i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        keys, rows = (x[table[i]].flatten(0, 1)[: shape.length] for x in (k, v))
        return q[i], keys, rows

    return [Call(prepare(flag), values, shape.tokens * 2 * shape.num_kv_heads * d * 2) for flag in (True, False)]


def measure(entry: Entry, shape: Shape, device: str, seconds_of: Callable[[Call], float]) -> AttentionRow:
    """The row of one kernel: its fastest launch shape; ``detail`` if every shape fails."""
    try:
        todo = entry.prepare(shape, device)
    except (ConfigError, ImportError) as error:
        return AttentionRow(kernel=entry.name, bits=entry.bits, **_where(shape), status=SKIPPED, detail=str(error))
    except Exception as error:
        return _failed(entry, shape, error)
    best: tuple[float, Call] | None = None
    failure: Exception | None = None
    for call in todo:
        try:
            seconds = seconds_of(call)
        except Exception as error:  # a launch shape that this machine, or this version, refuses
            failure = error
            continue
        if best is None or seconds < best[0]:
            best = seconds, call
    if best is None:
        assert failure is not None
        return _failed(entry, shape, failure)
    return _row(entry, shape, *best)


def _row(entry: Entry, shape: Shape, seconds: float, call: Call) -> AttentionRow:
    elements = 2 * shape.tokens * shape.num_kv_heads * shape.head_dim
    error = check(call, shape)
    return AttentionRow(
        kernel=entry.name,
        bits=entry.bits,
        stored_bits=round(8 * call.nbytes / elements, 3),
        us=round(1e6 * seconds, 2),
        eta=round(call.nbytes / seconds / BANDWIDTH, 4),
        tera_elements_s=round(elements / seconds / 1e12, 3),
        error=None if error is None else float(f"{error:.3g}"),
        **_where(shape),
        status=OK if error is None or error <= TOLERANCE else WRONG,
        detail=None if error is None or error <= TOLERANCE else f"relative error {error:.3g}",
    )


def _failed(entry: Entry, shape: Shape, error: Exception) -> AttentionRow:
    detail = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return AttentionRow(kernel=entry.name, bits=entry.bits, **_where(shape), status=FAILED, detail=detail)


def _where(shape: Shape) -> dict[str, Any]:
    return {"batch": shape.batch, "length": shape.length}


def check(call: Call, shape: Shape) -> float | None:
    """The largest relative error of the first requests; None for a call without known values."""
    if call.values is None:
        return None
    out, errors = call.run().float(), []
    for i in range(min(CHECKED, shape.batch)):
        want = reference(*call.values(i), shape.scale)
        errors.append(float((out[i] - want).norm() / want.norm()))
    return max(errors)


def device_seconds(call: Call) -> float:
    """Seconds a call takes the device: by graph replay, or by events around calls that cannot be captured."""
    from .kernels.timing import time_calls

    call.run()
    try:
        return time_calls([call.run])
    except RuntimeError:
        torch.cuda.synchronize()
        return _eager_seconds(call)


def _eager_seconds(call: Call) -> float:
    times: list[float] = []
    for _ in range(5):
        events: Any = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        start, end = events
        start.record()
        for _ in range(EAGER_CALLS):
            call.run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / EAGER_CALLS)
    return statistics.median(times)


def run(folder: Path | None, shape: Shape, bits: Sequence[int]) -> Iterator[AttentionRow]:
    """A row for each kernel of so many bits. Raises ``ConfigError`` without a GPU."""
    if not torch.cuda.is_available():
        raise ConfigError("kernels are compared on a GPU", field="device", value="cpu")
    name = torch.cuda.get_device_name()
    for entry in entries(folder):
        if entry.bits in bits:
            row = measure(entry, shape, "cuda", device_seconds)
            print(f"{row.bits} bits {row.kernel}: {row.us} us {row.status} {row.detail or ''}", file=sys.stderr)
            yield replace(row, device=name)
            torch.cuda.empty_cache()


def with_ratios(rows: Sequence[AttentionRow]) -> list[AttentionRow]:
    """``times_ours`` of each row: its time as a multiple of our kernel's of the same bits."""
    ours = {row.bits: row.us for row in rows if row.kernel == OURS and row.us}
    return [
        replace(row, times_ours=round(row.us / ours[row.bits], 3)) if row.us and row.bits in ours else row
        for row in rows
    ]


def attention_table(rows: Sequence[AttentionRow]) -> Table:
    """The rows for people."""
    headers = ["bits", "kernel", "stored bits", "us", "eta", "T elements/s", "error", "time / ours", "status"]
    cells = [
        [
            str(row.bits),
            row.kernel,
            number(row.stored_bits, 2),
            number(row.us, 1),
            number(row.eta, 3),
            number(row.tera_elements_s, 2),
            "" if row.error is None else f"{row.error:.1e}",
            f"{row.times_ours:.2f}x" if row.times_ours else "",
            "" if row.status == OK else row.status,
        ]
        for row in rows
    ]
    title = f"decode attention, one layer, {rows[0].batch} x {rows[0].length} tokens · {rows[0].device}"
    notes = [f"{row.kernel}: {row.status}: {row.detail}" for row in rows if row.detail]
    return Table(title, headers, cells, [*notes, results.versions(PACKAGES)], text=("kernel", "status"))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options. Raises ``SystemExit`` 2 for a mistake."""
    parser = argparse.ArgumentParser(prog="python -m studies.peers attention", description=__doc__)
    add = parser.add_argument
    add("--kernels", type=Path, metavar="DIR", help="folder with the files of the Triton peers, as in site-packages")
    add("--batch", type=int, default=64, metavar="N", help="requests (default: %(default)s)")
    add("--length", type=int, default=8192, metavar="N", help="tokens of each (default: %(default)s)")
    add("--bits", default="16,8,4,2", metavar="LIST", help="code bits to compare (default: %(default)s)")
    results.add_options(parser)
    args = parser.parse_args(argv)
    if min(args.batch, args.length) < 1 or not set(args.bits.split(",")) <= {"16", "8", "4", "2"}:
        parser.error("--batch and --length must be at least 1, --bits of 16, 8, 4 and 2")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the comparison and returns the exit code."""
    args = parse_args(argv)
    bits = [int(word) for word in args.bits.split(",")]
    rows, code = results.collect(run(args.kernels, Shape(args.batch, args.length), bits))
    if rows:
        rows = with_ratios(rows)
        results.deliver(args, rows, attention_table(rows))
    return code or int(any(row.status in (FAILED, WRONG) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
