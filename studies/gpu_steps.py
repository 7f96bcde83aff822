"""Decode steps and prompts of known shapes with random weights, beside the least time that bytes and products need.

What ``studies/gpu_check.py`` is made of. On a CPU with the demo shape it says nothing of speed, but runs.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from qkv_engine import Engine, KVConfig, RungConfig, SamplingParams
from qkv_engine.bench.filled import FilledEngine, spread_prompts
from qkv_engine.bench.roofline import FLOPS, Weights, count_weights, limit_seconds
from qkv_engine.bench.sizing import largest_batch, make_ladder
from qkv_engine.config import BLOCK_TOKENS, DENSE16, BasesFile, EngineConfig
from qkv_engine.fingerprint import ModelFingerprint
from qkv_engine.loading import with_weights
from qkv_engine.models.bases import LayerBases, bases_bytes
from qkv_engine.models.config import ModelConfig
from qkv_engine.models.registry import config_from_hf
from qkv_engine.models.shapes import SHAPES
from qkv_engine.presets import resolve_kv
from qkv_engine.sizes import parse_size

WARMUP_STEPS, WINDOWS, WINDOW_STEPS = 24, 5, 8  # recurring launches are captured; the median window counts
NUM_STEPS = WARMUP_STEPS + WINDOWS * WINDOW_STEPS
FIRST_ROUNDS, ROUNDS = 4, 10  # prompts of a length: some kernels are compiled, and steps captured, by the first ones
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Machine:
    """Where parts run. ``is_tiny``: with the demo shape, few requests and short contexts, to try the parts alone."""

    device: str = "cuda"
    is_tiny: bool = False

    def shape(self, name: str) -> str:
        return "demo" if self.is_tiny else name

    def config(self, name: str) -> ModelConfig:
        return config_from_hf(SHAPES[self.shape(name)])

    def tokens(self, number: int) -> int:
        return min(number, 512) if self.is_tiny else number

    def requests(self, number: int) -> int:
        return min(number, 2) if self.is_tiny else number

    def memory(self, size: str, tiny: str = "96MiB") -> str:
        return tiny if self.is_tiny else size


class Step(NamedTuple):
    """A decode step of ``batch`` requests: its seconds, and the least that its bytes and products need."""

    batch: int
    seconds: float
    limit: float

    @property
    def tokens_a_second(self) -> float:
        return self.batch / self.seconds


def steps(
    machine: Machine,
    shape: str,
    kv: KVConfig | str,
    batches: Sequence[int | None],
    context: int,
    *,
    memory: str,
    weights: str | None = None,
    deterministic: bool = False,
) -> Iterator[Step]:
    """A step at each of ``batches``, None the largest, near ``context`` tokens.

    KV has what weights leave of ``memory``.
    """
    ladder, config = resolve_kv(kv) if isinstance(kv, str) else kv, machine.config(shape)
    context = machine.tokens(context)
    held = count_weights(with_weights(config, weights), DTYPE, torch.device(machine.device)).nbytes
    nbytes = parse_size(machine.memory(memory), field="memory", free=0) - held
    largest = machine.requests(largest_batch(make_ladder(ladder, config, DTYPE), nbytes, context))
    sizes = [largest if batch is None else machine.requests(batch) for batch in batches]
    options = EngineConfig(
        model=machine.shape(shape),
        load_format="random",
        kv=ladder,
        kv_memory=nbytes,
        weights=weights,
        prefix_caching=False,
        deterministic=deterministic,
        dtype="bfloat16",
        device=machine.device,
        max_model_len=context,
        max_num_seqs=max(sizes),
        max_num_batched_tokens=max(2048, *sizes),
    )
    with FilledEngine(options) as engine:
        counted = count_weights(engine.started.config, engine.started.dtype, engine.started.device)
        for batch in sizes:
            yield _step(engine, batch, context, counted)


def _step(engine: FilledEngine, batch: int, context: int, weights: Weights) -> Step:
    longest = context - 1 - NUM_STEPS
    engine.begin(spread_prompts(batch, longest - BLOCK_TOKENS // 2, longest), context)
    engine.seconds_per_step(WARMUP_STEPS)
    seconds = median(engine.seconds_per_step(WINDOW_STEPS) for _ in range(WINDOWS))
    limit = limit_seconds(weights, batch, engine.kv_nbytes_read())
    engine.end()
    return Step(batch, seconds, limit)


def prompts(machine: Machine, shape: str, number: int, length: int, weights: str | None = None) -> tuple[float, float]:
    """Seconds of ``number`` prompts with a token each, and the least that products need. The second of two rounds."""
    length, number = machine.tokens(length), machine.requests(number)
    most = max(2048, min(number * length, 16_384))
    with plain_engine(machine, shape, length, weights=weights, max_num_batched_tokens=most) as engine:
        seconds = min(
            ask(engine, [random_ids(engine.vocab_size, length, index) for index in range(number)]) for _ in range(2)
        )
    config = machine.config(shape)
    counted = count_weights(config, DTYPE)
    # Of each prompt the last row alone is multiplied by the output embedding.
    multiplied = counted.multiplied - config.vocab_size * config.hidden_size
    return seconds, 2 * multiplied * number * length / FLOPS


def first_tokens(machine: Machine, shape: str, lengths: Sequence[int]) -> Iterator[tuple[int, float]]:
    """Each of ``lengths`` with the seconds to the first token of such a prompt alone, once its steps are captured."""
    with plain_engine(machine, shape, machine.tokens(8192)) as engine:
        for length in map(machine.tokens, lengths):
            prompts = [[random_ids(engine.vocab_size, length, index)] for index in range(FIRST_ROUNDS + ROUNDS)]
            yield length, median([ask(engine, prompt) for prompt in prompts][FIRST_ROUNDS:])


def plain_engine(machine: Machine, shape: str, length: int, **options: Any) -> Engine:
    """An engine in 16 bits for prompts of up to ``length`` tokens with a token each, without prefix caching."""
    return Engine(
        model=machine.shape(shape),
        load_format="random",
        kv="bf16",
        dtype="bfloat16",
        device=machine.device,
        kv_memory=machine.memory("30GiB"),
        prefix_caching=False,
        max_model_len=length + 1,
        **options,
    )


def ask(engine: Engine, ids: list[list[int]]) -> float:
    """Seconds until each prompt has one token."""
    start = time.perf_counter()
    engine.generate(ids, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    return time.perf_counter() - start


def random_ids(vocab_size: int, length: int, seed: int) -> list[int]:
    """Token ids of a prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


def spectral(folder: Path, machine: Machine, shape: str, k: Sequence[str], v: Sequence[str], recent: int) -> KVConfig:
    """An eager ladder to graded sides in random orthogonal bases, whose file goes to ``folder``.

    Layers take the sides ``k`` and ``v`` by turns; the newest ``recent`` tokens stay dense.
    """
    config, generator = machine.config(shape), torch.Generator().manual_seed(0)

    def matrices(heads: int, size: int) -> torch.Tensor:
        rotated: torch.Tensor = torch.linalg.qr(torch.randn(heads, size, size, generator=generator))[0]
        return rotated.contiguous()

    sizes = [(spec.num_kv_heads, spec.head_dim) for spec in config.attention]
    bases = [LayerBases(matrices(*size), matrices(*size), torch.ones(size), torch.ones(size)) for size in sizes]
    data = bases_bytes(bases, ModelFingerprint.of(machine.shape(shape), config, None))
    path = folder / "random.bases.safetensors"
    path.write_bytes(data)
    file = BasesFile(str(path), hashlib.sha256(data).hexdigest())
    sides = (tuple(islice(cycle(names), len(sizes))) for names in (k, v))
    rungs = (DENSE16, RungConfig("spectral", *sides))
    return KVConfig(name="spectral", rungs=rungs, sink=32, recent=recent, eager=True, bases=file)


def without_bases(kv: KVConfig) -> KVConfig:
    """The same pages of channels as the model has them."""
    return replace(kv, bases=None)
