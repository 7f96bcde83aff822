"""``fit``: its table and forms, plans, a GPU whose speed is known, and ``--fit`` of commands that start an engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from qkv_engine import Fit
from qkv_engine.bench import provenance
from qkv_engine.cli import common, main
from qkv_engine.errors import ConfigError
from qkv_engine.fingerprint import ModelFingerprint
from qkv_engine.loading import demo_folder
from qkv_engine.models.loader import read_config
from qkv_engine.plan_file import plan_bytes
from qkv_engine.planner.mixed import Mixed
from qkv_engine.planner.plan import KVPlan
from qkv_engine.planner.predict import predicted_loss

from ..planner.profiles import made_up_profile

GPU = ("--device", "cuda", "--memory", "24GiB", "--context", "32768", "--requests", "4")


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main.main(["fit", *words, "-o", "json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_a_shape_on_a_gpu_that_is_not_here(capsys: pytest.CaptureFixture[str]):
    found = rows(capsys, "qwen3-8b", *GPU)
    best = found[0]
    assert (best["weights"], best["kv"], best["rung"], best["fits"]) == ("int8", "auto", "int8", True)
    assert best["step_bytes"] == 7572169472 + best["kv_bytes"] and best["limit_tok_s"] is None
    assert len(found) == 24


def test_the_speed_of_a_gpu_whose_bandwidth_is_known(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(provenance, "device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("qkv_engine.loading.resolve_device", lambda name: __import__("torch").device("cuda:0"))
    monkeypatch.setattr("qkv_engine.fit.free_memory", lambda device: 2**37)
    best = rows(capsys, "qwen3-8b", *GPU)[0]
    assert best["limit_tok_s"] == pytest.approx(4 * 4.3e12 / best["step_bytes"], rel=1e-4)
    assert main.main(["fit", "qwen3-8b", *GPU]) == 0
    out = capsys.readouterr().out
    assert "tok/s, at most" in " ".join(out.split()) and "no bandwidth" not in out and "NVIDIA H200" in out


def test_a_cpu_unpacks_weights_and_has_no_known_bandwidth(capsys: pytest.CaptureFixture[str]):
    assert main.main(["fit", "--memory", "52MiB", "--context", "1024", "--requests", "4"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^as stored +auto \(int8\) +yes +29\.5 MiB +19\.5 MiB +3\.0 MiB ", out, re.MULTILINE)
    assert "no bandwidth is known" in out and "fp8" not in out and "demo · " in out


def test_formats_that_were_asked_for(capsys: pytest.CaptureFixture[str]):
    found = rows(capsys, "qwen3-8b", *GPU, "--kv", "kivi-4,xquant-1.28", "--weights", "int4")
    assert [(row["weights"], row["kv"], row["loss"] is None) for row in found] == [
        ("int4", "kivi-4", False),
        ("int4", "xquant-1.28", True),
    ]


def test_a_plan_predicts_the_loss_of_kv(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    model = ModelFingerprint.of("", read_config(demo_folder()), None)
    plan = KVPlan.make(Mixed(budget="4bits", context=8192), made_up_profile(model), model)
    (tmp_path / "plan.json").write_bytes(plan_bytes(plan))
    found = {row["kv"]: row for row in rows(capsys, "--memory", "60MiB", "--kv", f"int4,{tmp_path / 'plan.json'}")}
    rungs = {rung.name: rung for rung in plan.config("plan").rungs}
    assert found["plan"]["kv_loss"] == predicted_loss(rungs[found["plan"]["rung"]], plan.profile) > 0
    assert found["int4"]["kv_loss"] not in (None, 0.00013)
    refused = main.main(["fit", "qwen3-8b", *GPU, "--kv", str(tmp_path / "plan.json")])
    assert refused == common.EXIT_USAGE and "layers" in capsys.readouterr().err


def test_nothing_fits(capsys: pytest.CaptureFixture[str]):
    assert main.main(["fit", "--memory", "50MiB", "--context", "4096", "--requests", "4"]) == common.EXIT_CAPACITY
    out, err = capsys.readouterr()
    assert "demo · " in out and "yes" not in out
    assert err == (
        "qkv-engine: error: --memory='50.0 MiB': weights and 4 requests of 4,096 tokens take 54.6 MiB in the smallest "
        "formats. Change memory to at least 54.9MiB, or requests to at most 3, or context to at most 2,944\n"
    )


def options(*words: str) -> dict[str, Any]:
    return common.engine_options(main.build_parser().parse_args(words))


def test_fit_of_other_commands():
    for command in ("chat", "serve"):
        found = options(command, "--fit", "--memory", "1GiB", "--requests", "2")
        assert found["fit"] == Fit(requests=2, memory="1GiB")
        assert "fit" not in options(command)
        with pytest.raises(ConfigError, match="--fit"):
            options(command, "--context", "64")


def test_chat_takes_the_best(capsys: pytest.CaptureFixture[str]):
    words = ("--fit", "--memory", "47MiB", "--context", "1024", "--requests", "4", "-p", "What is 47*86?")
    assert main.main(["chat", *words, "-v"]) == 0
    out, err = capsys.readouterr()
    assert out == "4042\n" and "fit: weights as stored, KV auto, blocks on int4" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fit", "--weights", "int3"], "--weights='int3'"),
        (["fit", "--context", "9000"], "--context=9000: the model was made for 8192"),
        (["fit", "--memory", "lots"], "--memory='lots'"),
        (["fit", "--requests", "0"], "--requests=0"),
        (["fit", "--tp", "3"], "neither split nor repeated"),
        (["fit", "qwen3-8b", "--device", "cuda", "--memory", "50%"], "--memory='50%': a share of memory"),
        (["chat", "--fit", "--kv", "auto", "-p", "x"], "--kv='auto': fit chooses it. Leave kv or fit out"),
        (["serve", "--fit", "--weights", "int4"], "--weights='int4': fit chooses it. Leave weights or fit out"),
        (["chat", "--fit", "--max-model-len", "64", "-p", "x"], "--max-model-len=64: fit chooses it"),
    ],
)
def test_wrong_options(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main.main(words) == common.EXIT_USAGE
    assert message in capsys.readouterr().err
