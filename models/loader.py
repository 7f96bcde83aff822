"""Model loading from a folder, a Hub name or a named shape: check everything, allocate, fill, pack.

Reads configurations and safetensors only. No remote code, no pickle, no tokenizer.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from qkv_engine.errors import CapacityError, ConfigError, ModelError
from qkv_engine.kernels.linear import pack_steadily, pack_weight
from qkv_engine.model_files import file_names, has_file, read_json

from . import hub
from .checkpoint import TENSOR_DTYPES, Checkpoint
from .config import DTYPES, ModelConfig
from .layers import CheckpointRows, Layer
from .llama import LlamaForCausalLM
from .progress import progress
from .random_weights import fill_randomly
from .ranks import ALONE, Ranks
from .registry import build_model, config_from_hf
from .rows import fill_rows, full_name, rows_nbytes
from .shapes import SHAPES
from .weights.experts import check_routers, is_plain_stack
from .weights.format import format_nbytes
from .weights.loading import (
    UNUSED,
    check_quantized,
    load_quantized,
    quantized_layers,
    quantized_matrices,
    quantized_nbytes,
    zero_biases,
)
from .weights.scheme import UNQUANTIZED

logger = logging.getLogger("qkv_engine")

LOAD_FORMATS = ("auto", "random")
_NEEDS_SAFETENSORS = "Pass the folder of the original model: config.json and its safetensors files are needed"


@dataclass(frozen=True)
class ModelSource:
    """A model whose configuration has been read, not its weights. ``folder`` is ``None`` for a named shape."""

    name: str
    config: ModelConfig
    folder: Path | None


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device in its dtype. ``folder`` has its tokenizer and generation_config, if any."""

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
    source = find_model(model, load_format=load_format, revision=revision, token=token)
    weight_dtype = resolve_dtype(dtype, source.config, device)
    return load_weights(source, dtype=weight_dtype, device=device, load_format=load_format, seed=seed)


def find_model(
    model: str,
    *,
    load_format: str = "auto",
    revision: str | None = None,
    token: str | None = None,
    check: Callable[[ModelConfig], object] = lambda config: None,
) -> ModelSource:
    """The configuration of a model; a model on the Hub is downloaded with all its files. See ``load_model``.

    ``check`` may refuse the configuration before weights are downloaded. Raises ``ConfigError`` for a bad option,
    ``ModelError`` for a model that is not there or not supported, and whatever ``check`` raises.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError("unknown", field="load_format", value=load_format, remedy="Use auto or random")
    is_random = load_format == "random"
    if is_random and model in SHAPES:
        config = config_from_hf(SHAPES[model])
        check(config)
        return ModelSource(model, config, None)
    folder = find_folder(
        model, revision=revision, token=token, weights=not is_random, check=lambda folder: check(read_config(folder))
    )
    config = read_config(folder)
    if is_random:
        config = replace(config, weights=UNQUANTIZED)  # codes of a checkpoint are not made up
    check(config)
    return ModelSource(model, config, folder)


def load_weights(
    source: ModelSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    stopped: Callable[[], bool] = lambda: False,
    prepare: Callable[[nn.Module], object] = lambda net: None,
    pack: bool = True,
    is_steady: bool = False,
    ranks: Ranks = ALONE,
) -> LoadedModel:
    """The model of ``source`` on ``device``: filled from its checkpoint, or with seeded random weights; then packed.

    ``prepare`` may change the weights before they are packed. Without ``pack`` they stay plain matrices, which
    gradients need. ``is_steady``: products give a row the same bits whatever rows are beside it, on the CPU as long as
    they are computed with as many threads as the caller has. ``stopped`` is asked a few times a second. Of split
    weights only the part of ``ranks`` is made or read.
    Raises ``ModelError`` for a checkpoint that does not fit the configuration, ``CapacityError`` if the device has too
    little memory, and ``concurrent.futures.CancelledError`` once ``stopped`` returns true.
    """
    unpack = not pack or is_unpacked(device)
    net: nn.Module
    if load_format == "random":
        net = build_model(source.config, ranks)
        _materialize(net, dtype, device, unpack)
        split = {parts[0].parameter for parts in expected_tensors(net, source.config).values() if _is_split(parts)}
        fill_randomly(net, device, dtype, seed=seed, rank=ranks.rank, split=split, stopped=stopped)
    else:
        assert source.folder is not None, "only random weights have no folder"
        net = _load_checkpoint(source.folder, source.config, dtype, device, stopped, ranks, unpack)
    if unpack and pack and any(quantized_layers(net)):
        logger.info("%s weights are unpacked: %s multiplies floats faster", source.config.weights.name, device)
    prepare(net)
    for module in net.modules():
        if pack and isinstance(module, Layer):
            _go_on_unless(stopped)
            module.pack(pack_steadily if is_steady else pack_weight)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of what weights were made from: the memory that is free then is KV's
    return LoadedModel(net.eval(), source.config, source.folder, source.name)


def read_config(folder: Path) -> ModelConfig:
    """``folder/config.json`` as a ``ModelConfig``. Raises ``ModelError`` for any fault in it."""
    if not has_file(folder, "config.json"):
        gguf = next((name for name in file_names(folder) if name.endswith(".gguf")), None)
        why = "" if gguf is None else f", but {gguf}: GGUF files are not read"
        raise ModelError(f"{folder} has no config.json{why}", remedy=_NEEDS_SAFETENSORS)
    return config_from_hf(read_json(folder, "config.json"))


@lru_cache(maxsize=16)
def num_parameters(config: ModelConfig) -> int:
    """Elements of all checkpoint tensors, a tied output embedding counted once."""
    wanted = expected_tensors(build_model(replace(config, weights=UNQUANTIZED)), config)
    return sum(math.prod(parts[0].shape) for parts in wanted.values())


def is_unpacked(device: torch.device) -> bool:
    """Whether quantized weights are unpacked on ``device`` when they are loaded.

    On a CPU torch's products of codes are slower than those of floats.
    """
    return device.type == "cpu"


def kept_config(config: ModelConfig, device: torch.device | None) -> ModelConfig:
    """The configuration of the weights that ``device`` keeps; without a device none is unpacked."""
    return config if device is None or not is_unpacked(device) else replace(config, weights=UNQUANTIZED)


@lru_cache(maxsize=16)
def weights_nbytes(
    config: ModelConfig, dtype: torch.dtype, num_ranks: int = 1, device: torch.device | None = None
) -> int:
    """Bytes of a rank's weights of a model in ``dtype`` as ``device`` keeps them; a tied output embedding counts once.

    Without a device no weight is unpacked.
    """
    config = kept_config(config, device)
    net = build_model(config, Ranks(0, num_ranks))
    return sum(module.weight_nbytes(dtype) for _, module in layers_with_weights(net, config))


def load_nbytes(config: ModelConfig, dtype: torch.dtype, device: torch.device, num_ranks: int = 1) -> int:
    """The most bytes of a rank's ``device`` in use while the weights are loaded.

    On the CPU a packed copy of the output embedding, the largest matrix, comes on top: during packing, and for life
    where the input embedding shares the matrix. Where codes are kept, experts that a plain checkpoint has in one tensor
    are plain before they are quantized, a layer's matrix at a time.
    """
    packed = config.vocab_size * config.hidden_size if device.type == "cpu" else 0
    stack = _largest_stack(kept_config(config, device), num_ranks)
    return weights_nbytes(config, dtype, num_ranks, device) + (packed + stack) * dtype.itemsize


@lru_cache(maxsize=16)
def _largest_stack(config: ModelConfig, num_ranks: int) -> int:
    """Elements of the largest matrix of experts that are in one plain tensor and to be quantized, 0 for none."""
    found = quantized_matrices(build_model(config, Ranks(0, num_ranks)))
    return max((math.prod(each.shape) for _, layer, each in found if is_plain_stack(layer, each)), default=0)


def expected_tensors(net: nn.Module, config: ModelConfig) -> dict[str, list[CheckpointRows]]:
    """Checkpoint names of an unpacked model with the targets of each. A tied output embedding has no tensor."""
    wanted: dict[str, list[CheckpointRows]] = {}
    for path, module in layers_with_weights(net, config):
        for part in module.checkpoint_rows():
            wanted.setdefault(full_name(path, part.name), []).append(part)
    return wanted


def layers_with_weights(net: nn.Module, config: ModelConfig) -> Iterator[tuple[str, Layer]]:
    """Paths and layers of a model, but for an output embedding that is the input's."""
    for path, module in net.named_modules():
        if isinstance(module, Layer) and not (path == "lm_head" and config.tie_word_embeddings):
            yield path, module


def find_folder(
    model: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    weights: bool = True,
    check: Callable[[Path], object],
) -> Path:
    """The local folder of a model; a Hub name ``org/name`` is downloaded, without ``weights`` only its small files.

    ``check`` sees a downloaded folder with nothing but ``config.json`` in it. A path that does not exist is never
    looked for on the Hub. Raises ``ModelError``, and whatever ``check`` raises.
    """
    # os.path answers False where pathlib raises: a name may be too long for a path, or contain a null.
    path = os.path.expanduser(model)
    if os.path.isdir(path):
        return Path(path)
    if os.path.exists(path):
        raise ModelError("is a file", field="model", value=model, remedy=_NEEDS_SAFETENSORS)
    if model in SHAPES:
        message = "is a shape without weights"
        raise ModelError(message, field="model", value=model, remedy='Pass load_format="random"')
    if not hub.REPO_ID.fullmatch(model):
        remedy = f"Pass a folder, a Hub name org/name, or for random weights one of {', '.join(SHAPES)}"
        raise ModelError("there is no such folder", field="model", value=model, remedy=remedy)
    return hub.download(model, revision=revision, token=token, weights=weights, check=check)


def resolve_dtype(dtype: str | torch.dtype, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The weights' dtype for an option. Raises ``ConfigError`` for an unknown one."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else config.dtype
    resolved = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if resolved not in DTYPES.values():
        raise ConfigError("unknown", field="dtype", value=dtype, remedy=f"Use auto, {', '.join(DTYPES)}")
    assert resolved is not None
    return resolved


def _materialize(net: nn.Module, dtype: torch.dtype, device: torch.device, unpack: bool) -> None:
    """Give every parameter of a meta model memory; parameters that are shared stay shared.

    Those whose weights are not plain have none unless they are to be unpacked.
    """
    coded = [] if unpack else list(quantized_matrices(net))
    later = {getattr(layer, matrix.attribute) for _, layer, matrix in coded}
    made: dict[Tensor, nn.Parameter] = {}
    try:
        for module in net.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter in later:
                    continue
                if parameter not in made:
                    is_wide = isinstance(module, Layer) and name in module.float32_parameters
                    kept = torch.float32 if is_wide else dtype
                    empty = torch.empty(parameter.shape, dtype=kept, device=device)
                    made[parameter] = nn.Parameter(empty, requires_grad=False)
                setattr(module, name, made[parameter])
    # torch reports a failed allocation as OutOfMemoryError on a GPU and as RuntimeError on the CPU.
    except RuntimeError as error:
        nbytes = sum(each.numel() for each in net.parameters() if each not in later) * dtype.itemsize
        nbytes += sum(format_nbytes(layer.format, *matrix.shape, dtype) for _, layer, matrix in coded)
        raise CapacityError(
            f"the weights need {nbytes / 2**30:.1f} GiB in {dtype}, more than {device} has free",
            remedy="Try dtype bfloat16" if dtype == torch.float32 else "Use a smaller model",
        ) from error


def _go_on_unless(stopped: Callable[[], bool]) -> None:
    if stopped():
        raise CancelledError


def _is_split(parts: list[CheckpointRows]) -> bool:
    """Whether other ranks hold other elements of the tensor that fills ``parts``."""
    here = sum(part.target.numel() for part in parts)
    return not parts[0].is_broadcast and here < math.prod(parts[0].shape)


def _load_checkpoint(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    stopped: Callable[[], bool],
    ranks: Ranks,
    unpack: bool,
) -> nn.Module:
    with Checkpoint(folder) as checkpoint:
        # No plain dtype takes less than a byte an element, no code less than half: these are not the config's files.
        most = 1 if config.weights == UNQUANTIZED else 2  # elements of a byte
        if num_parameters(config) > most * checkpoint.nbytes:
            raise ModelError(
                f"config.json describes {num_parameters(config):,} parameters, "
                f"but {', '.join(checkpoint.file_names[:3])} hold {checkpoint.nbytes:,} bytes in all"
            )
        if config.is_nested:
            checkpoint.take_text_part()
        net = build_model(config, ranks)
        if net.draft_prefix is not None:
            checkpoint.skip_drafts(net.draft_prefix)
        net.adapt(checkpoint.tensors.keys())
        _check_tensors(checkpoint, net, config)
        _materialize(net, dtype, device, unpack)
        targets = [(name, part) for name, parts in expected_tensors(net, config).items() for part in parts]
        with progress(quantized_nbytes(checkpoint, net) + rows_nbytes(checkpoint, targets)) as advance:
            load_quantized(checkpoint, net, dtype, device, unpack=unpack, advance=advance, stopped=stopped)
            fill_rows(checkpoint, targets, advance, stopped)
        if config.tie_word_embeddings and "lm_head.weight" in checkpoint.tensors:
            _check_tied(checkpoint, net.get_parameter("model.embed_tokens.weight"), stopped)
    for module in net.modules():
        if isinstance(module, Layer):
            module.convert()
    return net


def _check_tensors(checkpoint: Checkpoint, net: LlamaForCausalLM, config: ModelConfig) -> None:
    """Raises ``ModelError`` unless names, shapes and dtypes agree both ways; a tied output embedding may be stored."""
    check_routers(checkpoint, net)
    files, wanted = ", ".join(checkpoint.file_names[:3]), expected_tensors(net, config)
    missing = wanted.keys() - checkpoint.tensors.keys()
    if missing:
        raise ModelError(f"{files} lack {_some(missing)}, which config.json calls for")
    extra = checkpoint.tensors.keys() - wanted.keys() - check_quantized(checkpoint, net)
    extra = {name for name in extra if not net.ignores(name)}
    extra -= zero_biases(checkpoint, net, extra)
    if config.weights != UNQUANTIZED:
        extra = {name for name in extra if not name.endswith(UNUSED)}
    expected = {name: parts[0].shape for name, parts in wanted.items()}
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


def _check_tied(checkpoint: Checkpoint, table: Tensor, stopped: Callable[[], bool]) -> None:
    for start, end, piece in checkpoint.pieces("lm_head.weight"):
        _go_on_unless(stopped)
        if not torch.equal(table[start:end], piece.to(table.device, table.dtype)):
            raise ModelError("lm_head.weight differs from the embedding although tie_word_embeddings is true")


def _some(names: Iterable[str], limit: int = 3) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
