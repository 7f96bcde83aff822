"""Other engines against ours, in turns on one machine: ``python -m studies.peers hf --batch 1,8``.

Both read the same prompts and decode greedily to exactly the same length; prompts with different answers are counted.
``PEERS`` is the table of engines to compare; a further peer is one function. ``python -m studies.peers attention``
compares attention kernels alone (``peer_attention.py``).
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from qkv_engine.bench.batches import parse_batches
from qkv_engine.bench.provenance import device_name
from qkv_engine.bench.report import number
from qkv_engine.bench.runs import greedy, ordinary_tokens, random_prompts, timeline
from qkv_engine.bench.table import Table
from qkv_engine.bench.timing import Timeline
from qkv_engine.errors import ConfigError
from qkv_engine.presets import DEFAULT_KV, resolve_kv

from . import results
from .contender import Contender, Generate, Generation, Loaded, Run

if TYPE_CHECKING:
    import torch

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class Setup(NamedTuple):
    """The model that every engine loads: a folder, a Hub name, a shape (random weights, each its own), None: demo."""

    model: str | None
    dtype: str
    device: str


class Plan(NamedTuple):
    """A comparison to run: batch sizes, lengths in tokens, runs of each size."""

    peer: str
    device: str
    batches: tuple[int, ...]
    input_len: int
    output_len: int
    repeats: int
    warmup: int
    seed: int
    way: str = ""  # words in the names of the peer's ways that are tried


@dataclass(frozen=True)
class Peer:
    """An engine to compare with. ``load`` gives its ways to run, by name; the fastest is measured."""

    package: str
    load: Callable[[Setup], Loaded]


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


def load_hf(setup: Setup) -> Loaded:
    """Hugging Face ``generate`` with its dynamic and its static cache, each with both portable attentions."""
    ways: dict[str, Generate] = {}
    for attention in ("sdpa", "eager"):
        model = _hf_model(setup, attention)
        ways[f"dynamic, {attention}"] = partial(_hf_generate, model, {})
        ways[f"static, {attention}"] = partial(_hf_generate, model, {"cache_implementation": "static"})
    return Loaded(ways, list(range(model.config.vocab_size)))


def load_hf_quanto(setup: Setup) -> Loaded:
    """Hugging Face ``generate`` with its quantized cache, which dequantizes all of it in every step."""
    importlib.import_module("optimum.quanto")
    model = _hf_model(setup, "sdpa")
    ways: dict[str, Generate] = {}
    for bits in (4, 2):
        config = {"backend": "quanto", "nbits": bits}
        cache = {"cache_implementation": "quantized", "cache_config": config}
        ways[f"quanto {bits} bits, sdpa"] = partial(_hf_generate, model, cache)
    return Loaded(ways, list(range(model.config.vocab_size)))


def _hf_model(setup: Setup, attention: str) -> Any:
    """The model in Hugging Face's library; random weights for the name of a shape."""
    import torch
    import transformers

    from qkv_engine.models.shapes import SHAPES
    from qkv_engine.startup import demo_folder, resolve_device

    library: Any = transformers  # typed in part only
    library.utils.logging.disable_progress_bar()
    device, options = resolve_device(setup.device), {"dtype": getattr(torch, setup.dtype)}
    options["attn_implementation"] = attention
    if setup.model in SHAPES:
        shape = dict(SHAPES[setup.model])
        config = library.AutoConfig.for_model(shape.pop("model_type"), **shape)
        with device:
            model = library.AutoModelForCausalLM.from_config(config, **options)
    else:
        folder = str(demo_folder()) if setup.model is None else setup.model
        model = library.AutoModelForCausalLM.from_pretrained(folder, **options)
    model = model.to(device).eval()
    model.generation_config = library.GenerationConfig(pad_token_id=0)  # greedy, and no token ends a sequence
    return model


def _hf_generate(model: Any, cache: dict[str, Any], prompts: list[list[int]], output_len: int) -> Generation:
    import torch

    sent, stopwatch = time.monotonic(), _Stopwatch()
    input_ids = torch.tensor(prompts, device=model.device)
    with torch.inference_mode():
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=output_len,
            stopping_criteria=[stopwatch],
            **cache,
        )
    tokens = output[:, input_ids.shape[1] :].tolist()
    return Generation(tokens, [Timeline.read(sent, stopwatch.times)] * len(tokens))


class _Stopwatch:
    """A stopping criterion: called by ``generate`` after every token, stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        import torch

        if input_ids.is_cuda:
            torch.cuda.synchronize()  # ``generate`` waits for the token right after this anyway
        self.times.append(time.monotonic())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def load_ours(setup: Setup, kv: str, kv_memory: str | None, max_model_len: int, max_num_seqs: int) -> Loaded:
    """Our engine with the KV preset ``kv``."""
    from qkv_engine import Engine
    from qkv_engine.models.shapes import SHAPES

    engine = Engine(
        setup.model,
        load_format="random" if setup.model in SHAPES else "auto",
        kv=kv,
        kv_memory=kv_memory,
        dtype=setup.dtype,
        device=setup.device,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
    )

    def generate(prompts: list[list[int]], output_len: int) -> Generation:
        outputs = engine.generate(prompts, greedy(output_len))
        tokens = [output.outputs[0].token_ids for output in outputs]
        return Generation(tokens, [timeline(output, output_len) for output in outputs])

    return Loaded({"": generate}, ordinary_tokens(engine))


PEERS = {"hf": Peer("transformers", load_hf), "hf-quanto": Peer("optimum-quanto", load_hf_quanto)}


def _load_peer(name: str, setup: Setup) -> Loaded:
    peer = PEERS[name]
    try:
        return peer.load(setup)
    except ImportError as error:
        remedy = f"pip install {peer.package}"
        raise ConfigError(f"not installed ({error})", field="peer", value=name, remedy=remedy) from error


def compare(plan: Plan, peer: Contender, ours: dict[str, Contender]) -> Iterator[PeerRow]:
    """A row for each batch size and each of ``ours``, by KV preset."""
    packages = ("qkv-engine", "torch", PEERS[plan.peer].package)
    about = {"machine": machine(plan.device), "versions": results.versions(packages)}
    shared = set(peer.vocabulary).intersection(*(our.vocabulary for our in ours.values()))
    for batch in plan.batches:
        # A new draw for each repeat: the KV of an earlier run must not be found again.
        warm_up, *draws = (
            random_prompts(sorted(shared), batch, plan.input_len, f"{plan.seed} {batch} {index}")
            for index in range(1 + plan.repeats)
        )
        ways = [way for way in peer.ways if plan.way in way]
        if not ways:
            raise ConfigError("is no way to run it", field="way", value=plan.way, remedy=f"Choose from {peer.ways}")
        speeds = {way: _warm_up(peer, way, warm_up, plan) for way in ways}
        variant = max(speeds, key=speeds.__getitem__)
        turns = {"": (peer, variant), **{kv: (our, our.ways[0]) for kv, our in ours.items()}}
        for our in ours.values():
            _warm_up(our, our.ways[0], warm_up, plan)
        runs: dict[str, list[Run]] = {name: [] for name in turns}
        for prompts in draws:
            for name, (contender, way) in turns.items():
                runs[name].append(contender.measure(way, prompts, plan.output_len))
        for kv in ours:
            yield _row(plan, runs[""], runs[kv], variant=variant, kv=kv, batch=batch, **about)


def _warm_up(contender: Contender, way: str, prompts: list[list[int]], plan: Plan) -> float:
    """The best decode speed of the warm-up runs."""
    return max(contender.measure(way, prompts, plan.output_len).decode for _ in range(plan.warmup))


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


def machine(device: str) -> str:
    """The GPU that ``device`` names, or the processor and the threads torch uses on it."""
    import torch

    from qkv_engine.startup import resolve_device

    resolved = resolve_device(device)
    name = device_name(str(resolved))
    return name if resolved.type == "cuda" else f"{name}, {torch.get_num_threads()} threads"


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
    parser = argparse.ArgumentParser(prog="python -m studies.peers", description=__doc__)
    add = parser.add_argument
    add("peer", choices=PEERS, help="the engine to compare with")
    add("--model", default="demo", metavar="NAME", help="folder, Hugging Face name or shape (default: %(default)s)")
    add("--kv", default=DEFAULT_KV, metavar="LIST", help="our KV presets (default: %(default)s)")
    add("--kv-memory", metavar="SIZE", help="of each of our engines (default: what is free)")
    add("--dtype", choices=DTYPES, default="fp32", help="of the weights (default: %(default)s)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    add("--batch", default="1,8,32", metavar="LIST", help="batch sizes (default: %(default)s)")
    add("--input-len", type=int, default=64, metavar="N", help="tokens of a prompt (default: %(default)s)")
    add("--output-len", type=int, default=128, metavar="N", help="tokens of an output (default: %(default)s)")
    add("--way", default="", metavar="WORDS", help='ways to run the peer with these words, such as "dynamic, sdpa"')
    add("--repeats", type=int, default=5, metavar="N", help="measured runs (default: %(default)s)")
    add("--warmup", type=int, default=2, metavar="N", help="runs before them (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the prompts (default: %(default)s)")
    results.add_options(parser)
    args = parser.parse_args(argv)
    if min(args.input_len, args.output_len - 1, args.repeats, args.warmup) < 1:
        parser.error("lengths, repeats and warm-up must be at least 1, --output-len at least 2")
    return args


def run(args: argparse.Namespace) -> Iterator[PeerRow]:
    """Starts both sides and yields the rows. Raises ``QKVError``."""
    options = {name: getattr(args, name) for name in Plan._fields if name != "batches"}
    plan = Plan(batches=parse_batches(args.batch), **options)
    setup = Setup(None if args.model == "demo" else args.model, DTYPES[args.dtype], args.device)
    limits = (args.kv_memory, plan.input_len + plan.output_len, max(plan.batches))
    kvs = tuple(dict.fromkeys(name.strip() for name in args.kv.split(",")))
    for kv in kvs:
        resolve_kv(kv)  # names an unknown one before any engine is loaded
    with ExitStack() as stack:
        peer = stack.enter_context(Contender(partial(_load_peer, args.peer, setup)))
        ours = {kv: stack.enter_context(Contender(partial(load_ours, setup, kv, *limits))) for kv in kvs}
        yield from compare(plan, peer, ours)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the comparison and returns the exit code; Ctrl-C prints the rows there are."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["attention"]:
        from .peer_attention import main as compare_attention

        return compare_attention(argv[1:])
    args = parse_args(argv)
    rows, code = results.collect(run(args))
    if rows:
        results.deliver(args, rows, peer_table(rows))
    return code


if __name__ == "__main__":
    sys.exit(main())
