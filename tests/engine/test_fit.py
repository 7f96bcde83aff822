"""``Fit``: exact rows on known shapes, a start of the best one, refusals with figures that work."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qkv_engine import CapacityError, ConfigError, Engine, Fit, ModelError, SamplingParams
from qkv_engine.config import EngineConfig, KVConfig
from qkv_engine.fit import FitRow, FitTask, fit_rows, fitted, no_fit
from qkv_engine.loading import demo_folder
from qkv_engine.measured_loss import KV, WEIGHTS, measured_kv_loss
from qkv_engine.models.loader import read_config
from qkv_engine.models.registry import config_from_hf
from qkv_engine.models.shapes import SHAPES
from qkv_engine.presets import PRESETS

from ..doc_pages import ROOT

GIB = 2**30
AUTO = EngineConfig(kv=PRESETS["auto"])


def task(fit: Fit, shape: str | None = None) -> FitTask:
    """A GPU's for a shape, the CPU's for the demo model."""
    if shape is None:
        return FitTask.of(fit, read_config(demo_folder()), torch.device("cpu"), AUTO)
    return FitTask.of(fit, config_from_hf(SHAPES[shape]), torch.device("cuda"), AUTO, is_here=False)


def found(rows: list[FitRow]) -> dict[tuple[str | None, str], FitRow]:
    return {(row.weights, row.kv): row for row in rows}


def test_an_8b_model_in_24_gib():
    rows = fit_rows(task(Fit(context=32768, requests=4, memory="24GiB"), "qwen3-8b"))
    assert len(rows) == 4 * 6 and [row.fits for row in rows] == [True] * 20 + [False] * 4
    best = rows[0]
    assert (best.weights, best.kv, best.rung) == ("int8", "auto", "int8")
    # 8 bits a weight, a float16 scale a row, the embedding plain; 4 requests with a sink, 255 blocks and an open one.
    sink, dense, int8 = 32 * 147456, 128 * 147456, 128 * 76104
    assert best.weights_bytes == 8816829184 and best.kv_bytes == 4 * (sink + dense + 255 * int8)
    assert best.left_bytes == 24 * GIB - best.weights_bytes - best.kv_bytes
    assert (best.weights_bits, best.kv_bits) == (8.612, 8.258)
    assert best.loss == pytest.approx(0.00000057 + 0.00000047)
    plain = found(rows)[None, "bf16"]
    assert plain.kv_bytes == 4 * 32768 * 147456 and plain.weights_bytes == 16381820928 and not plain.fits
    assert [row.order for row in rows] == sorted(row.order for row in rows)


def test_a_ladder_under_pressure_stands_on_the_widest_rung_that_fits():
    fit = Fit(context=1024, requests=4)
    rungs = {
        memory: found(fit_rows(task(replace(fit, memory=memory))))[None, "auto"].rung
        for memory in ("80MiB", "52MiB", "46MiB", "40MiB")
    }
    assert list(rungs.values()) == ["dense16", "int8", "int4", "int4"]


def test_windows_count_once_they_are_full():
    """Gemma 3 12B: of 40 layers a request keeps 9 blocks, of 8 all 256."""
    (row,) = fit_rows(task(Fit(context=32768, memory="48GiB"), "gemma-3-12b"), [PRESETS["bf16"]], weights=(None,))
    assert row.kv_bytes == 256 * 8 * 2**20 + 9 * 40 * 2**20 and row.fits


def test_experts_count_in_their_formats():
    """Qwen3 30B-A3B: 48 layers of 128 experts, 32 heads and 4 of KV; a bfloat16 scale a row, or 128 columns."""
    rows = fit_rows(task(Fit(context=4096, memory="24GiB"), "qwen3-30b-a3b"))
    layer_rows = 128 * (2 * 768 + 2048) + (32 + 8) * 128 + 2048  # those of matrices that are quantized
    layer_codes = 128 * 3 * 768 * 2048 + (32 + 8 + 32) * 128 * 2048
    plain = 2 * (48 * (128 * 2048 + 2 * 2048 + 36 * 128) + 2048 + 151936 * 2048)  # routers, norms, the embedding
    head = 151936 * (2048 + 2)
    int8 = 48 * (layer_codes + 2 * layer_rows) + head + plain
    int4 = 48 * (layer_codes // 2 + 2 * layer_codes // 128) + head + plain
    sizes = {row.weights: row.weights_bytes for row in rows}
    assert (sizes["int8"], sizes["int4"]) == (int8, int4)
    assert {row.weights for row in rows} == {None, "int8", "int4", "fp8"}
    assert rows[0].weights == "int4" and {row.weights for row in rows if row.fits} == {"int4"}


def test_layers_of_more_kinds_than_groups_are_refused():
    config = config_from_hf(SHAPES["gemma-3-12b"])  # full attention, and a window of 1,024
    model = replace(config, attention=(config.attention[0]._replace(window=512), *config.attention[1:]))
    with pytest.raises(ModelError, match="layers with 3 different windows"):
        fit_rows(FitTask.of(Fit(memory="48GiB"), model, torch.device("cuda"), AUTO, is_here=False))


@pytest.mark.parametrize(
    ("memory", "kv"),
    [
        pytest.param("80MiB", "bf16", marks=pytest.mark.slow),
        pytest.param("53MiB", "int8", marks=pytest.mark.slow),
        ("47MiB", "auto"),
    ],
)
def test_the_best_row_starts_and_holds_the_requests(memory: str, kv: str):
    fit = Fit(context=512, requests=8, memory=memory)
    (best, *_) = fit_rows(task(fit))
    with Engine(fit=fit, device="cpu", prefix_caching=False) as engine:
        concurrency = re.search(rf"\({kv}\): .* at most (\d+) requests of 512 tokens", "\n".join(engine.describe()))
        assert concurrency is not None and int(concurrency[1]) >= 8 and best.kv == kv
        assert engine.stats().kv_bytes_total <= best.left_bytes + best.kv_bytes
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        prompts = [[(number * 7 + at) % 200 + 20 for at in range(500)] for number in range(8)]
        outputs = engine.generate(prompts, params)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [12] * 8
        stats = engine.stats()
    assert stats.num_preemptions == 0


def test_options_of_the_best_row():
    config = fitted(replace(AUTO, fit=Fit(context=1024, requests=300, memory="3GiB"), device="cpu"))
    assert (config.weights, config.kv.name, config.max_model_len) == (None, "bf16", 1024)
    assert config.max_num_seqs == 300 and config.kv_memory == 3 * GIB - 30974976
    assert fitted(AUTO) is AUTO


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("kv", {"kv": "auto"}),
        ("kv", {"kv": PRESETS["auto"]}),
        ("kv", {"kv": Path("plan.json")}),
        ("weights", {"weights": "int4"}),
        ("kv_memory", {"kv_memory": "1GiB"}),
        ("max_model_len", {"max_model_len": 100}),
    ],
)
def test_what_fit_chooses_is_refused_beside_it(field: str, options: dict[str, object]):
    with pytest.raises(ConfigError, match="fit chooses it") as refused:
        Engine(fit=Fit(), **options)
    value = options[field]
    shown = value.name if isinstance(value, KVConfig) else value
    assert (refused.value.field, refused.value.value) == (field, shown) and refused.value.remedy is not None


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("context", {"context": 1}),
        ("context", {"context": "8k"}),
        ("requests", {"requests": 0}),
        ("requests", {"requests": True}),
        ("memory", {"memory": "lots"}),
    ],
)
def test_wrong_values_name_their_field(field: str, options: dict[str, object]):
    with pytest.raises(ConfigError) as refused:
        Fit(**options)
    assert refused.value.field == field
    with pytest.raises(ConfigError, match="not a Fit"):
        replace(AUTO, fit="24GiB")


def test_a_context_beyond_the_models_is_refused():
    with pytest.raises(ConfigError, match="made for 8192") as refused:
        task(Fit(context=8193))
    assert (refused.value.field, refused.value.value) == ("context", 8193)


def test_a_share_of_a_gpu_that_is_not_here_is_refused():
    with pytest.raises(ConfigError, match="not here") as refused:
        task(Fit(memory="50%"), "qwen3-8b")
    assert (refused.value.field, refused.value.value) == ("memory", "50%")


@pytest.mark.parametrize("module", ["fit", "startup"])  # before the weights are loaded, and when KV is allocated
def test_memory_that_is_not_free_is_refused_by_its_name(module: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(f"qkv_engine.{module}.free_memory", lambda device: 2**20)
    with pytest.raises(CapacityError, match=r"1\.0 MiB free on cpu\. Lower memory") as refused:
        Engine(fit=Fit(context=512, memory="60MiB"), device="cpu")
    assert (refused.value.field, refused.value.value) == ("memory", "60MiB")


def test_a_refusal_names_changes_that_fit_and_no_smaller_ones():
    fit = Fit(context=4096, requests=4, memory="50MiB")
    asked = task(fit)
    error = no_fit(asked, fit_rows(asked))
    assert isinstance(error, CapacityError) and error.field == "memory" and error.remedy is not None
    words = r"memory to at least (\S+), or requests to at most (\d+), or context to at most (\S+)"
    numbers = re.fullmatch(f"Change {words}", error.remedy)
    assert numbers is not None and error.message.startswith("weights and 4 requests of 4,096 tokens take 54.6 MiB")
    requests, context = int(numbers[2]), int(numbers[3].replace(",", ""))
    for change in ({"memory": numbers[1]}, {"requests": requests}, {"context": context}):
        assert fit_rows(task(replace(fit, **change)))[0].fits
    for change in ({"requests": requests + 1}, {"context": context + 1}, {"memory": "53MiB"}):
        assert not fit_rows(task(replace(fit, **change)))[0].fits
    with pytest.raises(CapacityError, match="Change memory"):
        Engine(fit=fit, device="cpu")


def test_weights_that_alone_are_too_much_leave_more_memory():
    asked = task(Fit(memory="2GiB"), "qwen3-8b")
    assert no_fit(asked, fit_rows(asked)).remedy == "Change memory to at least 6.0GiB"


def test_losses_are_those_of_the_measured_rows():
    """The means of the judge's rows, to two digits."""
    means = {}
    for name in ("judge-demo", "judge-weights-demo"):
        for row in map(json.loads, (ROOT / f"results/cpu/{name}.jsonl").read_text().splitlines()):
            if row["kl"]:
                per_set = [sum(kl) / sum(row["tokens"][name]) for name, kl in row["kl"].items()]
                means[row["kv"]] = sum(per_set) / len(per_set)
    losses = KV | {f"weights {name}": loss for name, loss in WEIGHTS.items()}
    assert {name: f"{means[name]:.2g}" for name in losses} == {name: f"{loss:.2g}" for name, loss in losses.items()}


def test_rungs_of_ladders_lose_what_the_presets_of_their_formats_do():
    asked = task(Fit())
    for name, losses in {"auto": [0, KV["int8"], KV["int4"]], "auto-2": [0, KV["int8"], KV["int4"], None],
                         "kitty": [0, KV["kitty"]], "kivi-4-g32": [0, None]}.items():  # fmt: skip
        ladder = asked.ladder(PRESETS[name])
        assert [measured_kv_loss(PRESETS[name], ladder, rung) for rung in range(ladder.last + 1)] == losses
