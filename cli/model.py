"""A model before its weights are loaded: configuration, tokenizer, dtype, and the KV memory of a benchmark."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qkv_engine.errors import ConfigError

from .common import load_torch, refuse_shape

if TYPE_CHECKING:
    import torch

    from qkv_engine.bench.sizing import Machine
    from qkv_engine.config import KVConfig
    from qkv_engine.models.config import ModelConfig
    from qkv_engine.text.tokenizer import Tokenizer


class ModelFiles(NamedTuple):
    """The configuration of a model, and the folder it was read from; a bare shape has none."""

    config: ModelConfig
    folder: Path | None

    def tokenizer(self, field: str) -> Tokenizer:
        """The folder's tokenizer. Raises ``ConfigError``, naming the option that wants it, for a bare shape."""
        from qkv_engine.text.tokenizer import Tokenizer

        if self.folder is None:
            raise ConfigError("a shape has no tokenizer to ask questions with", field=field, value=None)
        return Tokenizer.from_folder(self.folder)


def read_model(args: argparse.Namespace, shape: str | None = None) -> ModelFiles:
    """A shape, a folder or a Hub model, of which only the small files are fetched."""
    load_torch()
    from qkv_engine.loading import demo_folder, with_weights
    from qkv_engine.models.loader import find_folder, read_config
    from qkv_engine.models.registry import config_from_hf
    from qkv_engine.models.shapes import SHAPES

    weights = getattr(args, "weights", None)
    if shape in SHAPES:
        return ModelFiles(with_weights(config_from_hf(SHAPES[shape]), weights), None)
    if args.model is None:
        folder = demo_folder()
    else:
        refuse_shape(args.model)
        folder = find_folder(args.model, revision=args.revision, weights=False, check=read_config)
    return ModelFiles(with_weights(read_config(folder), weights), folder)


def check_shape(args: argparse.Namespace) -> None:
    """Raises ``ConfigError`` for a ``--shape`` that is unknown, or beside MODEL."""
    if args.shape is None:
        return
    load_torch()
    from qkv_engine.models.shapes import SHAPES

    if args.model is not None:
        raise ConfigError("cannot be combined with MODEL", field="shape", value=args.shape)
    if args.shape not in SHAPES:
        remedy = f"Choose from {', '.join(SHAPES)}"
        raise ConfigError("unknown shape", field="shape", value=args.shape, remedy=remedy)


def check_ladders(args: argparse.Namespace, ladders: Iterable[KVConfig], shape: str | None = None) -> None:
    """Raises ``ConfigError`` for a ladder that does not fit the model, before any other is measured."""
    from qkv_engine.bench.sizing import make_ladder

    config = read_model(args, shape).config
    for kv in ladders:
        make_ladder(kv, config, config.dtype)


def weight_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype that ``--dtype`` means. Raises ``ConfigError`` for an unknown name."""
    from qkv_engine.models.loader import resolve_dtype

    return resolve_dtype(name, config, device)


def machine(args: argparse.Namespace) -> Machine:
    """The model that ``args`` name, the dtype of its weights and the device they ask for."""
    config = read_model(args, args.shape).config
    from qkv_engine.bench.sizing import Machine
    from qkv_engine.loading import resolve_device

    device = resolve_device(args.device or "auto")
    return Machine(config, weight_dtype(args.dtype or "auto", config, device), device, args.tensor_parallel or 1)


def bench_options(args: argparse.Namespace, num_tokens: int) -> dict[str, Any]:
    """Options of a benchmark's engines, whose longest request keeps KV of ``num_tokens`` tokens."""
    from qkv_engine.bench.batches import MAX, parse_requests

    # Repeats ask the same questions and random prompts share beginnings by chance: neither may profit from the other.
    options: dict[str, Any] = {"seed": args.seed, "prefix_caching": False}
    if args.max_model_len is None:
        options["max_model_len"] = num_tokens + 1
    if args.shape is not None:
        options |= {"model": args.shape, "load_format": "random"}
    if args.memory is not None or parse_requests(args.kv_memory) or MAX in (args.batch_sweep or ""):
        options["kv_memory"] = kv_nbytes(args, num_tokens)
    return options


def kv_nbytes(args: argparse.Namespace, num_tokens: int) -> int:
    """Bytes of KV memory that ``--memory`` or ``--kv-memory`` mean for requests of ``num_tokens`` tokens."""
    from qkv_engine.bench import sizing

    if args.memory is not None:
        args.options["kv_memory"] = args.options["memory"]  # which errors are to name
    return sizing.kv_nbytes(machine(args), args.memory, args.kv_memory, num_tokens)
