"""Options as users get them wrong: every one is refused by name with a typed error, whatever was passed."""

from __future__ import annotations

import random
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from qkv_engine import ConfigError, Engine, KVConfig, QKVError, SamplingParams
from qkv_engine.config import DENSE16, EngineConfig, RungConfig
from qkv_engine.device.layouts import build_ladder
from qkv_engine.kernels.formats.uniform.layout import uniform_formats
from qkv_engine.kernels.formats.uniform.presets import uniform_rung
from qkv_engine.presets import PRESETS, main_presets, preset_families, resolve_kv
from qkv_engine.sizes import MAX_SIZE, format_least, least_size, parse_size

from ..models.tiny import write_tiny

FREE = 10 * 2**30


class Hostile:
    """Fails at whatever is asked of it."""

    def _fail(self, *_: object) -> Any:
        raise RuntimeError("hostile")

    __repr__ = __eq__ = __hash__ = __len__ = __bool__ = __iter__ = __lt__ = __float__ = __fspath__ = _fail


OBJECTS: list[Any] = [
    *(b"x", bytearray(b"x"), [], [1], {}, {1}, (), ("int4",), object(), object, Hostile(), 1j, range(3)),
    *(numpy.array([1, 2]), numpy.int64(3), torch.tensor([1, 2])),
]
NUMBERS: list[Any] = [-1, -0.0, 1.5, float("nan"), float("inf"), 10**5000, -(10**5000)]
TEXTS: list[Any] = ["", "x" * 10**6, "\ud800", "a\0b", "\n", "no such thing"]


def sized(text: Any) -> int:
    return parse_size(text, field="kv_memory", free=FREE)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (1000, 1000),
        ("1000", 1000),
        ("1000B", 1000),
        ("4k", 4096),
        ("4G", 4 * 2**30),
        ("4g", 4 * 2**30),
        ("4Gi", 4 * 2**30),
        ("4GiB", 4 * 2**30),
        (" 4 gib ", 4 * 2**30),
        ("4GB", 4 * 10**9),
        ("1.5TB", 1_500_000_000_000),
        ("2T", 2 * 2**40),
        ("9007199254740993", 2**53 + 1),
        (".5MiB", 2**19),
        (0.5, FREE // 2),
        ("0.5", FREE // 2),
        ("50%", FREE // 2),
        (1.0, FREE),
        ("1.0", FREE),
        ("100%", FREE),
        (1e-300, 1),
    ],
)
def test_sizes(text: Any, nbytes: int):
    assert sized(text) == nbytes


NO_SIZES: list[Any] = [
    *(0, -1, 0.0, -0.5, 1.5, float("nan"), float("inf"), MAX_SIZE + 1, 10**5000, True, None, [], b"4G", Hostile()),
    *("", "G", "0", "0G", "-4G", "4X", "4GiBB", "1e9", "0x10", "101%", "2.5", "0.0", "9" * 400, "9" * 19 + "T"),
    *("4 G B", "nan", "inf", "4G\n5G", "1" * 10**6, "\ud800", "4%%", "\u0664G"),
]


def test_no_sizes():
    for value in NO_SIZES:
        with pytest.raises(ConfigError, match="kv_memory=") as caught:
            sized(value)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("least", [1, 1000, 12_345_678, 7 * 2**30])
@pytest.mark.parametrize("start", [1, 5_000_000, 2**40])
def test_a_least_size_is_found_from_anywhere(least: int, start: int):
    assert least <= sized(least_size(start, lambda nbytes: nbytes >= least)) <= 1.1 * least + 1


@pytest.mark.parametrize("nbytes", [1, 1000, 1025, 1536, 5 * 2**20, 5 * 2**20 + 1, 10**9, 2**40 + 1, 2**53 - 1])
def test_a_least_size_in_words_suffices(nbytes: int):
    assert nbytes <= sized(format_least(nbytes)) <= 1.1 * nbytes + 1


# Engine


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("model", [v for v in OBJECTS if not isinstance(v, Path)] + NUMBERS),
        ("kv", [True, *OBJECTS, *NUMBERS, *TEXTS]),
        ("kv_memory", [True, *OBJECTS, *NUMBERS, *TEXTS]),
        ("host_memory", [True, *OBJECTS, *NUMBERS, *TEXTS]),
        ("fit", [True, *OBJECTS, *NUMBERS, *TEXTS]),
        ("weights", [True, *OBJECTS, *NUMBERS, *TEXTS, "int3"]),
        ("kv_quota", [True, 0, 2, *OBJECTS, *NUMBERS, *TEXTS]),
        ("prefix_caching", [None, 1, *OBJECTS, *NUMBERS, *TEXTS]),
        ("resizable", [None, 1, *OBJECTS, *NUMBERS, *TEXTS]),
        ("cuda_graphs", [None, 1, *OBJECTS, *NUMBERS, *TEXTS]),
        ("warm_up", [None, True, *OBJECTS, *NUMBERS, *TEXTS, "eager"]),
        ("extend_context", [None, 1, *OBJECTS, *NUMBERS, *TEXTS]),
        ("dtype", [None, True, *OBJECTS, *NUMBERS, *TEXTS]),
        ("device", [None, True, *OBJECTS, *NUMBERS, *TEXTS, "cpu:7", "cpu:0", "tpu", "cuda:99", "cuda:-1", "meta"]),
        ("max_model_len", [True, 1, 2.0, *OBJECTS, *NUMBERS, *TEXTS]),
        ("max_num_seqs", [None, True, 0, 5000, *OBJECTS, *NUMBERS, *TEXTS]),
        ("max_itl_ms", [True, 0, -1, 60_001, *OBJECTS, *TEXTS, float("nan"), float("inf"), 10**5000]),
        ("max_num_batched_tokens", [None, True, 0, *OBJECTS, *NUMBERS, *TEXTS]),
        ("load_format", [None, True, *OBJECTS, *NUMBERS, *TEXTS]),
        ("revision", [True, *OBJECTS, *NUMBERS]),
        ("token", [True, *OBJECTS, *NUMBERS]),
        ("seed", [None, True, 2**63, *OBJECTS, *NUMBERS, *TEXTS]),
    ],
)
def test_every_option_is_checked(field: str, values: list[Any]):
    for value in values:
        with pytest.raises(ConfigError) as caught:
            Engine(**{field: value})
        text = str(caught.value)
        assert text.startswith(f"{field}=") and len(text) < 600 and len(text.splitlines()) == 1


def test_a_secret_is_not_repeated():
    with pytest.raises(ConfigError) as caught:
        Engine(token=b"hf_secret")
    assert "secret" not in str(caught.value)


def test_accepted_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = partial(EngineConfig, kv=PRESETS["auto"])
    assert config(kv_quota=1).kv_quota == 1
    assert config(model="org/name").source == "org/name" and config().source is None
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert config(model=Path("~/model")).source == str(tmp_path / "model")
    assert config(model=Path("org/name")).source == str(tmp_path / "org" / "name")  # never a name on the Hub


# KVConfig, RungConfig and ladders


def test_names_and_formats_are_names():
    for value in [None, True, *OBJECTS, *NUMBERS, *TEXTS[:5], "x" * 65]:
        with pytest.raises(ConfigError, match=r"^rung="):
            RungConfig(value, "dense16", "dense16")
        with pytest.raises(ConfigError, match=r"^name="):
            KVConfig(name=value, rungs=(DENSE16,))
    for value in [None, True, *(v for v in OBJECTS if not isinstance(v, tuple)), *NUMBERS, (), ("int4", 5), (None,)]:
        for field in ("k", "v"):
            with pytest.raises(ConfigError, match=f"^{field}="):
                RungConfig("a", **({"k": "dense16", "v": "dense16"} | {field: value}))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("rungs", [None, DENSE16, [DENSE16], (DENSE16, DENSE16), (DENSE16, None), (DENSE16,) * 17, *OBJECTS, *TEXTS]),
        ("sink", [None, True, 3, 256, 32.0, *OBJECTS, *NUMBERS, *TEXTS]),
        ("recent", [None, True, 2**20 + 1, 5.0, *OBJECTS, *NUMBERS, *TEXTS]),
        ("recent_ratio", [None, True, False, 1, 1.0, *OBJECTS, *filter(None, NUMBERS), *TEXTS]),
        ("eager", [None, 1, *OBJECTS, *NUMBERS, *TEXTS]),
        ("admit_at", [True, "int4", *OBJECTS, *NUMBERS, *TEXTS]),
        ("model", [1, "demo", ("demo", 8), {"name": "demo"}]),
    ],
)
def test_every_field_of_a_ladder_is_checked(field: str, values: list[Any]):
    for value in values:
        with pytest.raises(ConfigError, match=f"^{field}="):
            KVConfig(**{"name": "mine", "rungs": (DENSE16,)} | {field: value})


def ladder(*rungs: RungConfig, num_layers: int = 2, **options: Any) -> Any:
    config = KVConfig(name="mine", rungs=rungs, **options)
    return build_ladder(config, num_layers=num_layers, num_kv_heads=2, head_dim=32, dtype=torch.float32)


@pytest.mark.parametrize(
    "first",
    [
        RungConfig("a", k="dense16", v="dense32"),
        RungConfig("a", k=("dense16", "dense32"), v=("dense16", "dense32")),
        RungConfig("a", k=("dense32", "dense32"), v=("dense32", "dense16")),
    ],
)
def test_the_first_rung_has_one_dtype(first: RungConfig):
    with pytest.raises(ConfigError, match=r"^kv='mine': rungs='a': the first rung mixes dtypes.*\. Store"):
        ladder(first)
    with pytest.raises(ConfigError, match="mixes dtypes"):
        ladder(first, uniform_rung(4))


@pytest.mark.parametrize(
    ("rungs", "message"),
    [
        ((uniform_rung(8),), "must be dense"),
        ((RungConfig("a", ("dense16",), "dense16"),), "1 formats for 2 layers"),
        ((RungConfig("a", ("dense16",) * 3, "dense16"),), "3 formats for 2 layers"),
        ((RungConfig("a", "dense17", "dense16"),), "unknown KV format"),
        ((DENSE16, uniform_rung(4), uniform_rung(8)), "not smaller"),
        (
            (DENSE16, RungConfig("b", ("dense32", "int1-channel-32"), "int1-token-32")),
            "K of layer 0 grows from rung dense16",
        ),
    ],
)
def test_ladders_that_cannot_be(rungs: tuple[RungConfig, ...], message: str):
    with pytest.raises(ConfigError, match=message):
        ladder(*rungs)


def test_random_ladders_are_refused_or_run(tmp_path: Path):
    """What is accepted answers a request whose blocks step down."""
    rng, names, accepted = (
        random.Random(0),
        ["dense16", "dense32", "kitty-25", "kitty-40-random", *uniform_formats()],
        0,
    )
    folder = write_tiny(tmp_path)
    for _ in range(1000):
        try:
            rungs = tuple(_random_rung(rng, names, number) for number in range(rng.randint(1, 4)))
            kv = KVConfig(
                name="mine",
                rungs=rungs,
                sink=rng.choice([0, 1, 32, 128]),
                recent=rng.choice([0, 128]),
                recent_ratio=rng.choice([0, 0.3]),
                eager=rng.random() < 0.5,
            )
            build_ladder(kv, num_layers=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
        except ConfigError:
            continue
        accepted += 1
        if accepted % 40 == 0:
            with Engine(folder, kv=kv, kv_memory="256KiB", device="cpu", max_num_seqs=4) as engine:
                params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
                outputs = engine.generate([[rng.randrange(3, 60) for _ in range(200)] for _ in range(3)], params)
                assert all(o.error is None and len(o.outputs[0].token_ids) == 20 for o in outputs)
    assert accepted > 100


def _random_rung(rng: random.Random, names: list[str], number: int) -> RungConfig:
    if number == 0 and rng.random() < 0.8:
        return DENSE16
    if rng.random() < 0.6:
        return uniform_rung(rng.choice([8, 4, 3, 2, 1]), rng.choice([32, 64, 128]))
    k, v = (rng.choice([rng.choice(names), (rng.choice(names), rng.choice(names))]) for _ in "kv")
    return RungConfig(f"rung{number}", k, v)


def test_presets_are_found_by_name():
    names = set()
    for family in preset_families():
        name, *ends = family.replace("]", "").split("[")
        names |= {name + "".join(some) for n in range(len(ends) + 1) for some in combinations(ends, n)}
    assert names == set(PRESETS)
    schemes = ["kivi-4", "kivi-2", "kivi-k4v2", "kivi-k2v4", "xquant", "xquant-1.28", "xquant-1.16"]
    schemes += ["kitty", "kitty-pro", "patternkv", "pm-kvq-4", "pm-kvq-2"]
    assert list(main_presets()) == ["bf16", "fp32", "int8", "int4", *schemes, "auto", "auto-2"]
    assert all(resolve_kv(name) is preset for name, preset in PRESETS.items())
    assert resolve_kv(PRESETS["int4"]) is PRESETS["int4"]
    with pytest.raises(QKVError, match=r"kv='fp8'.*bf16.*auto-2, or the path of a plan file \(.json\)$") as caught:
        resolve_kv("fp8")
    assert len(str(caught.value)) < 300
    for wrong, meant in (("itn4", "int4"), ("KIVI2", "kivi-2"), ("kivi-2-snk", "kivi-2-sink"), ("kvmx", "kvmix")):
        with pytest.raises(QKVError, match=rf"^kv='{wrong}': unknown KV preset. Did you mean {meant}\?$"):
            resolve_kv(wrong)
    with pytest.raises(QKVError, match=r"kv=4.*bf16.*KVConfig"):
        resolve_kv(4)  # type: ignore[arg-type]
