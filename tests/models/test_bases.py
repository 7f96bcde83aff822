"""Bases of K and V: the same logits and tokens as without them, and files that do not fit are refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qkv_engine import ConfigError, Engine, RungConfig, SamplingParams
from qkv_engine.config import BasesFile, EngineConfig, KVConfig
from qkv_engine.fingerprint import ModelFingerprint
from qkv_engine.kernels.rope_kv_write.key_basis import in_basis
from qkv_engine.loading import load
from qkv_engine.models.bases import LayerBases, bases_bytes, read_bases
from qkv_engine.models.basis import calibrated_variances, check_bases, fold_bases
from qkv_engine.models.checkpoint import weights_digest
from qkv_engine.models.config import ModelConfig
from qkv_engine.models.loader import ModelSource, find_model, load_weights
from qkv_engine.models.ranks import ALONE, Ranks
from qkv_engine.models.registry import build_model
from qkv_engine.models.weights.scheme import on_load_scheme

from .conftest import CPU, DenseBatch
from .test_families import FAMILY_CASES
from .test_ranks import on_ranks
from .tiny import write_tiny

OTHERS = ("Gemma4", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe")  # their attention is not projections alone
CASES = list({case[0]: case for case in FAMILY_CASES if case[0] not in OTHERS}.values())
REFUSED = "(?s)kv=.*bases.*{}.*Make it anew with qkv-engine plan"
DENSE = RungConfig("dense32", "dense32", "dense32")


def random_bases(config: ModelConfig) -> list[LayerBases]:
    """Orthogonal matrices whose rows are stretched by up to two, and falling variances."""
    generator = torch.Generator().manual_seed(0)

    def matrices(heads: int, size: int) -> Tensor:
        rotated = torch.linalg.qr(torch.randn(heads, size, size, generator=generator))[0]
        return (rotated * (1 + torch.rand(heads, size, 1, generator=generator))).contiguous()

    shapes = [(spec.num_kv_heads, spec.head_dim) for spec in config.attention]
    falling = [torch.rand(shape, generator=generator).sort(descending=True)[0] for shape in shapes]
    return [LayerBases(matrices(*shape), matrices(*shape), x, 2 * x) for shape, x in zip(shapes, falling, strict=True)]


def run(source: ModelSource, bases: list[LayerBases] | None, ranks: Ranks = ALONE) -> tuple[Tensor, DenseBatch]:
    """Logits of a text in two chunks, and what was cached."""

    def fold(net: torch.nn.Module) -> None:
        if bases is not None:
            fold_bases(net, bases)

    loaded = load_weights(source, dtype=torch.float32, device=CPU, ranks=ranks, prepare=fold)
    batch, ids, net = DenseBatch(source.config.share(ranks.size).attention), torch.arange(3, 93), loaded.model
    with torch.inference_mode():
        hidden = [net(ids[part], torch.arange(90)[part], batch) for part in (slice(0, 50), slice(50, 90))]
        return net.compute_logits(torch.cat(hidden)), batch


@pytest.mark.parametrize(("family", "changes"), CASES, ids=lambda each: each if isinstance(each, str) else "")
def test_logits_stay_the_same_and_the_cache_holds_coordinates(family, changes, make_reference, tmp_path):
    make_reference(family, **changes).save_pretrained(tmp_path)
    source = find_model(str(tmp_path))
    bases = random_bases(source.config)
    (plain, cached), (found, stored) = run(source, None), run(source, bases)
    assert float((found - plain).norm() / plain.norm()) < 1e-4 and torch.equal(found.argmax(-1), plain.argmax(-1))
    for layer, (k, v, *_) in enumerate(bases):
        torch.testing.assert_close(stored.keys[layer], in_basis(cached.keys[layer], k), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(stored.values[layer], in_basis(cached.values[layer], v), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_a_rank_has_the_matrices_of_its_heads(num_kv_heads, make_reference, tmp_path):
    make_reference("Qwen2", num_key_value_heads=num_kv_heads).save_pretrained(tmp_path)
    source = find_model(str(tmp_path))
    expected, _ = run(source, None)
    for logits in on_ranks(2, lambda ranks: run(source, random_bases(source.config), ranks)[0]):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_a_rank_has_the_variances_of_its_heads(num_kv_heads, make_reference, tmp_path):
    make_reference("Qwen2", num_key_value_heads=num_kv_heads).save_pretrained(tmp_path)
    source = find_model(str(tmp_path))
    bases = random_bases(source.config)

    def load_part(ranks: Ranks) -> Any:
        net = load_weights(
            source, dtype=torch.float32, device=CPU, ranks=ranks, prepare=lambda net: fold_bases(net, bases)
        ).model
        return calibrated_variances(net)

    for rank, found in enumerate(on_ranks(2, load_part)):
        head = slice(rank, rank + 1) if num_kv_heads == 2 else slice(1)
        for own, whole in zip(found, bases, strict=True):
            assert torch.equal(own[0], whole.k_variance[head]) and torch.equal(own[1], whole.v_variance[head])
    assert calibrated_variances(load_weights(source, dtype=torch.float32, device=CPU).model) is None


def test_models_that_take_no_bases_are_refused_before_their_weights_are_read(make_reference, tmp_path):
    make_reference("Gemma4").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"kv.*attention is not projections alone"):
        check_bases(build_model(find_model(str(tmp_path)).config))
    plain = find_model(str(write_tiny(tmp_path / "tiny"))).config
    check_bases(build_model(plain))
    with pytest.raises(ConfigError, match=r"kv.*weights of attention that are codes.*Use plain weights"):
        check_bases(build_model(replace(plain, weights=on_load_scheme("int8"))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("bases") / "model", num_key_value_heads=2)


@pytest.fixture(scope="module")
def config(folder: Path) -> ModelConfig:
    return find_model(str(folder)).config


def written(path: Path, data: bytes) -> BasesFile:
    path.write_bytes(data)
    return BasesFile(str(path), hashlib.sha256(data).hexdigest())


@pytest.fixture
def file(folder: Path, config: ModelConfig, tmp_path: Path) -> BasesFile:
    """The bases of the model in ``folder``."""
    model = ModelFingerprint.of("tiny", config, weights_digest(folder))
    return written(tmp_path / "x.bases.safetensors", bases_bytes(random_bases(config), model))


def test_a_file_is_read_as_it_was_written(file: BasesFile, config: ModelConfig, folder: Path):
    for found, expected in zip(read_bases(file, config, weights_digest(folder)), random_bases(config), strict=True):
        assert all(map(torch.equal, found, expected))


def changed_header(how: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        how(header)
        raw = json.dumps(header).encode()
        return len(raw).to_bytes(8, "little") + raw + data[8 + size :]

    return change


def changed_matrix(value: float) -> Callable[[bytes], bytes]:
    """The last matrix with all rows, or one element, of ``value``; four rows of variances follow it."""

    def change(data: bytes) -> bytes:
        count, end = 16 * 16 if value == 1 else 1, len(data) - 4 * 4 * 16
        return data[: end - 4 * count] + torch.full((count,), value).numpy().tobytes() + data[end:]

    return change


def changed_variance(value: float) -> Callable[[bytes], bytes]:
    """The last variance of the file."""
    return lambda data: data[:-4] + torch.tensor([value]).numpy().tobytes()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (lambda data: b"", "no safetensors file"),
        (lambda data: data[:100], "truncated"),
        (lambda data: data[:-4], "truncated"),
        (lambda data: data + bytes(4), "after its last tensor"),
        (lambda data: data + bytes(2**21), "larger than"),
        (lambda data: b"\xff" * 8 + data[8:], "truncated"),
        (changed_header(lambda header: header["__metadata__"].update(version="1")), "version 2"),
        (changed_header(lambda header: header.pop("__metadata__")), "metadata"),
        (changed_header(lambda header: header["__metadata__"].update(model="{}")), "missing required field"),
        (changed_header(lambda header: header.update({"x": header.pop("layers.1.v")})), "tensor layers.1.v is missing"),
        (changed_header(lambda header: header["layers.0.k"].update(shape=[1, 32, 16])), r"\[1, 32, 16\], not F32"),
        (changed_header(lambda header: header["layers.0.k"].update(dtype="I32")), "is I32"),
        (changed_header(lambda header: header["layers.0.k.variance"].update(shape=[16, 2])), r"\[16, 2\], not F32"),
        (changed_header(lambda header: header.update(x=header.pop("layers.0.v.variance"))), "v.variance is missing"),
        (changed_variance(float("nan")), "layers.1.v.variance has values that are not finite"),
        (changed_variance(float("inf")), "layers.1.v.variance has values that are not finite"),
        (changed_variance(-1e-9), "layers.1.v.variance has variances below 0"),
        (changed_matrix(float("nan")), "layers.1.v has values that are not finite"),
        (changed_matrix(float("inf")), "layers.1.v has values that are not finite"),
        (changed_matrix(1.0), "layers.1.v cannot be inverted well"),
        (changed_matrix(1e7), "layers.1.v cannot be inverted well"),
    ],
)
def test_another_file_is_refused(how, why, file: BasesFile, config: ModelConfig):
    path = Path(file.path)
    with pytest.raises(ConfigError, match=REFUSED.format(why)):
        read_bases(written(path, how(path.read_bytes())), config)


def test_a_file_that_is_missing_or_was_not_made_with_the_plan_is_refused(file: BasesFile, config: ModelConfig):
    with pytest.raises(ConfigError, match=REFUSED.format("digest differs")):
        read_bases(replace(file, digest="0" * 64), config)
    with pytest.raises(ConfigError, match=REFUSED.format("No such file")):
        read_bases(replace(file, path=file.path + "x"), config)


def test_bases_of_another_model_are_refused(file: BasesFile, config: ModelConfig):
    with pytest.raises(ConfigError, match=r"kv=.*another model.*the weights differ"):
        read_bases(file, config, "0" * 64)
    model = ModelFingerprint.of("other", replace(config, vocab_size=65), None)
    other = written(Path(file.path), bases_bytes(random_bases(config), model))
    with pytest.raises(ConfigError, match=r"kv=.*another model.*vocab_size is 65 there"):
        read_bases(other, config)


@pytest.mark.parametrize(
    ("how", "field"),
    [
        (lambda: BasesFile("x", "0" * 63), "digest"),
        (lambda: BasesFile("x", "A" * 64), "digest"),
        (lambda: BasesFile(Path("x"), "0" * 64), "path"),
        (lambda: KVConfig(name="x", rungs=(DENSE,), bases="x"), "bases"),
    ],
)
def test_options_are_checked_for_type(how, field):
    with pytest.raises(ConfigError) as caught:
        how()
    assert caught.value.field == field


PROMPTS = [[3 + (7 * n * n + seed) % 60 for n in range(150 + 60 * seed)] for seed in range(3)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
INT8 = RungConfig("int8", "int8-channel-128", "int8-token-128")


def tokens(folder: Path, kv: KVConfig, **options: Any) -> list[list[int]]:
    """Greedy tokens of prompts in chunks, and once more over their cached blocks."""
    with Engine(str(folder), kv=kv, kv_memory="4MiB", max_num_batched_tokens=100, num_threads=1, **options) as engine:
        found = [each.outputs[0].token_ids for _ in range(2) for each in engine.generate(PROMPTS, PARAMS)]
        stats = engine.stats()
    assert stats.prefix_hit_tokens > 0 and (stats.num_demotions > 0) is (len(kv.rungs) > 1)
    return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return tokens(folder, KVConfig(name="plain", rungs=(DENSE,)))


@pytest.mark.parametrize(("rungs", "num_ranks"), [((DENSE,), 1), ((DENSE, INT8), 1), ((DENSE,), 2)], ids=str)
def test_an_engine_gives_the_same_tokens(rungs, num_ranks, file: BasesFile, folder: Path, expected: list[list[int]]):
    kv = KVConfig(name="x", rungs=rungs, sink=32, eager=len(rungs) > 1, bases=file)
    assert tokens(folder, kv, tensor_parallel=num_ranks) == expected


def test_quantized_weights_that_are_unpacked_take_bases_in(file: BasesFile, folder: Path):
    plain, kv = (KVConfig(name="x", rungs=(DENSE,), bases=each) for each in (None, file))
    assert tokens(folder, kv, weights="int8") == tokens(folder, plain, weights="int8")


def test_a_key_scale_comes_before_the_basis_of_keys(file: BasesFile, folder: Path, config: ModelConfig):
    scale = (((0.5, 2.0, *(1.0,) * 6), (1.5,) * 8),) * 2
    keys = []
    for given in ({}, {"key_scale": scale, "bases": file}):
        kv, batch = KVConfig(name="x", rungs=(DENSE,), **given), DenseBatch(config.attention)
        net = load(EngineConfig(model=folder, kv=kv), CPU)[0].model
        with torch.inference_mode():
            net(torch.arange(3, 40), torch.arange(37), batch)
        keys.append(batch.keys[1])
    divisors = torch.tensor(scale[1]).repeat(1, 2)
    expected = in_basis(keys[0] / divisors, random_bases(config)[1].k)
    torch.testing.assert_close(keys[1], expected, rtol=1e-3, atol=1e-3)


def test_an_engine_refuses_bases_of_other_weights(file: BasesFile, tmp_path: Path):
    other = write_tiny(tmp_path / "other", num_key_value_heads=1)
    with pytest.raises(ConfigError, match="another model"):
        Engine(str(other), kv=KVConfig(name="x", rungs=(DENSE,), bases=file))
