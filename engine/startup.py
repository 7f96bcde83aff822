"""Start-up: finds the device, loads model and tokenizer, allocates KV memory, and describes the result."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from qkv_engine.models.checkpoint import weights_digest
from qkv_engine.models.config import ModelConfig
from qkv_engine.models.files import file_names, read_json_object
from qkv_engine.models.key_scale import fold_key_scale
from qkv_engine.models.loader import LoadedModel, ModelSource, find_model, load_nbytes, load_weights, resolve_dtype
from qkv_engine.models.ranks import ALONE, Ranks
from qkv_engine.scheduler import Pace, Scheduler

from .config import BLOCK_TOKENS, EngineConfig, KVConfig
from .device.cache import KVCache
from .device.cpu.thread_choice import ThreadChoice
from .device.cpu.threads import choose_threads
from .device.gpu.warm_up import warm_up
from .device.layouts import Ladder, build_ladder
from .device.logits import CausalLM
from .device.memory import default_kv_memory, free_memory, memory_or_error
from .device.runner import Runner
from .errors import CapacityError, ConfigError
from .kv.manager import KVManager
from .kv.prefix import PrefixCache
from .kv.slabs import MAX_SLAB_BLOCKS
from .own_thread import in_own_thread
from .request import SamplingParams
from .serving.core import EngineCore
from .sizes import format_size, parse_size
from .text.tokenizer import Tokenizer
from .validation import default_params, describe_defaults, eos_token_ids

if TYPE_CHECKING:
    from .parallel.crew import Crew

logger = logging.getLogger("qkv_engine")


@dataclass(frozen=True)
class Started:
    """A core ready to run, and the facts about it that its callers need."""

    core: EngineCore
    name: str
    config: ModelConfig
    tokenizer: Tokenizer | None
    default_params: SamplingParams
    max_model_len: int
    device: torch.device
    dtype: torch.dtype
    ladder: Ladder
    threads: ThreadChoice  # CPU threads of the engine's own thread
    summary: list[str]
    crew: Crew | None = None  # the other ranks under tensor parallelism


def demo_folder() -> Path:
    """The demo model inside the package."""
    return Path(str(files("qkv_engine") / "assets" / "demo"))


def start(config: EngineConfig) -> Started:
    """Loads the model and allocates KV memory. Raises ``ConfigError``, ``ModelError`` or ``CapacityError``.

    An interrupt is raised again once all that was allocated is freed; a load under way ends within about a second.
    """
    device = resolve_device(config.device)
    crew = None if config.tensor_parallel == 1 else _start_crew(config, device)
    try:
        with enough_memory():
            return _start(config, device, crew)
    except BaseException:
        if crew is not None:
            crew.close()
        raise


def enough_memory() -> AbstractContextManager[None]:
    """For all that a rank allocates at start: ``CapacityError`` where the system does not give it."""
    remedy = "Lower kv_memory, or use a smaller model"
    return memory_or_error("the system gives no more memory to start with", remedy=remedy)


def _start_crew(config: EngineConfig, device: torch.device) -> Crew:
    from .parallel.crew import Crew

    if device.type == "cuda" and (device.index or torch.cuda.device_count() < config.tensor_parallel):
        raise ConfigError(
            f"needs the first {config.tensor_parallel} GPUs, {torch.cuda.device_count()} are here",
            field="tensor_parallel",
            value=config.tensor_parallel,
            remedy="Lower it, or choose GPUs with CUDA_VISIBLE_DEVICES",
        )
    find_source(config, device, config.tensor_parallel)  # before several processes look for it at once
    return Crew(config, device)


def _start(config: EngineConfig, device: torch.device, crew: Crew | None) -> Started:
    ranks = ALONE if crew is None else crew.ranks
    loaded, dtype = load(config, device, ranks=ranks)
    model_config = loaded.config
    tokenizer = None if loaded.folder is None else _load_tokenizer(loaded.folder)
    generation = {} if loaded.folder is None else read_json_object(loaded.folder, "generation_config.json")
    eos_ids = frozenset(
        eos_token_ids(generation, model_config.eos_token_ids, tokenizer, vocab_size=model_config.vocab_size)
    )
    ladder = rank_ladder(config.kv, model_config, ranks.size, dtype)
    limit = config.max_model_len or model_config.max_position_embeddings
    cache = KVCache(ladder, _kv_bytes(config, ladder, limit, device), device, cuda_graphs=config.cuda_graphs)
    max_model_len = _fit_model_len(config, limit, cache)

    def make_space() -> KVManager:
        prefix = PrefixCache(cache.tables, loaded.name) if config.prefix_caching else None
        return KVManager(cache.tables, prefix, config.kv_quota)

    name = "demo" if config.model is None else loaded.name
    scheduler = Scheduler(
        make_space(),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        pace=None if config.max_itl_ms is None else Pace(config.max_itl_ms / 1000),
    )
    runner = Runner(
        cast(CausalLM, loaded.model),
        cache,
        device,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        cuda_graphs=config.cuda_graphs,
        crew=crew,
    )
    threads = choose_threads(config.num_threads, sum(weight.nbytes for weight in loaded.model.parameters()))
    if crew is not None:
        threads = ThreadChoice(max(1, threads.number // ranks.size), reason=threads.reason)  # the same on all ranks
        crew.replies()  # their weights are loaded
        crew.set_up(cache.nbytes, runner.layout, threads.number)
    if device.type == "cuda":
        warm_up(runner)
    captured = None
    if config.warm_up == "full":
        captured = runner.capture_all(config.max_num_seqs, max_model_len, config.max_num_batched_tokens)
    core = EngineCore(scheduler, runner, tokenizer, eos_ids, make_space, runs_ahead=device.type == "cuda")
    summary = _summarize(name, device, dtype, cache, max_model_len)
    if captured is not None:
        summary.append(
            f"{captured.number} steps captured in {captured.seconds:.1f} s, {format_size(captured.nbytes)} of memory"
        )
    applied = describe_defaults(generation)
    if applied:
        summary.append(f"Sampling defaults from generation_config.json: {applied}")
    for line in summary:
        logger.info(line)
    return Started(
        core,
        name,
        model_config,
        tokenizer,
        default_params(generation),
        max_model_len,
        device,
        dtype,
        ladder,
        threads,
        summary,
        crew,
    )


def rank_ladder(kv: KVConfig, model: ModelConfig, num_ranks: int, dtype: torch.dtype) -> Ladder:
    """The ladder of ``kv`` over the KV heads of one of ``num_ranks``, for a model that computes in ``dtype``."""
    return build_ladder(
        kv,
        num_layers=model.num_layers,
        num_kv_heads=model.share(num_ranks).num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
    )


def load(
    config: EngineConfig, device: torch.device, *, pack: bool = True, ranks: Ranks = ALONE
) -> tuple[LoadedModel, torch.dtype]:
    """The loaded model and the dtype of its weights; checks come before weights are downloaded or read.

    Without ``pack`` the weights keep the layout that gradients need. Of split weights only the part of ``ranks`` is
    loaded.
    """
    source = find_source(config, device, ranks.size)
    if config.max_model_len is not None and config.max_model_len > source.config.max_context:
        logger.warning(
            "max_model_len %d is beyond the %d tokens the model was made for", config.max_model_len,
            source.config.max_context,
        )  # fmt: skip
    if config.kv.model is not None and config.load_format != "random":  # random weights suit any plan
        assert source.folder is not None, "only random weights have no folder"
        config.kv.model.check_weights(weights_digest(source.folder), config.kv.name)
    dtype = resolve_dtype(config.dtype, source.config, device)
    loaded = in_own_thread(
        lambda stopped: load_weights(
            source,
            dtype=dtype,
            device=device,
            load_format=config.load_format,
            seed=config.seed,
            stopped=stopped,
            prepare=lambda net: None if config.kv.key_scale is None else fold_key_scale(net, config.kv.key_scale),
            pack=pack,
            ranks=ranks,
        )
    )
    return loaded, dtype


def find_source(config: EngineConfig, device: torch.device, num_ranks: int) -> ModelSource:
    """The model of ``config``, downloaded if it is on the Hub, once it is known to fit options, ranks and device."""

    def check(model: ModelConfig) -> None:
        if config.kv.model is not None:
            config.kv.model.check_shape(model, config.kv.name)
        check_context(model, config.max_model_len, config.extend_context)
        model.check_ranks(num_ranks)
        check_weights_fit(model, resolve_dtype(config.dtype, model, device), device, num_ranks)

    return find_model(
        str(demo_folder()) if config.source is None else config.source,
        load_format=config.load_format,
        revision=config.revision,
        token=config.token,
        check=check,
    )


def check_context(model: ModelConfig, max_model_len: int | None, extend_context: bool = False) -> None:
    """Raises ``ConfigError`` if ``max_model_len`` is more than the model was made for, unless ``extend_context``."""
    if max_model_len is not None and max_model_len > model.max_context and not extend_context:
        raise ConfigError(
            f"the model was made for {model.max_context} tokens",
            field="max_model_len",
            value=max_model_len,
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


def _load_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer; without any tokenizer file the engine takes and gives token ids alone."""
    if not any("token" in name for name in file_names(folder)):
        logger.warning("%s has no tokenizer: prompts must be token ids, and outputs have no text", folder)
        return None
    return Tokenizer.from_folder(folder)


def most_nbytes(ladder: Ladder, num_requests: int, num_tokens: int) -> int:
    """KV memory that ``num_requests`` of ``num_tokens`` each could ever use, all on the widest rung."""
    # One block more each: the scheduler admits a request only with one to spare for every running one.
    blocks = num_requests * (-(-num_tokens // BLOCK_TOKENS) + 1)
    # Beyond their blocks: the reserve, at most two slabs, and what a slab of each kind of slot leaves free.
    spare = MAX_SLAB_BLOCKS * (2 * (len(ladder.rungs) > 1) + len(ladder.slots))
    slots = num_requests * sum(slot.nbytes for slot in ladder.slots)
    return (blocks + spare) * ladder.widest.block_nbytes + slots


def _kv_bytes(config: EngineConfig, ladder: Ladder, limit: int, device: torch.device) -> int:
    free = free_memory(device)
    if config.kv_memory is None:
        return default_kv_memory(device, most_nbytes(ladder, config.max_num_seqs, limit), graphs=config.cuda_graphs)
    nbytes = parse_size(config.kv_memory, field="kv_memory", free=free)
    if nbytes > free:
        raise CapacityError(
            f"{format_size(nbytes)} asked for, {format_size(free)} free on {device}",
            field="kv_memory",
            value=config.kv_memory,
            remedy="Lower kv_memory",
        )
    return nbytes


def _fit_model_len(config: EngineConfig, limit: int, cache: KVCache) -> int:
    """Tokens of the longest request that fits alone on its floor. ``max_model_len`` must fit; the default is cut."""
    _, capacity = cache.capacity
    if limit <= capacity:
        return limit
    if config.max_model_len is not None:
        raise CapacityError(
            f"KV memory of {format_size(cache.nbytes)} holds {capacity} tokens",
            field="max_model_len",
            value=config.max_model_len,
            remedy=f"Raise kv_memory or set max_model_len to at most {capacity}",
        )
    logger.warning("max_model_len lowered from %d to %d, which is what KV memory holds", limit, capacity)
    return capacity


def _summarize(name: str, device: torch.device, dtype: torch.dtype, cache: KVCache, max_model_len: int) -> list[str]:
    ladder, (wide, narrow) = cache.ladder, cache.capacity
    at_floor = f", {narrow:,} at the floor ({ladder.narrowest.name})" if len(ladder.rungs) > 1 else ""
    concurrency = cache.tables.max_requests(max_model_len, len(ladder.rungs) - 1)
    return [
        f"Model {name} on {device} in {str(dtype).removeprefix('torch.')}",
        f"KV memory {format_size(cache.nbytes)} ({ladder.name}): {wide:,} tokens at {ladder.widest.bits:g} bits"
        f"{at_floor}; "
        f"at most {concurrency:,} request{'' if concurrency == 1 else 's'} of {max_model_len:,} tokens",
    ]
