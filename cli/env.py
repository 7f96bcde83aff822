"""``qkv-engine env``: versions, the device, the ladder of a preset, and how many tokens fit on each of its rungs."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import TYPE_CHECKING, Any

from qkv_engine import __version__
from qkv_engine.config import DEFAULT_KV, EngineConfig, format_size, parse_size, resolve_kv

from . import common
from .model import read_model, weight_dtype

if TYPE_CHECKING:
    import torch

    from qkv_engine.kv.ladder import Ladder

_PACKAGES = (
    "torch",
    "triton",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "msgspec",
    "uvloop",
    "jinja2",
    "rich",
    "prompt-toolkit",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``env``."""
    parser.epilog = "Nothing is loaded but the model's configuration, so the figures are those of a fresh start."
    common.add_model_arguments(parser)
    form = parser.add_argument_group("output")
    form.add_argument("-o", dest="format", choices=("table", "json"), default="table", help="form of the output")


def run(args: argparse.Namespace) -> int:
    """Print what ``args`` ask about and return the exit code."""
    facts = {"versions": _versions(), **_capacity(args)}
    if args.format == "json":
        import msgspec

        sys.stdout.write(msgspec.json.format(msgspec.json.encode(facts), indent=2).decode() + "\n")
    else:
        _print_tables(facts)
    return common.EXIT_OK


def _versions() -> dict[str, str]:
    """Installed versions, read from their metadata: importing ten libraries would take seconds."""
    found = {"qkv-engine": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _capacity(args: argparse.Namespace) -> dict[str, Any]:
    common.load_torch()
    from qkv_engine.kv.ladder import build_ladder
    from qkv_engine.startup import resolve_device

    device, config = resolve_device(args.device or "auto"), read_model(args, args.model).config
    dtype = weight_dtype(args.dtype or "auto", config, device)
    preset = resolve_kv(args.kv or DEFAULT_KV)
    ladder = build_ladder(
        preset,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )
    weights = config.num_parameters * dtype.itemsize
    context = args.max_model_len or config.max_position_embeddings
    nbytes = _kv_nbytes(args, ladder, context, weights, device)
    model = {
        "name": args.model or "demo",
        "architecture": config.architecture,
        "parameters": config.num_parameters,
        "dtype": str(dtype).removeprefix("torch."),
        "weights_bytes": weights,
        "context_tokens": context,
    }
    kv = {
        "preset": ladder.name,
        "policy": _policy(ladder),
        "sink_tokens": ladder.sink,
        "recent_tokens": ladder.recent,
        "admission": f"counts requests on {ladder.rungs[ladder.admit_at].name}",
        "memory_bytes": nbytes,
        "rungs": _rungs(ladder, nbytes),
    }
    return {"device": _device(device), "model": model, "kv": kv}


def _policy(ladder: Ladder) -> str:
    """When blocks step down, in words that begin with the policy's name."""
    if len(ladder.rungs) == 1:
        return "fixed: blocks never step down"
    if ladder.eager:
        return f"eager: blocks go to {ladder.floor.name} as soon as they may"
    return "pressure: blocks step down when memory runs short"


def _kv_nbytes(args: argparse.Namespace, ladder: Ladder, context: int, weights: int, device: torch.device) -> int:
    """KV memory as the engine would choose it, once the weights have taken theirs."""
    from qkv_engine.memory import default_kv_memory, free_memory
    from qkv_engine.startup import most_nbytes

    if args.kv_memory is not None:
        return parse_size(args.kv_memory, field="kv_memory", free=free_memory(device))
    most = most_nbytes(ladder, EngineConfig().max_num_seqs, context)
    taken = weights if device.type == "cuda" else 0  # the share of a computer's memory is small enough for both
    return max(0, min(most, default_kv_memory(device, most + taken) - taken))


def _rungs(ladder: Ladder, nbytes: int) -> list[dict[str, Any]]:
    from qkv_engine.bench.sizing import planned_cache

    tables = planned_cache(ladder, nbytes).tables
    return [
        {
            "rung": rung.name,
            "k": by_layers([k.name for k, _ in rung.layers]),
            "v": by_layers([v.name for _, v in rung.layers]),
            "block_bytes": rung.block_nbytes,
            "bytes_per_token": rung.token_nbytes,
            "effective_bits": rung.effective_bits,
            "capacity_tokens": tables.max_tokens(number),
        }
        for number, rung in enumerate(ladder.rungs)
    ]


def by_layers(names: Sequence[str]) -> str:
    """The formats of all layers, equal neighbours together: "0-6 int4-token-128, 7 dense16"."""
    parts, first = [], 0
    for name, group in groupby(names):
        last = first + len(list(group)) - 1
        parts.append(f"{first}-{last} {name}" if last > first else f"{first} {name}")
        first = last + 1
    return ", ".join(parts)


def _device(device: torch.device) -> dict[str, Any]:
    import torch

    from qkv_engine.memory import free_memory

    facts: dict[str, Any] = {"name": str(device), "free_bytes": free_memory(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {**facts, "total_bytes": properties.total_memory, "product": properties.name}
    return {**facts, "threads": torch.get_num_threads(), "product": platform.machine()}


def _print_tables(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from .live_tail import render_lines

    # Where nobody looks at a screen there is no width to keep to.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for section, entries in facts.items():
        table.add_row(Text(section, style="bold"))
        for name, value in entries.items():
            if name != "rungs":
                table.add_row(f"  {_label(name)}", Text(_in_words(name, value)))
    rungs = Table(box=None, padding=(0, 2, 0, 2))
    for name in facts["kv"]["rungs"][0]:
        rungs.add_column(_label(name), justify="left" if name in ("rung", "k", "v") else "right")
    for rung in facts["kv"]["rungs"]:
        rungs.add_row(*(_in_words(name, value) for name, value in rung.items()))
    for line in [*render_lines(console, table), *render_lines(console, rungs)]:
        console.out(line, highlight=False)


def _label(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _in_words(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return format_size(value)
    return f"{value:,.10g}" if isinstance(value, int | float) else str(value)
