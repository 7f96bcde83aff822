"""Spectral KV on a GPU: random bases change no log-probability, and graphs no token, on any rung."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

import pytest

from qkv_engine import KVConfig, RungConfig
from qkv_engine.config import DENSE16, BasesFile
from qkv_engine.device.gpu.steps import DecodeShape
from qkv_engine.fingerprint import ModelFingerprint
from qkv_engine.models.bases import bases_bytes
from qkv_engine.models.checkpoint import weights_digest
from qkv_engine.models.loader import find_model

from ..engine import test_gpu_steps
from ..models.test_bases import random_bases
from .test_families import BOUND, ERROR_RATIO, LEAST_ERROR, ROOM, differences, generate, save, under_pressure

pytestmark = pytest.mark.gpu

FAMILIES = ("Gemma3", "GptOss", "Olmo2", "Phi3", "Qwen3Moe")
DENSE32 = RungConfig("dense32", "dense32", "dense32")
WIDE = tuple(RungConfig(f"int{bits}", *(f"int{bits}-channel-128",) * 2) for bits in (8, 4))
SPECTRAL = RungConfig("spectral", "graded-32x4-16x2", "graded-48x4")


def ladder(folder: Path, *rungs: RungConfig, eager: bool = False) -> KVConfig:
    """A ladder in random bases of the model in ``folder``."""
    config, path = find_model(str(folder)).config, folder / "x.bases.safetensors"
    data = bases_bytes(random_bases(config), ModelFingerprint.of("random", config, weights_digest(folder)))
    path.write_bytes(data)
    bases = BasesFile(str(path), hashlib.sha256(data).hexdigest())
    return KVConfig(name="spectral", rungs=rungs, sink=32, eager=eager, bases=bases)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_the_cpus_without_bases(
    family: str, tmp_path: Path, report: list[str], device: str = "cuda"
) -> None:
    folder = save(family, tmp_path)
    kv = ladder(folder, DENSE32)
    for memory, warm_up in ((ROOM, "lazy"), (under_pressure(folder, 4), "full")):
        outputs, _ = generate(folder, device, kv, memory, warm_up=warm_up)
        gaps, errors = differences(folder, outputs)
        report.append(f"{family} in bases, {warm_up}: log-probabilities differ by at most {max(errors):.1e}")
        assert max(errors) <= BOUND and max(gaps) <= 2 * BOUND


@pytest.mark.parametrize("family", FAMILIES)
def test_stepping_down_costs_what_it_costs_the_cpu(
    family: str, tmp_path: Path, report: list[str], device: str = "cuda"
) -> None:
    folder = save(family, tmp_path)
    kv, found = ladder(folder, DENSE16, *WIDE, SPECTRAL, eager=True), {}
    for name, where, options in (("cpu", "cpu", {}), ("lazy", device, {}), ("full", device, {"warm_up": "full"})):
        outputs, stats = generate(folder, where, kv, under_pressure(folder, 2), **options)
        assert stats.num_demotions
        errors = differences(folder, outputs)[1]
        found[name] = sum(errors) / len(errors)
    report.append(f"{family} in bases under pressure: " + ", ".join(f"{name} {x:.4f}" for name, x in found.items()))
    assert max(found.values()) <= ERROR_RATIO * found["cpu"] + LEAST_ERROR


@pytest.mark.parametrize("memory", ["1GiB", "9MiB"])
def test_graphs_do_not_change_tokens(memory: str, tmp_path: Path, device: str = "cuda") -> None:
    """A captured step pads the rows of a product, by which the library chooses its order of sums, so that values differ
    by some 1e-6 of themselves. Pages of 16 bits may round that to another bit, and tokens whose log-probabilities are
    .003 apart change places, on a CPU with such noise as well; with pages of float32 they do not.
    """
    folder = save("Olmo2", tmp_path)
    first = DENSE32 if memory == "1GiB" else DENSE16  # under pressure no two are so close
    kv = ladder(folder, first, *WIDE, SPECTRAL)
    options = {"kv": kv, "device": device, "max_model_len": 1024, "dtype": "float32"}
    options["kv_memory"] = memory if memory == "1GiB" else under_pressure(folder, 1)
    serve = partial(test_gpu_steps.serve, test_gpu_steps.GREEDY, model=str(folder), seqs=8, **options)
    captured, core = serve()
    graphs = core.runner.backend.steps._graphs
    batches = {shape.batch for shape in graphs._graphs if isinstance(shape, DecodeShape)}
    assert graphs._works and len(batches) >= 3
    assert memory == "1GiB" or core.runner.cache.tables.store.num_demotions
    plain, _ = serve(cuda_graphs=False)
    assert captured == plain
