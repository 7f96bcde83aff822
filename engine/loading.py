"""Finding, checking and loading a model: what start-up shares with the workers of other ranks, and with tools."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import torch
from torch import nn

from qkv_engine.models.bases import read_bases
from qkv_engine.models.basis import check_bases, fold_bases
from qkv_engine.models.checkpoint import weights_digest
from qkv_engine.models.config import ModelConfig
from qkv_engine.models.key_scale import fold_key_scale
from qkv_engine.models.loader import (
    LoadedModel,
    ModelSource,
    find_model,
    kept_config,
    load_nbytes,
    load_weights,
    resolve_dtype,
    weights_nbytes,
)
from qkv_engine.models.ranks import ALONE, Ranks
from qkv_engine.models.registry import build_model
from qkv_engine.models.weights.scheme import UNQUANTIZED, on_load_scheme

from .config import STATE_DTYPES, EngineConfig, KVConfig
from .determinism import check_deterministic
from .device.backend import Backend
from .device.cpu.backend import CpuBackend
from .device.cpu.thread_choice import ThreadChoice
from .device.cpu.threads import choose_threads, computing_with
from .device.host_memory import HostMemory
from .device.layouts import Ladder, group_layers, ladder_of_layers
from .device.logits import CausalLM
from .device.memory import free_memory, memory_or_error
from .device.resizable import KVMemory
from .errors import CapacityError, ConfigError, ModelError
from .kv.table_rows import TableLayout
from .layer_kv import MAX_GROUPS, kv_of_layers
from .own_thread import in_own_thread
from .sizes import format_size

logger = logging.getLogger("qkv_engine")


def demo_folder() -> Path:
    """The demo model inside the package."""
    return Path(str(files("qkv_engine") / "assets" / "demo"))


def enough_memory() -> AbstractContextManager[None]:
    """For all that a rank allocates at start: ``CapacityError`` where the system does not give it."""
    remedy = "Lower kv_memory, or use a smaller model"
    return memory_or_error("the system gives no more memory to start with", remedy=remedy)


def rank_ladder(
    kv: KVConfig, model: ModelConfig, num_ranks: int, dtype: torch.dtype, max_model_len: int | None = None
) -> Ladder:
    """The ladder of ``kv`` over the KV heads of one of ``num_ranks``, for a model that computes in ``dtype``.

    No request is longer than ``max_model_len``, by default the model's context. Raises ``ConfigError`` for a ladder
    that does not fit the model, and ``ModelError`` as ``check_groups``.
    """
    check_groups(model, max_model_len)
    if kv.state_dtype not in (None, STATE_DTYPES[0]) and not model.states:
        remedy = "Leave state_dtype out"
        raise ConfigError("the model keeps no states", field="state_dtype", value=kv.state_dtype, remedy=remedy)
    share = model.share(num_ranks)
    return ladder_of_layers(kv, kv_of_layers(share, max_model_len), dtype, share.states)


def make_backend(
    model: CausalLM,
    memory: KVMemory,
    layout: TableLayout,
    ladder: Ladder,
    cuda_graphs: bool,
    host: HostMemory | None = None,
    deterministic: bool = False,
) -> Backend:
    """The backend of the device on which ``memory`` is, over block tables of ``layout``.

    ``host``: memory for blocks that leave it. ``deterministic``: steps give a token the same bits whatever is beside
    it, if the model was loaded so.
    """
    if memory.tensor.is_cpu:
        return CpuBackend(model, memory.tensor, layout, ladder, memory.dig, host, deterministic)
    from .device.gpu.backend import GpuBackend  # needs Triton

    return GpuBackend(model, memory.tensor, layout, ladder, cuda_graphs, memory.dig, host, deterministic)


def load(
    config: EngineConfig, device: torch.device, *, pack: bool = True, ranks: Ranks = ALONE
) -> tuple[LoadedModel, torch.dtype]:
    """The loaded model and the dtype of its weights; checks come before weights are downloaded or read.

    Without ``pack`` the weights keep the layout that gradients need. Of split weights only the part of ``ranks`` is
    loaded.
    """
    source = find_source(config, device, ranks.size)
    context = config.max_model_len or source.config.max_position_embeddings
    source = replace(source, config=source.config.for_context(context))
    if config.max_model_len is not None and config.max_model_len > source.config.max_context:
        logger.warning(
            "max_model_len %d is beyond the %d tokens the model was made for", config.max_model_len,
            source.config.max_context,
        )  # fmt: skip
    prepare = _preparation(config, source)
    dtype = resolve_dtype(config.dtype, source.config, device)
    threads = None
    if config.deterministic and device.type == "cpu":  # products are tried as they will be computed
        threads = step_threads(config, source.config, dtype, device).number

    def read(stopped: Callable[[], bool]) -> LoadedModel:
        with computing_with(threads):
            return load_weights(
                source,
                dtype=dtype,
                device=device,
                load_format=config.load_format,
                seed=config.seed,
                stopped=stopped,
                prepare=prepare,
                pack=pack,
                is_steady=config.deterministic,
                ranks=ranks,
            )

    return in_own_thread(read), dtype


def step_threads(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, num_ranks: int = 1
) -> ThreadChoice:
    """The threads of one of ``num_ranks``, each of which computes with its part of them."""
    nbytes = weights_nbytes(model, dtype, num_ranks, device)
    return choose_threads(config.num_threads, nbytes, is_fixed=config.deterministic)


def _preparation(config: EngineConfig, source: ModelSource) -> Callable[[nn.Module], None]:
    """What the ladder does to the weights before they are packed, once it is known to be made for them."""
    kv, digest = config.kv, None
    if (
        kv.model is not None or kv.bases is not None
    ) and config.load_format != "random":  # random weights suit any plan
        assert source.folder is not None, "only random weights have no folder"
        digest = weights_digest(source.folder)
    if kv.model is not None and digest is not None:
        kv.model.check_weights(digest, kv.name)
    bases = None if kv.bases is None else read_bases(kv.bases, source.config, digest)

    def prepare(net: nn.Module) -> None:
        if kv.key_scale is not None:
            fold_key_scale(net, kv.key_scale)
        if bases is not None:
            fold_bases(net, bases)

    return prepare


def find_source(config: EngineConfig, device: torch.device, num_ranks: int) -> ModelSource:
    """The model of ``config``, downloaded if it is on the Hub, once it is known to fit options, ranks and device."""

    def check(model: ModelConfig) -> None:
        model = with_weights(model, config.weights)
        if config.kv.model is not None:
            config.kv.model.check_shape(model, config.kv.name)
        check_context(model, config.max_model_len, config.extend_context)
        model.check_ranks(num_ranks)
        check_deterministic(config, kept_config(model, device), device)
        check_groups(model, config.max_model_len)
        if config.kv.bases is not None:
            check_bases(build_model(kept_config(model, device)))
        check_weights_fit(model, resolve_dtype(config.dtype, model, device), device, num_ranks)

    source = find_checked(config, check)
    return replace(source, config=with_weights(source.config, config.weights))


def find_checked(config: EngineConfig, check: Callable[[ModelConfig], None]) -> ModelSource:
    """The model of ``config``, downloaded if it is on the Hub, once ``check`` has let its configuration pass."""
    return find_model(
        str(demo_folder()) if config.source is None else config.source,
        load_format=config.load_format,
        revision=config.revision,
        token=config.token,
        check=check,
    )


def with_weights(model: ModelConfig, weights: str | None) -> ModelConfig:
    """The model with linear layers and experts quantized while they are read, ``None``: as the checkpoint has them.

    Raises ``ConfigError`` if the checkpoint is quantized itself.
    """
    if weights is None:
        return model
    if model.weights != UNQUANTIZED:
        why = f"the checkpoint is quantized itself ({model.weights.name})"
        raise ConfigError(why, field="weights", value=weights, remedy="Leave weights out")
    return replace(model, weights=on_load_scheme(weights))


def check_groups(model: ModelConfig, max_model_len: int | None) -> None:
    """Raises ``ModelError`` for a model with more kinds of layers than there may be groups."""
    number = len(group_layers(kv_of_layers(model, max_model_len)))
    if number > MAX_GROUPS:
        message = f"layers with {number} different windows, numbers or sizes of heads; at most {MAX_GROUPS} may differ"
        raise ModelError(message, field="architecture", value=model.architecture)


def check_context(
    model: ModelConfig, context: int | None, extend_context: bool = False, *, field: str = "max_model_len"
) -> None:
    """Raises ``ConfigError`` if the ``context`` that an option asks for is more than the model was made for.

    Not where ``extend_context`` allows it.
    """
    if context is not None and context > model.max_context and not extend_context:
        raise ConfigError(
            f"the model was made for {model.max_context} tokens",
            field=field,
            value=context,
            remedy=f"Use at most {model.max_context}, or ask for a longer context with extend_context",
        )


def check_weights_fit(model: ModelConfig, dtype: torch.dtype, device: torch.device, num_ranks: int = 1) -> None:
    """Raises ``CapacityError`` if loading a model's weights in ``dtype`` needs more memory than ``device`` has free."""
    need, free = load_nbytes(model, dtype, device, num_ranks), free_memory(device)
    if need <= free:
        return
    remedy = "Try dtype bfloat16" if dtype == torch.float32 else "Use a smaller model"
    raise CapacityError(
        f"loading the weights takes {format_size(need)} in {str(dtype).removeprefix('torch.')}, "
        f"{format_size(free)} are free on {device}",
        remedy=remedy,
    )


def resolve_device(name: str) -> torch.device:
    """The device called ``name``; "auto" is the first GPU, or the CPU where there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    remedy = 'Use "auto", "cpu", "cuda" or "cuda:N"'
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError("unknown device", field="device", value=name, remedy=remedy) from error
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index is not None):
        raise ConfigError("unsupported device", field="device", value=name, remedy=remedy)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError("no such GPU here", field="device", value=name, remedy=remedy)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device
