"""Start-up: loads model and tokenizer, allocates KV memory, starts the workers of other ranks, builds the core."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from qkv_engine.models.basis import calibrated_variances
from qkv_engine.models.checkpoint import weights_digest
from qkv_engine.models.ranks import ALONE
from qkv_engine.scheduler import Pace, Scheduler

from .config import BLOCK_TOKENS, EngineConfig
from .determinism import check_ladder
from .device.backend import StepLimits
from .device.cache import KVCache
from .device.cpu.thread_choice import ThreadChoice
from .device.gpu.warm_up import warm_up
from .device.host_disk import HostDisk
from .device.host_memory import allocate_host
from .device.layouts import Ladder
from .device.logits import CausalLM
from .device.memory import check_free, default_kv_memory, free_memory
from .device.runner import Runner
from .disk_tier import check_store, default_host_nbytes, describe, make_namespace, open_disk
from .errors import CapacityError, ConfigError
from .kv.host_tier import HostTier
from .kv.manager import KVManager
from .kv.prefix import PrefixCache, make_hints
from .kv.slabs import MAX_SLAB_BLOCKS
from .kv.table_rows import TableLayout
from .loading import enough_memory, find_source, load, make_backend, rank_ladder, resolve_device, step_threads
from .model_files import file_names, read_json_object
from .parallel.all_ranks import AllRanks
from .parallel.commands import Setup
from .serving.basis_watch import watch_bases
from .serving.core import EngineCore
from .sizes import format_least, format_size, parse_size
from .sleeping import Waker
from .started import Started
from .text.tokenizer import Tokenizer
from .validation import default_params, describe_defaults, eos_token_ids

if TYPE_CHECKING:
    from .parallel.worker_group import WorkerGroup

logger = logging.getLogger("qkv_engine")


def start(config: EngineConfig) -> Started:
    """Loads the model and allocates KV memory. Raises ``ConfigError``, ``ModelError`` or ``CapacityError``.

    An interrupt is raised again once all that was allocated is freed; a load under way ends within about a second.
    """
    device = resolve_device(config.device)
    workers = None if config.tensor_parallel == 1 else _start_workers(config, device)
    try:
        with enough_memory():
            return _start(config, device, workers)
    except BaseException:
        if workers is not None:
            workers.close()
        raise


def _start_workers(config: EngineConfig, device: torch.device) -> WorkerGroup:
    from .parallel.worker_group import WorkerGroup

    if device.type == "cuda" and (device.index or torch.cuda.device_count() < config.tensor_parallel):
        raise ConfigError(
            f"needs the first {config.tensor_parallel} GPUs, {torch.cuda.device_count()} are here",
            field="tensor_parallel",
            value=config.tensor_parallel,
            remedy="Lower it, or choose GPUs with CUDA_VISIBLE_DEVICES",
        )
    find_source(config, device, config.tensor_parallel)  # before several processes look for it at once
    return WorkerGroup(config, device)


def _start(config: EngineConfig, device: torch.device, workers: WorkerGroup | None) -> Started:
    ranks = ALONE if workers is None else workers.ranks
    loaded, dtype = load(config, device, ranks=ranks)
    model_config = loaded.config
    tokenizer = None if loaded.folder is None else _load_tokenizer(loaded.folder)
    generation = {} if loaded.folder is None else read_json_object(loaded.folder, "generation_config.json")
    eos_ids = frozenset(
        eos_token_ids(generation, model_config.eos_token_ids, tokenizer, vocab_size=model_config.vocab_size)
    )
    limit = config.max_model_len or model_config.max_position_embeddings
    ladder = rank_ladder(config.kv, model_config, ranks.size, dtype, limit)
    if config.deterministic:
        check_ladder(ladder)
    cache = KVCache(ladder, _kv_bytes(config, ladder, limit, device), device, limit, resizable=config.resizable)
    max_model_len = _fit_model_len(config, limit, cache)
    check_store(config, ladder)
    host_nbytes = _host_nbytes(config, cache, ranks.size)
    host = allocate_host(host_nbytes, device) if host_nbytes else None

    model_name = name_of_keys = loaded.name
    disk: HostDisk | None = None
    if config.kv_store is not None and host is not None:
        namespace = make_namespace(config, loaded, ladder, dtype)
        disk, name_of_keys = open_disk(config, namespace, host), namespace.digest().hex()

    def make_space() -> KVManager:  # lives as long as the engine, so it must not refer to the model
        is_free = disk is None or disk.settle()
        tier = HostTier(ladder.spec, host_nbytes, cache.arena.slab_nbytes) if host_nbytes and is_free else None
        hints = make_hints(cache.tables, tier, config.kv_quota)
        quota = config.kv_quota
        given = cache.tables, name_of_keys, tier, disk
        prefix = PrefixCache(*given, hints=hints, quota=quota) if config.prefix_caching else None
        return KVManager(cache.tables, prefix, quota, deterministic=config.deterministic)

    name = "demo" if config.model is None else model_name
    scheduler = Scheduler(
        make_space(),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        pace=None if config.max_itl_ms is None else Pace(config.max_itl_ms / 1000),
        takes_turns=True,
        deterministic=config.deterministic,
    )
    layout = TableLayout.of(cache.tables, config.max_num_seqs, max_model_len)
    model = cast(CausalLM, loaded.model)
    backend = make_backend(model, cache.backing, layout, ladder, config.cuda_graphs, host, config.deterministic)
    threads = step_threads(config, model_config, dtype, device, ranks.size)
    if workers is not None:
        threads = ThreadChoice(max(1, threads.number // ranks.size), reason=threads.reason)  # the same on all ranks
        workers.replies()  # their weights are loaded
        workers.set_up(Setup(cache.nbytes, cache.arena.hole.chunk_nbytes, host_nbytes, layout, threads.number))
        backend = AllRanks(workers, backend)
    runner = Runner(cache, backend, layout, host)
    if device.type == "cuda":
        warm_up(runner)
    limits = StepLimits(config.max_num_seqs, max_model_len, config.max_num_batched_tokens)
    captured = backend.capture(limits) if config.warm_up == "full" else None
    basis_watch = watch_bases(cache, calibrated_variances(loaded.model))
    core = EngineCore(
        scheduler,
        runner,
        tokenizer,
        eos_ids,
        make_space,
        runs_ahead=device.type == "cuda",
        basis_watch=basis_watch,
        disk=disk,
    )
    summary = _summarize(name, device, dtype, cache, max_model_len, host_nbytes, ranks.size)
    if disk is not None:
        summary.append(describe(config, disk))
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
        _waker(config, device, layout, limits, loaded.folder),
        disk,
        workers,
    )


def _waker(
    config: EngineConfig,
    device: torch.device,
    layout: TableLayout,
    limits: StepLimits,
    folder: Path | None,
) -> Waker:
    """What wakes the engine: of a model from the Hub the files that were found now."""
    if folder is not None:
        config = replace(config, model=folder)
    digest = None if folder is None or config.load_format == "random" else weights_digest(folder)
    return Waker(config, device, layout, limits, folder, digest)


def _load_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer; without any tokenizer file the engine takes and gives token ids alone."""
    if not any("token" in name for name in file_names(folder)):
        logger.warning("%s has no tokenizer: prompts must be token ids, and outputs have no text", folder)
        return None
    return Tokenizer.from_folder(folder)


def most_nbytes(ladder: Ladder, num_requests: int, num_tokens: int, chunk_tokens: int) -> int:
    """KV memory that ``num_requests`` of ``num_tokens`` each could ever use, all on the widest rung.

    ``chunk_tokens``: of the longest step, whose blocks layers with a window hold beside those that are in sight.
    """
    number = 0
    for group in ladder.groups:
        blocks = -(-num_tokens // BLOCK_TOKENS)
        if group.visible is not None:
            blocks = min(blocks, group.spec.most_visible + -(-chunk_tokens // BLOCK_TOKENS))
        # One block more each: the scheduler admits a request only with one to spare for every running one. Beyond their
        # blocks: the reserve, at most two slabs, and what a slab of each kind of slot leaves free.
        sizes = {size for slot in group.slots for size in slot.sizes}
        spare = MAX_SLAB_BLOCKS * (2 * (len(group.rungs) > 1) + len(sizes))
        number += (num_requests * (blocks + 1) + spare) * group.widest.block_nbytes
        number += num_requests * sum(slot.nbytes for slot in group.slots)
    if len(ladder.groups) > 1:  # dense blocks of one group lie in slabs
        number += 2 * MAX_SLAB_BLOCKS * max(group.widest.block_nbytes for group in ladder.groups)
    return number


def _kv_bytes(config: EngineConfig, ladder: Ladder, limit: int, device: torch.device) -> int:
    if config.kv_memory is None:
        most = most_nbytes(ladder, config.max_num_seqs, limit, config.max_num_batched_tokens)
        return default_kv_memory(device, most, graphs=config.cuda_graphs)
    free = free_memory(device)
    nbytes = parse_size(config.kv_memory, field="kv_memory", free=free)
    field, value = ("kv_memory", config.kv_memory) if config.fit is None else ("memory", config.fit.memory)
    check_free(nbytes, free, device, field=field, value=value)
    return nbytes


def _host_nbytes(config: EngineConfig, cache: KVCache, num_ranks: int) -> int:
    """Host memory of each rank; 0 for none.

    Raises ``CapacityError``, and ``ConfigError`` for a ladder whose blocks are never shared, or for states.
    """
    size, host = config.host_memory, torch.device("cpu")
    if size is None and config.kv_store is None:
        return 0
    if not cache.ladder.spec.can_share:
        message, remedy = f"is for cached prefixes, and {cache.ladder.name} caches none", "Leave host_memory or kv out"
        raise ConfigError(message, field="host_memory", value=size, remedy=remedy)
    if cache.ladder.spec.has_states:
        message, remedy = "is for blocks alone, and prefixes of this model need states, too", "Leave host_memory out"
        raise ConfigError(message, field="host_memory", value=size, remedy=remedy)
    free = free_memory(host) - (cache.nbytes * num_ranks if cache.memory.is_cpu else 0)  # not touched so far
    if size is None:
        size = max(cache.arena.slab_nbytes, default_host_nbytes(free, cache.nbytes))
    nbytes = parse_size(size, field="host_memory", free=max(1, free))
    check_free(nbytes, free, host, field="host_memory", value=size)
    least = cache.arena.slab_nbytes * num_ranks
    if nbytes < least:
        remedy = f"Give at least {format_least(least)}"
        raise CapacityError("no room for blocks of each rung", field="host_memory", value=size, remedy=remedy)
    return nbytes // num_ranks


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


def _summarize(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    cache: KVCache,
    max_model_len: int,
    host_nbytes: int,
    num_ranks: int,
) -> list[str]:
    ladder, (wide, narrow) = cache.ladder, cache.capacity
    at_floor = f", {narrow:,} at the floor ({ladder.names[-1]})" if ladder.last else ""
    concurrency = cache.tables.max_requests(max_model_len, ladder.last)
    lines = [
        f"Model {name} on {device} in {str(dtype).removeprefix('torch.')}",
        f"KV memory {format_size(cache.nbytes)} ({ladder.name}): {wide:,} tokens at {ladder.widest.bits:g} bits"
        f"{at_floor}; "
        f"at most {concurrency:,} request{'' if concurrency == 1 else 's'} of {max_model_len:,} tokens",
    ]
    if host_nbytes:
        wide, narrow = (host_nbytes // ladder.block_nbytes(rung) * BLOCK_TOKENS for rung in (0, ladder.last))
        at_floor = f", {narrow:,} at the floor" if ladder.last else ""
        lines.append(f"Host memory {format_size(host_nbytes * num_ranks)}: {wide:,} tokens of prefixes{at_floor}")
    return lines
