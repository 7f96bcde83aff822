"""``plan --method spectral`` as a command: the plan and its bases, another budget of them, mistakes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from qkv_engine import Engine, SamplingParams
from qkv_engine.cli.main import main
from qkv_engine.planner.plan import read_plan

from ..models.tiny import write_tiny

SPECTRAL = ["--method", "spectral", "--context", "100000"]
BASES = Path("plan.bases.safetensors")


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A model of two layers, and texts for it."""
    monkeypatch.chdir(tmp_path)
    write_tiny(Path("model"), hidden_size=64, num_attention_heads=2, num_key_value_heads=2)
    texts = [{"text": "".join(chr(97 + (7 * n + m * m) % 26) for m in range(200))} for n in range(3)]
    Path("texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    return ["model", "--data", "texts.jsonl", "--samples", "3"]


def test_a_plan_and_its_bases_are_served(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *SPECTRAL, *words, "--budget", "2.5bits", "--plot", "layers.svg"]) == 0
    out, err = capsys.readouterr()
    assert "model · spectral, 2.5bits for 100,000 tokens · 3 texts" in out and "graded-" in out
    assert err.splitlines()[-1].endswith(
        "wrote its bases to plan.bases.safetensors, the plan to plan.json, a plot to layers.svg"
    )
    plan = read_plan("plan.json")
    assert not plan.profile.sensitivities.k, "no format was tried"
    assert out.count("predicted loss") == 3, "of all rungs but the dense one"
    assert plan.profile.bases == hashlib.sha256(BASES.read_bytes()).hexdigest() and plan.profile.spectra.shrink == 0.3
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with Engine("model", kv="plan.json", kv_memory="16MiB") as engine:
        assert len(engine.generate([[3 + n % 50 for n in range(400)]], params)[0].outputs[0].token_ids) == 8


def test_another_budget_takes_the_bases_along(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *SPECTRAL, *words, "--budget", "2.5bits", "--shrink", "0.5"]) == 0
    again = ["plan", *SPECTRAL, "--from", "plan.json", "-o", "less.json"]
    assert main([*again, "--budget", "2bits", "--eager"]) == 0
    less, plan = read_plan("less.json"), read_plan("plan.json")
    assert less.profile == plan.profile and less.settings.shrink == 0.5 and less.ladder.eager
    assert Path("less.bases.safetensors").read_bytes() == BASES.read_bytes()
    assert main([*again, "--budget", "2bits", "--shrink", "0.4"]) == 2
    assert "--shrink=0.4: the bases have another. Give 0.5" in capsys.readouterr().err
    assert main(["plan", "--from", "plan.json", "--method", "kvmix", "-o", "other.json"]) == 0
    assert not Path("other.bases.safetensors").exists() and "bases" not in Path("other.json").read_text()
    capsys.readouterr()
    assert main(["plan", "--from", "plan.json", "-o", "mixed.json", "--budget", "9bits", "--context", "100000"]) == 2
    assert "Profile the model again with qkv-engine plan and this --method" in capsys.readouterr().err
    assert main(["plan", *SPECTRAL, "--from", "other.json", "-o", "less.json"]) == 2
    assert "its profile has no spectra" in capsys.readouterr().err
    for damage in (lambda: BASES.write_bytes(b"x"), BASES.unlink):
        damage()
        assert main([*again, "--budget", "2bits"]) == 2
        assert "--from='" in (err := capsys.readouterr().err) and "plan.bases.safetensors" in err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--shrink", "2"], "--shrink=2.0: out of range. Give a number from 0 to 1"),
        (["--shrink", "nan"], "--shrink"),
        (["--rungs", "4"], "--rungs=4: no option of --method spectral"),
        (["--least-bits", "2"], "--least-bits=2: no option of --method spectral"),
        (["--recent", "-1"], "--recent=-1"),
        (["--key-scale"], "--key-scale=True: no option of --method spectral"),
        (["--method", "mixed", "--shrink", "0.3"], "--shrink=0.3: no option of --method mixed. Use --method spectral"),
        (["--context", "250"], "--context=250: no block leaves the window"),
    ],
)
def test_mistakes_are_found_before_anything_runs(
    options: list[str], named: str, words: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main(["plan", *SPECTRAL, *words, *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and named in err and "profiling" not in err
    assert not Path("plan.json").exists() and not BASES.exists()


def test_a_budget_that_nothing_keeps_is_named(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *SPECTRAL, *words, "--budget", "0.2bits"]) == 3
    assert "no plan is as small. Give at least" in capsys.readouterr().err


def test_heads_that_runs_do_not_fill_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]):
    write_tiny(Path("model"), hidden_size=48, num_attention_heads=2, num_key_value_heads=2)
    assert main(["plan", *SPECTRAL, *words, "--budget", "4bits"]) == 2
    assert "--method='spectral': 16 must divide the channels of a head" in capsys.readouterr().err
