"""Other engines against ours, in one process, in turns: ``python -m qkv_engine.bench.peers hf --batch 1,8``.

Both read the same prompts and decode greedily to exactly the same length; prompts that they answer
differently are counted. ``PEERS`` is the table of what can be compared; a further peer is one function.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

from qkv_engine.config import DEFAULT_KV
from qkv_engine.errors import ConfigError, QKVError

from .report import FORMATS, PLAIN_WIDTH, Table, number, render
from .sweep import BenchEngine, greedy, parse_batches, random_prompts, timeline
from .timing import Timeline, decode_rate

if TYPE_CHECKING:
    import torch

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class Generation(NamedTuple):
    """What one run gave: the output tokens of each prompt, and when they came."""

    tokens: list[list[int]]
    timelines: list[Timeline]


Generate = Callable[[list[list[int]], int], Generation]  # prompts of equal length, output tokens


class Setup(NamedTuple):
    """What every peer is to load. ``model`` is a folder or a Hub name, ``dtype`` torch's name of it."""

    model: str
    dtype: str
    device: torch.device


MakePrompts = Callable[[int, str], list[list[int]]]  # batch size and a name for the draw


class Plan(NamedTuple):
    """What to compare: batch sizes, lengths in tokens, runs of each size."""

    peer: str
    batches: tuple[int, ...]
    input_len: int
    output_len: int
    repeats: int
    warmup: int


@dataclass(frozen=True)
class Peer:
    """An engine to compare with. ``load`` gives the ways it can be run, by name; the fastest is measured."""

    package: str
    load: Callable[[Setup], dict[str, Generate]]


@dataclass(frozen=True, kw_only=True)
class PeerRow:
    """One batch size: medians over ``repeats``, ours and the peer's; rates in tokens per second.

    ``decode`` is the pure decode speed (see ``timing.decode_rate``), ``output`` counts the prompt's time too;
    ``_min`` and ``_max`` are the slowest and the fastest repeat. ``variant`` is the peer's fastest way at this
    size, ``differing`` the number of prompts whose tokens were not the same in the last repeat.
    """

    peer: str
    variant: str
    kv: str
    batch: int
    input_len: int
    output_len: int
    repeats: int
    peer_decode_tok_s: float
    peer_decode_tok_s_min: float
    peer_decode_tok_s_max: float
    decode_tok_s: float
    decode_tok_s_min: float
    decode_tok_s_max: float
    decode_ratio: float
    peer_output_tok_s: float
    output_tok_s: float
    output_ratio: float
    differing: int
    machine: str
    versions: str


def load_hf(setup: Setup) -> dict[str, Generate]:
    """Hugging Face ``generate`` with its dynamic and its static cache, each with both portable attentions."""
    import torch
    import transformers

    class Stopwatch(transformers.StoppingCriteria):
        """Called by ``generate`` after every token; stops nothing."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
            if input_ids.is_cuda:
                torch.cuda.synchronize()  # ``generate`` waits for the token right after this anyway
            self.times.append(time.monotonic())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def generate(model: Any, cache: str | None, prompts: list[list[int]], output_len: int) -> Generation:
        sent, stopwatch = time.monotonic(), Stopwatch()
        input_ids = torch.tensor(prompts, device=model.device)
        with torch.inference_mode():
            output = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=output_len,
                cache_implementation=cache,
                stopping_criteria=[stopwatch],
            )
        tokens = output[:, input_ids.shape[1] :].tolist()
        return Generation(tokens, [_timeline(sent, stopwatch.times)] * len(tokens))

    library: Any = transformers  # typed in part only
    library.utils.logging.disable_progress_bar()
    ways: dict[str, Generate] = {}
    for attention in ("sdpa", "eager"):
        model = library.AutoModelForCausalLM.from_pretrained(
            setup.model, dtype=getattr(torch, setup.dtype), attn_implementation=attention
        )
        model = model.to(setup.device).eval()
        model.generation_config = library.GenerationConfig(pad_token_id=0)  # greedy, and no token ends a sequence
        ways[f"dynamic, {attention}"] = partial(generate, model, None)
        ways[f"static, {attention}"] = partial(generate, model, "static")
    return ways


PEERS = {"hf": Peer("transformers", load_hf)}


def _timeline(sent: float, times: list[float]) -> Timeline:
    return Timeline(
        sent=sent,
        scheduled=sent,
        first_token=times[0],
        last_token=times[-1],
        num_tokens=len(times),
        token_times=times,
    )


def generate_with(engine: BenchEngine, prompts: list[list[int]], output_len: int) -> Generation:
    """The same run through our engine."""
    outputs = engine.generate(prompts, greedy(output_len))
    tokens = [output.outputs[0].token_ids for output in outputs]
    return Generation(tokens, [timeline(output, output_len) for output in outputs])


class Run(NamedTuple):
    """One timed run: tokens per second while the whole batch decodes, and over everything."""

    decode: float
    output: float
    tokens: list[list[int]]


def measure(generate: Generate, prompts: list[list[int]], output_len: int) -> Run:
    """Times one run and checks that it is complete."""
    start = time.monotonic()
    tokens, timelines = generate(prompts, output_len)
    seconds = time.monotonic() - start
    if any(len(row) != output_len for row in tokens):
        raise QKVError(f"a run gave other than {output_len} tokens")
    decode = decode_rate(timelines)
    if decode is None:
        raise QKVError("the requests of a batch never all decoded at once", remedy="Raise the output length")
    return Run(decode, len(prompts) * output_len / seconds, tokens)


def compare(
    plan: Plan, ways: dict[str, Generate], ours: dict[str, Generate], make_prompts: MakePrompts
) -> Iterator[PeerRow]:
    """A row for each batch size and each of ``ours`` (by KV preset)."""
    about = {"machine": machine(), "versions": versions(plan.peer)}
    for batch in plan.batches:
        prompts = make_prompts(batch, "warm-up")
        for generate in ours.values():
            _warm_up(generate, prompts, plan)
        variant = max(ways, key=lambda way: _warm_up(ways[way], prompts, plan))
        contenders = {"": ways[variant], **ours}
        runs: dict[str, list[Run]] = {name: [] for name in contenders}
        for repeat in range(plan.repeats):
            prompts = make_prompts(batch, str(repeat))
            for name, generate in contenders.items():
                runs[name].append(measure(generate, prompts, plan.output_len))
        for kv in ours:
            yield _row(plan, runs[""], runs[kv], variant=variant, kv=kv, batch=batch, **about)


def _warm_up(generate: Generate, prompts: list[list[int]], plan: Plan) -> float:
    """The best decode speed of the warm-up runs."""
    return max(measure(generate, prompts, plan.output_len).decode for _ in range(plan.warmup))


def _row(plan: Plan, theirs: Sequence[Run], ours: Sequence[Run], **keys: Any) -> PeerRow:
    values: dict[str, Any] = {}
    for prefix, runs in (("peer_", theirs), ("", ours)):
        decode = [run.decode for run in runs]
        values[f"{prefix}decode_tok_s"] = statistics.median(decode)
        values[f"{prefix}decode_tok_s_min"], values[f"{prefix}decode_tok_s_max"] = min(decode), max(decode)
        values[f"{prefix}output_tok_s"] = statistics.median(run.output for run in runs)
    values["decode_ratio"] = values["decode_tok_s"] / values["peer_decode_tok_s"]
    values["output_ratio"] = values["output_tok_s"] / values["peer_output_tok_s"]
    return PeerRow(
        peer=plan.peer,
        input_len=plan.input_len,
        output_len=plan.output_len,
        repeats=plan.repeats,
        differing=sum(a != b for a, b in zip(theirs[-1].tokens, ours[-1].tokens, strict=True)),
        **{name: round(value, 4) for name, value in values.items()} | keys,
    )


def machine() -> str:
    """The processor or GPU, and the threads torch uses."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"{_cpu_name()}, {torch.get_num_threads()} threads"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def versions(peer: str) -> str:
    names = ("qkv-engine", "torch", PEERS[peer].package)
    return ", ".join(f"{name} {version(name)}" for name in names)


def peer_table(rows: Sequence[PeerRow]) -> Table:
    """The comparison for people."""
    peer = rows[0].peer
    headers = ["kv", "batch", f"{peer} decode tok/s", "our decode tok/s", "ratio"]
    headers += [f"{peer} out tok/s", "our out tok/s", "ratio", "rows that differ", f"{peer} cache, attention"]
    cells = [
        [
            row.kv,
            str(row.batch),
            number(row.peer_decode_tok_s, 1),
            number(row.decode_tok_s, 1),
            f"{row.decode_ratio:.2f}x",
            number(row.peer_output_tok_s, 1),
            number(row.output_tok_s, 1),
            f"{row.output_ratio:.2f}x",
            str(row.differing),
            row.variant,
        ]
        for row in rows
    ]
    title = f"{rows[0].input_len} in, {rows[0].output_len} out · median of {rows[0].repeats} runs"
    return Table(title, headers, cells, [rows[0].machine, rows[0].versions], group=1)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m qkv_engine.bench.peers", description=__doc__)
    add = parser.add_argument
    add("peer", choices=PEERS, help="the engine to compare with")
    add("--model", metavar="NAME", help="folder or Hugging Face name (default: the demo model)")
    add("--kv", default=DEFAULT_KV, metavar="LIST", help="our KV presets (default: %(default)s)")
    add(
        "--dtype",
        choices=DTYPES,
        default="fp32",
        help="of the weights, theirs and ours (default: %(default)s)",
    )
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    add("--batch", default="1,8,32", metavar="LIST", help="batch sizes (default: %(default)s)")
    add("--input-len", type=int, default=64, metavar="N", help="tokens of a prompt (default: %(default)s)")
    add("--output-len", type=int, default=128, metavar="N", help="tokens of an output (default: %(default)s)")
    add("--repeats", type=int, default=5, metavar="N", help="measured runs (default: %(default)s)")
    add("--warmup", type=int, default=2, metavar="N", help="runs before them (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the prompts (default: %(default)s)")
    add("-o", dest="format", choices=FORMATS, default="table", help="form of the rows (default: %(default)s)")
    args = parser.parse_args(argv)
    if min(args.input_len, args.output_len - 1, args.repeats, args.warmup) < 1:
        parser.error("lengths, repeats and warm-up must be at least 1, --output-len at least 2")
    return args


def run(args: argparse.Namespace) -> Iterator[PeerRow]:
    """Loads both sides and yields the rows. Raises ``QKVError``."""
    from qkv_engine import Engine
    from qkv_engine.startup import demo_folder, resolve_device

    batches = parse_batches(args.batch)
    plan = Plan(args.peer, batches, args.input_len, args.output_len, args.repeats, args.warmup)
    peer = PEERS[args.peer]
    folder = str(demo_folder()) if args.model is None else args.model
    try:
        ways = peer.load(Setup(folder, DTYPES[args.dtype], resolve_device(args.device)))
    except ImportError as error:
        remedy = f"pip install {peer.package}"
        raise ConfigError(f"not installed ({error})", field="peer", value=args.peer, remedy=remedy) from error
    options: dict[str, Any] = {
        "max_model_len": plan.input_len + plan.output_len,
        "max_num_seqs": max(batches),
    }
    options |= {"model": args.model, "dtype": DTYPES[args.dtype], "device": args.device}
    with ExitStack() as stack:
        engines = {kv: stack.enter_context(Engine(kv=kv, **options)) for kv in args.kv.split(",")}
        ours: dict[str, Generate] = {kv: partial(generate_with, e) for kv, e in engines.items()}
        some_engine = next(iter(engines.values()))

        def make_prompts(batch: int, draw: str) -> list[list[int]]:
            return random_prompts(some_engine, batch, plan.input_len, seed=f"{args.seed} {batch} {draw}")

        yield from compare(plan, ways, ours, make_prompts)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the comparison and returns the exit code; Ctrl-C prints the rows there are."""
    args = parse_args(argv)
    rows: list[PeerRow] = []
    code = 0
    try:
        for row in run(args):
            rows.append(row)
    except KeyboardInterrupt:
        code = 130
    except QKVError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2 if isinstance(error, ConfigError) else 1
    if rows:
        width = None if sys.stdout.isatty() else PLAIN_WIDTH
        print(render(args.format, rows, peer_table(rows), width=width), end="")
    return code


if __name__ == "__main__":
    sys.exit(main())
