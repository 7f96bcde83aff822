"""Times on a GPU what has a target and no figure yet: ``python -m studies.gpu_check --output gpu-check.jsonl``.

Parts take minutes each, at most nine; ``--parts`` chooses some. Each figure is printed with its target and whether it
holds, and appended to ``--output``, a line of JSON each; parts that are there already are left out, so that a run which
was stopped goes on. Weights are random. ``tests-*`` run the tests of a file of ``tests/gpu``. Targets are an H200's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from qkv_engine import Engine
from qkv_engine.bench.provenance import device_name
from qkv_engine.errors import QKVError

from .gpu_copies import steps_beside_copies
from .gpu_host import Return, from_disk, returns
from .gpu_steps import Machine, first_tokens, prompts, spectral, steps, without_bases

TESTS = Path(__file__).resolve().parents[1] / "tests/gpu"
# K and V of the layers by turns, as plans of so many bits have them on average, and their recent windows.
SPECTRAL = {
    "1.75 bits": (("graded-64x4",), ("graded-16x8",), 0),
    "1.4 bits": (("graded-32x4-32x2", "graded-64x4"), ("graded-16x8", "graded-16x4", "graded-16x4"), 128),
}
PYTEST = str(Path(sys.executable).with_name("pytest"))  # ``python -m`` would find our kernels/ for another package
SOAK_SECONDS = "300"
SIZES = (1, 16, 64)
SLOWEST = 5  # steps that are printed with what they did
ALL = "80GiB"  # weights and KV, unless a part says else
GB = 1e9


class Figure(NamedTuple):
    """A measured value in ``unit``, and its ``target``: ``most``, or the least if not; None where none was set."""

    what: str
    value: float
    unit: str
    target: float | None = None
    most: bool = True

    @property
    def holds(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.value <= self.target if self.most else self.value >= self.target


def spectral_kernel(machine: Machine) -> Iterator[Figure]:
    """Attention over graded pages in one layer, 64 requests of 8,192 tokens."""
    from .kernels.bench_paged_decode import measure

    for queries, target in ((4, 80.0), (8, 100.0)):
        rows = measure("spectral-1.5", 64, 8192, queries, [None], [None])
        us = min(row.us for row in rows)
        yield Figure(f"{queries} query heads a KV head", us, "us", target)


def spectral_steps(machine: Machine) -> Iterator[Figure]:
    """Throughput of the largest batch against that of 16 bits, and what K's basis costs a step."""
    (wide,) = steps(machine, "qwen3-8b", "bf16", [None], 8192, memory=ALL)
    for bits, (k, v, recent) in SPECTRAL.items():
        with tempfile.TemporaryDirectory() as folder:
            kv = spectral(Path(folder), machine, "qwen3-8b", k, v, recent)
            few, most = steps(machine, "qwen3-8b", kv, [64, None], 8192, memory=ALL)
            (plain,) = steps(machine, "qwen3-8b", without_bases(kv), [64], 8192, memory=ALL)
        gain = most.tokens_a_second / wide.tokens_a_second
        what = f"{bits}: throughput of {most.batch} requests over bf16's {wide.batch}"
        yield Figure(what, gain, "times", 5.2, most=False)
        yield Figure(f"the basis in a step of {few.batch}", 100 * (few.seconds / plain.seconds - 1), "%", 3.0)


def weights_few(machine: Machine) -> Iterator[Figure]:
    """Steps of few requests of 2,048 tokens with int4 KV: products read the weights' bytes alone."""
    targets: dict[str | None, tuple[float | None, float | None]] = {
        None: (None, None), "int8": (2.9, 3.6), "int4": (2.2, 3.0),
    }  # fmt: skip
    for weights, limits in targets.items():
        found = steps(machine, "qwen3-8b", "int4", [1, 16], 2048, memory="60GiB", weights=weights)
        for step, target in zip(found, limits, strict=True):
            yield Figure(f"{weights or 'bf16'} weights, batch {step.batch}", 1e3 * step.seconds, "ms", target)


def weights_many(machine: Machine) -> Iterator[Figure]:
    """Steps of 256 requests of 2,048 tokens with int4 KV, against weights of 16 bits."""
    targets: dict[str | None, float | None] = {None: None, "fp8": 1.25, "int4": 0.9}
    plain = 0.0
    for weights, target in targets.items():
        (step,) = steps(machine, "qwen3-8b", "int4", [256], 2048, memory="75GiB", weights=weights)
        plain = plain or step.tokens_a_second
        name = f"{weights or 'bf16'} weights, batch {step.batch}"
        yield Figure(name, 1e3 * step.seconds, "ms")
        yield Figure(name, step.tokens_a_second / plain, "times", target, most=False)


def tiles(machine: Machine) -> Iterator[Figure]:
    """Products and attention in the launches that were changed, over those before."""
    from .kernels import bench_tiles

    def both(name: str, found: bench_tiles.Found, most: float) -> Iterator[Figure]:
        ratio = found.now / found.before
        yield Figure(f"{name}, {found.before:.1f} -> {found.now:.1f} us", ratio, "times", bench_tiles.NO_SLOWER)
        yield Figure(f"{name}, error", found.error, "of the norm", most)

    with torch.device(machine.device):
        for case in bench_tiles.compared():
            name = f"{case.kind} {case.weight}, {case.num_rows} rows: {case.what}"
            yield from both(name, bench_tiles.compare(case), bench_tiles.MAX_ERRORS[case.kind])
        for num_requests in bench_tiles.ITEMS:
            name = f"attention of {num_requests} requests, 256 channels"
            yield from both(name, bench_tiles.attention(num_requests), bench_tiles.MAX_ERRORS[bench_tiles.BF16])


def weights_prompts(machine: Machine) -> Iterator[Figure]:
    """32 prompts of 2,048 tokens, FP8 against 16 bits."""
    (plain, limit), (narrow, _) = (prompts(machine, "qwen3-8b", 32, 2048, weights) for weights in (None, "fp8"))
    yield Figure("bf16 weights, of the products' limit", limit / plain, "times")
    yield Figure("fp8 weights over bf16", plain / narrow, "times", 1.4, most=False)


def over_limit(
    machine: Machine, shape: str, kv: str, context: int, targets: Mapping[int, float | None], memory: str = ALL
) -> Iterator[Figure]:
    """Steps at each batch of ``targets`` against the time of their bytes and products."""
    found = steps(machine, shape, kv, list(targets), context, memory=memory)
    for step, target in zip(found, targets.values(), strict=True):
        yield Figure(f"{shape}, {kv} KV, batch {step.batch}", step.seconds / step.limit, "times the limit", target)


def moe(machine: Machine) -> Iterator[Figure]:
    """Steps of a model of experts, whose weights in 16 bits take 57 GiB."""
    targets = {1: 1 / 0.6, 16: 1 / 0.6, 64: 1 / 0.65, 256: 1 / 0.65}
    yield from over_limit(machine, "qwen3-30b-a3b", "int4", 2048, targets, memory="100GiB")


def moe_weights(machine: Machine) -> Iterator[Figure]:
    """Steps of models of experts whose matrices are codes, against the time of their bytes and products."""
    for shape, weights in product(("qwen3-30b-a3b", "gpt-oss-20b"), ("int4", "fp8")):
        for step in steps(machine, shape, "int4", [*SIZES, 256], 2048, memory="60GiB", weights=weights):
            name = f"{shape}, {weights} weights, batch {step.batch}"
            yield Figure(name, 1e3 * step.seconds, "ms")
            yield Figure(name, step.seconds / step.limit, "times the limit")


def windows(machine: Machine) -> Iterator[Figure]:
    """Steps of models some of whose layers see a window."""
    for shape in ("gemma-3-12b", "gpt-oss-20b"):
        yield from over_limit(machine, shape, "int4", 8192, dict.fromkeys(SIZES), memory="74GiB")


def windows_kernel(machine: Machine) -> Iterator[Figure]:
    """Attention over pages of 4 bits in one layer that sees a window, 64 requests of 8,192 tokens."""
    from .kernels.bench_paged_decode import measure

    rows = list(measure("K4V4", 64, 8192, 4, [None], [None, 4096]))
    whole, windowed = (min(row.us for row in rows if row.window == window) for window in (None, 4096))
    yield Figure("a window of 4,096 tokens, over the time without", windowed / whole, "times", 0.6)


def hybrid_steps(machine: Machine) -> Iterator[Figure]:
    """Steps of a model with gated delta-nets."""
    yield from over_limit(machine, "qwen3.5-4b", "bf16", 8192, dict.fromkeys(SIZES, 1.35), memory="74GiB")


def hybrid_prompts(machine: Machine) -> Iterator[Figure]:
    """Prompts of 8,192 tokens of the same, against the products' limit."""
    seconds, limit = prompts(machine, "qwen3.5-4b", 4, 8192)
    yield Figure("of the products' limit", limit / seconds, "times", 0.7, most=False)


def hybrid_first_tokens(machine: Machine) -> Iterator[Figure]:
    """Prompts of the same alone: short ones are captured, and take what their bytes and products take."""
    for length, seconds in first_tokens(machine, "qwen3.5-4b", (64, 256, 512, 1024)):
        yield Figure(f"prompt of {length}", 1e3 * seconds, "ms")


def determinism(machine: Machine) -> Iterator[Figure]:
    """Steps of requests of 2,048 tokens in a deterministic engine, over those in another."""
    usual, steady = (
        list(steps(machine, "qwen3-8b", "int4", [1, 64], 2048, memory="60GiB", deterministic=is_steady))
        for is_steady in (False, True)
    )
    for step, longer, target in zip(usual, steady, (1.15, 1.3), strict=True):
        yield Figure(f"batch {step.batch}, deterministic", 1e3 * longer.seconds, "ms")
        yield Figure("over a step as usual", longer.seconds / step.seconds, "times", target)


def host(machine: Machine) -> Iterator[Figure]:
    """A prompt of 32,768 tokens that others drove out of KV memory, back from host memory."""
    for found in returns(machine):
        yield from came_back(found, found.when, 40.0)


def came_back(found: Return, when: str, target: float | None) -> Iterator[Figure]:
    """What a prompt's way back took, the token behind it included."""
    yield Figure(f"{when}: {found.nbytes / GB:.2f} GB", found.rate / GB, "GB/s", target, most=False)
    yield Figure("computed again over fetched", found.computed / found.seconds, "times", 1.0, most=False)


def host_steps(machine: Machine) -> Iterator[Figure]:
    """Decode steps of 16 requests beside copies, over such steps alone."""
    alone, beside = steps_beside_copies(machine)
    for name, share, target in (("median", 0.5, 5.0), ("99th of 100", 0.99, 10.0)):
        quiet, busy = (sorted(note.seconds for note in each)[int(share * len(each))] for each in (alone, beside))
        yield Figure(f"{name} of {len(alone)} steps alone", 1e3 * quiet, "ms")
        yield Figure(f"longer, of {len(beside)} beside copies", 100 * (busy / quiet - 1), "%", target)
    for note in sorted(beside, key=lambda note: -note.seconds)[:SLOWEST]:
        print(f"host-steps: {note}", flush=True)


def disk(machine: Machine) -> Iterator[Figure]:
    """A prompt of 32,768 tokens from the files of a KV store after a restart."""
    with tempfile.TemporaryDirectory() as folder:
        times = from_disk(machine, Path(folder))
    yield Figure("the files alone", times.files / GB, "GB/s")
    yield from came_back(times.prompt, times.prompt.when, 0.9 * times.files / GB)


def resize(machine: Machine) -> Iterator[Figure]:
    """KV memory halved and given back while nobody asks; the device's free memory follows."""
    whole, half = machine.memory("40GiB", tiny="64MiB"), machine.memory("20GiB", tiny="32MiB")
    with Engine(
        model=machine.shape("qwen3-8b"), load_format="random", device=machine.device, kv_memory=whole, resizable=True
    ) as engine:
        for size in (half, whole):
            start, before = time.perf_counter(), free_nbytes(machine)
            engine.resize(size)
            yield Figure(f"resize to {size}", time.perf_counter() - start, "s")
            yield Figure("the device's free memory then", (free_nbytes(machine) - before) / GB, "GB more")


def free_nbytes(machine: Machine) -> int:
    """Of the device's memory; 0 on a CPU."""
    return torch.cuda.mem_get_info()[0] if machine.device == "cuda" else 0


def run_tests(path: Path, machine: Machine) -> Iterator[Figure]:
    """The tests of a file that need a GPU; a soak among them is cut short."""
    env = {"QKV_SOAK_SECONDS": SOAK_SECONDS, **os.environ}
    done = subprocess.run([PYTEST, "-q", "-m", "gpu", str(path)], check=False, env=env)
    yield Figure(f"exit code of {path.name}", float(done.returncode), "", 0.0)


Part = Callable[[Machine], Iterator[Figure]]
PARTS: Mapping[str, Part] = {
    "spectral-kernel": spectral_kernel,
    "spectral-steps": spectral_steps,
    "weights-few": weights_few,
    "weights-many": weights_many,
    "tiles": tiles,
    "weights-prompts": weights_prompts,
    "moe": moe,
    "moe-weights": moe_weights,
    "windows": windows,
    "windows-kernel": windows_kernel,
    "hybrid-steps": hybrid_steps,
    "hybrid-prompts": hybrid_prompts,
    "hybrid-first-tokens": hybrid_first_tokens,
    "determinism": determinism,
    "host": host,
    "host-steps": host_steps,
    "disk": disk,
    "resize": resize,
    **{f"tests-{path.stem[5:]}": partial(run_tests, path) for path in sorted(TESTS.glob("test_*.py"))},
}


def run(machine: Machine, parts: list[str], output: Path | None) -> bool:
    """Runs ``parts`` that ``output`` does not have; whether all ran and no target was missed."""
    done, is_well = finished(output), True
    for name in parts:
        if name in done:
            print(f"{name}: is in {output}", flush=True)
            continue
        start, found = time.perf_counter(), list[Figure]()
        try:
            for figure in PARTS[name](machine):
                found.append(figure)
                print(f"{name}: {line(figure)}", flush=True)
                is_well &= figure.holds is not False
        except QKVError as error:  # the other parts may run
            print(f"{name}: {error}", flush=True)
            is_well = False
            continue
        append(output, name, found, machine, time.perf_counter() - start)
    return is_well


def line(figure: Figure) -> str:
    """A figure for people."""
    target = "" if figure.target is None else f", {'at most' if figure.most else 'at least'} {figure.target:g}"
    verdict = {None: "", True: ": holds", False: ": MISSED"}[figure.holds]
    return f"{figure.what}: {figure.value:.4g} {figure.unit}{target}{verdict}"


def finished(output: Path | None) -> set[str]:
    """The parts whose figures are in the file."""
    if output is None or not output.exists():
        return set()
    return {json.loads(row)["part"] for row in output.read_text().splitlines()}


def append(output: Path | None, part: str, found: list[Figure], machine: Machine, seconds: float) -> None:
    """Adds the figures of a whole part to the file, all at once."""
    if output is None:
        return
    where = {"device": device_name(machine.device), "torch": torch.__version__, "part_seconds": round(seconds, 1)}
    rows = [{"part": part, **figure._asdict(), "holds": figure.holds, **where} for figure in found]
    with output.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The options. Raises ``SystemExit`` 2 for a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", default=",".join(PARTS), metavar="LIST", help=f"of {', '.join(PARTS)} (default: all)")
    add("--output", type=Path, metavar="FILE.jsonl", help="append the figures; parts that it has are left out")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="default: %(default)s")
    add("--tiny", action="store_true", help="the demo shape and few tokens, to try the parts")
    args = parser.parse_args(argv)
    args.parts = args.parts.split(",")
    unknown = [name for name in args.parts if name not in PARTS]
    if unknown:
        parser.error(f"no part is called {unknown[0]}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs the parts; 1 if a target was missed or a part failed."""
    args = parse_args(argv)
    return 0 if run(Machine(args.device, args.tiny), args.parts, args.output) else 1


if __name__ == "__main__":
    sys.exit(main())
