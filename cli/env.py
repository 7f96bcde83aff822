"""``qkv-engine env``: versions, the device, and how many tokens of a model fit in its KV memory."""

from __future__ import annotations

import argparse
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv_engine import __version__
from qkv_engine.config import BLOCK_TOKENS, DEFAULT_KV, EngineConfig, format_size, parse_size, resolve_kv
from qkv_engine.errors import ConfigError

from . import common

if TYPE_CHECKING:
    import torch

    from qkv_engine.kv.ladder import Ladder
    from qkv_engine.models.config import ModelConfig

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

    device, config = resolve_device(args.device or "auto"), _model_config(args)
    dtype = _weight_dtype(args.dtype or "auto", config, device)
    ladder = build_ladder(
        resolve_kv(args.kv or DEFAULT_KV),
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
    kv = {"preset": ladder.name, "memory_bytes": nbytes, "rungs": _rungs(ladder, nbytes)}
    return {"device": _device(device), "model": model, "kv": kv}


def _model_config(args: argparse.Namespace) -> ModelConfig:
    """The configuration of a folder, a shape or a Hub model, of which only the small files are fetched."""
    from qkv_engine.models import hub
    from qkv_engine.models.config import ModelConfig
    from qkv_engine.models.loader import read_config
    from qkv_engine.models.shapes import SHAPES
    from qkv_engine.startup import demo_folder

    if args.model in SHAPES:
        return ModelConfig.from_hf(SHAPES[args.model])
    folder = demo_folder() if args.model is None else Path(args.model).expanduser()
    if not folder.is_dir():
        folder = hub.download(args.model, revision=args.revision, token=None, weights=False, check=read_config)
    return read_config(folder)


def _weight_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    import torch

    from qkv_engine.models.config import DTYPES

    if name == "auto":
        return torch.float32 if device.type == "cpu" else config.dtype
    if name not in DTYPES:
        raise ConfigError("unknown", field="dtype", value=name, remedy=f"Use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _kv_nbytes(args: argparse.Namespace, ladder: Ladder, context: int, weights: int, device: torch.device) -> int:
    """KV memory as the engine would choose it, once the weights have taken theirs."""
    from qkv_engine.memory import default_kv_memory, free_memory

    if args.kv_memory is not None:
        return parse_size(args.kv_memory, field="kv_memory", free=free_memory(device))
    most = EngineConfig().max_num_seqs * -(-context // BLOCK_TOKENS) * ladder.widest.block_nbytes
    taken = weights if device.type == "cuda" else 0  # the share of a computer's memory is small enough for both
    return max(0, min(most, default_kv_memory(device, most + taken) - taken))


def _rungs(ladder: Ladder, nbytes: int) -> list[dict[str, Any]]:
    return [
        {
            "name": rung.name,
            "effective_bits": rung.effective_bits,
            "bytes_per_token": rung.token_nbytes,
            "capacity_tokens": nbytes // rung.block_nbytes * BLOCK_TOKENS,
        }
        for rung in ladder.rungs
    ]


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
        rungs.add_column(_label(name), justify="left" if name == "name" else "right")
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
