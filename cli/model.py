"""What can be known of a model before its weights are loaded: configuration, tokenizer, dtype."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from qkv_engine.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from qkv_engine.models.config import ModelConfig
    from qkv_engine.tokenizer import Tokenizer


class ModelFiles(NamedTuple):
    """The configuration of a model, and the folder it was read from; a bare shape has none."""

    config: ModelConfig
    folder: Path | None

    def tokenizer(self, field: str) -> Tokenizer:
        """The folder's tokenizer. Raises ``ConfigError``, naming the option that wants it, for a bare shape."""
        from qkv_engine.tokenizer import Tokenizer

        if self.folder is None:
            raise ConfigError("a shape has no tokenizer to ask questions with", field=field, value=None)
        return Tokenizer.from_folder(self.folder)


def read_model(args: argparse.Namespace, shape: str | None = None) -> ModelFiles:
    """A shape, a folder or a Hub model, of which only the small files are fetched."""
    from qkv_engine.models import hub
    from qkv_engine.models.config import ModelConfig
    from qkv_engine.models.loader import read_config
    from qkv_engine.models.shapes import SHAPES
    from qkv_engine.startup import demo_folder

    if shape in SHAPES:
        return ModelFiles(ModelConfig.from_hf(SHAPES[shape]), None)
    folder = demo_folder() if args.model is None else Path(args.model).expanduser()
    if not folder.is_dir():
        folder = hub.download(args.model, revision=args.revision, token=None, weights=False, check=read_config)
    return ModelFiles(read_config(folder), folder)


def weight_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """What ``--dtype`` stands for. Raises ``ConfigError`` for an unknown name."""
    import torch

    from qkv_engine.models.config import DTYPES

    if name == "auto":
        return torch.float32 if device.type == "cpu" else config.dtype
    if name not in DTYPES:
        raise ConfigError("unknown", field="dtype", value=name, remedy=f"Use auto, {', '.join(DTYPES)}")
    return DTYPES[name]
