"""From a folder, a Hub name or a shape to a model ready to run: check everything, allocate, fill, pack.

Reads configurations and safetensors only. No remote code, no pickle, no tokenizer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from qkv_engine.errors import ConfigError, ModelError

from . import hub
from .checkpoint import TENSOR_DTYPES, Checkpoint
from .config import DTYPES, ModelConfig
from .files import read_json
from .layers import Embedding, Layer, Linear, RMSNorm, Slot
from .registry import MODELS
from .shapes import SHAPES

LOAD_FORMATS = ("auto", "random")
_MAX_CONFIG_BYTES = 2**20
_RANDOM_STD = 0.02
# Written by old releases of transformers; computed from the config here.
_DERIVED_TENSOR = ".rotary_emb.inv_freq"
_PROGRESS_FROM_BYTES = 2**30


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device in its dtype. ``folder`` holds tokenizer and generation_config; ``None`` for a
    bare shape.
    """

    model: nn.Module
    config: ModelConfig
    folder: Path | None
    name: str


def load_model(
    model: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: torch.device,
    load_format: str = "auto",
    revision: str | None = None,
    token: str | None = None,
    seed: int = 0,
) -> LoadedModel:
    """Load a local folder, a Hub name ``org/name`` or, with ``load_format="random"``, a name in SHAPES.

    ``dtype`` "auto" is the checkpoint's on a GPU and float32 on the CPU. ``revision`` and ``token`` are for
    the Hub. "random" makes seeded weights on the device and reads no checkpoint. Raises ``ConfigError`` for a
    bad option and ``ModelError`` for everything wrong with the model; nothing is allocated before config and
    checkpoint agree.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError("unknown", field="load_format", value=load_format, remedy="Use auto or random")
    is_random = load_format == "random"
    if is_random and model in SHAPES:
        folder, config = None, ModelConfig.from_hf(SHAPES[model])
    else:
        folder = _find_folder(model, revision, token, weights=not is_random)
        config = read_config(folder)
    weight_dtype = _weight_dtype(dtype, config, device)
    if is_random:
        net = _build(config)
        _materialize(net, weight_dtype, device)
        _fill_randomly(net, torch.Generator(device).manual_seed(seed))
    else:
        assert folder is not None, "only random weights have no folder"
        net = _load_checkpoint(folder, config, weight_dtype, device)
    for module in net.modules():
        if isinstance(module, Layer):
            module.pack()
    return LoadedModel(net.eval(), config, folder, model)


def read_config(folder: Path) -> ModelConfig:
    """``folder/config.json`` as a ``ModelConfig``; ``ModelError`` for whatever is wrong with it."""
    return ModelConfig.from_hf(read_json(folder, "config.json", _MAX_CONFIG_BYTES))


def expected_tensors(net: nn.Module, config: ModelConfig) -> dict[str, Slot]:
    """Checkpoint names of an unpacked model, and where each tensor goes. A tied output embedding has no
    tensor.
    """
    slots: dict[str, Slot] = {}
    for path, module in net.named_modules():
        if not isinstance(module, (Linear, RMSNorm, Embedding)):
            continue
        if path == "lm_head" and config.tie_word_embeddings:
            continue
        parent = path.rpartition(".")[0]
        for slot in module.slots():
            slots[f"{parent}.{slot.name}" if parent else slot.name] = slot
    return slots


def _find_folder(model: str, revision: str | None, token: str | None, *, weights: bool) -> Path:
    # os.path answers False where pathlib raises: a name may be too long for a path, or contain a null.
    path = os.path.expanduser(model)
    if os.path.isdir(path):
        return Path(path)
    if os.path.exists(path):
        raise ModelError("is a file", field="model", value=model, remedy="Pass the folder with config.json")
    if model in SHAPES:
        message = "is a shape without weights"
        raise ModelError(message, field="model", value=model, remedy='Pass load_format="random"')
    if not hub.REPO_ID.fullmatch(model):
        remedy = f"Pass a folder, a Hub name org/name, or for random weights one of {', '.join(SHAPES)}"
        raise ModelError("there is no such folder", field="model", value=model, remedy=remedy)
    return hub.download(model, revision=revision, token=token, weights=weights, check=read_config)


def _weight_dtype(dtype: str | torch.dtype, config: ModelConfig, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else config.dtype
    resolved = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if resolved not in DTYPES.values():
        raise ConfigError("unknown", field="dtype", value=dtype, remedy=f"Use auto, {', '.join(DTYPES)}")
    assert resolved is not None
    return resolved


def _build(config: ModelConfig) -> nn.Module:
    """The model without memory: its parameters have shapes only."""
    with torch.device("meta"):
        return MODELS[config.architecture](config)


def _materialize(net: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give every parameter of a meta model memory; parameters that are shared stay shared."""
    made: dict[Tensor, nn.Parameter] = {}
    try:
        for module in net.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter not in made:
                    empty = torch.empty(parameter.shape, dtype=dtype, device=device)
                    made[parameter] = nn.Parameter(empty, requires_grad=False)
                setattr(module, name, made[parameter])
    # torch reports a failed allocation as OutOfMemoryError on a GPU and as RuntimeError on the CPU.
    except RuntimeError as error:
        gib = sum(parameter.numel() for parameter in net.parameters()) * dtype.itemsize / 2**30
        raise ModelError(f"the weights need {gib:.1f} GiB in {dtype}, more than {device} has free") from error


def _fill_randomly(net: nn.Module, generator: torch.Generator) -> None:
    norms = {module.weight for module in net.modules() if isinstance(module, RMSNorm)}
    for parameter in net.parameters():
        if parameter in norms:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, _RANDOM_STD, generator=generator)


def _load_checkpoint(folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
    with Checkpoint(folder) as checkpoint:
        # No supported dtype takes less than a byte an element: the config cannot belong to these files.
        if config.num_parameters > checkpoint.nbytes:
            raise ModelError(
                f"config.json describes {config.num_parameters:,} parameters, "
                f"but {', '.join(checkpoint.file_names[:3])} hold {checkpoint.nbytes:,} bytes in all"
            )
        net = _build(config)
        _check_tensors(checkpoint, expected_tensors(net, config), config)
        _materialize(net, dtype, device)
        _fill(checkpoint, expected_tensors(net, config))
        if config.tie_word_embeddings and "lm_head.weight" in checkpoint.tensors:
            _check_tied(checkpoint, net.get_parameter("model.embed_tokens.weight"))
    return net


def _check_tensors(checkpoint: Checkpoint, slots: dict[str, Slot], config: ModelConfig) -> None:
    """Names, shapes and dtypes must agree both ways; a tied output embedding may be stored as well."""
    files = ", ".join(checkpoint.file_names[:3])
    missing = slots.keys() - checkpoint.tensors.keys()
    if missing:
        raise ModelError(f"{files} lack {_some(missing)}, which config.json calls for")
    extra = {name for name in checkpoint.tensors.keys() - slots.keys() if not name.endswith(_DERIVED_TENSOR)}
    expected = {name: slot.shape for name, slot in slots.items()}
    if config.tie_word_embeddings and "lm_head.weight" in extra:
        extra.remove("lm_head.weight")
        expected["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    if extra:
        raise ModelError(f"{files} have {_some(extra)}, which {config.architecture} with this config.json has not")
    for name, shape in expected.items():
        stored = checkpoint.tensors[name]
        where = f"{stored.file_name}: tensor {name}"
        if stored.dtype not in TENSOR_DTYPES:
            raise ModelError(f"{where} is {stored.dtype}", remedy=f"Supported: {', '.join(TENSOR_DTYPES)}")
        if stored.shape != shape:
            raise ModelError(f"{where} has shape {list(stored.shape)}; config.json calls for {list(shape)}")


def _fill(checkpoint: Checkpoint, slots: dict[str, Slot]) -> None:
    with _progress(sum(checkpoint.tensors[name].nbytes for name in slots)) as advance:
        for name, slot in slots.items():
            target = slot.parameter[slot.start : slot.stop]
            for start, stop, piece in checkpoint.pieces(name):
                # A head norm's [D] fills every row; all other tensors have the target's rows.
                rows = target if piece.dim() < target.dim() else target[start:stop]
                rows.copy_(piece)
                advance(piece.nbytes)


def _check_tied(checkpoint: Checkpoint, table: Tensor) -> None:
    for start, stop, piece in checkpoint.pieces("lm_head.weight"):
        if not torch.equal(table[start:stop], piece.to(table.device, table.dtype)):
            raise ModelError("lm_head.weight differs from the embedding although tie_word_embeddings is true")


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr for long loads on a terminal; yields the function that advances it by bytes."""
    if total < _PROGRESS_FROM_BYTES or not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading weights", total=total)
        yield lambda nbytes: progress.advance(task, nbytes)


def _some(names: Iterable[str], limit: int = 3) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
