"""A plan of each family, from a folder through the command line to an engine that serves them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from qkv_engine import Engine, SamplingParams
from qkv_engine.cli.main import main
from qkv_engine.planner.plan import read_plan

from ..models.test_families import FAMILY_CASES
from ..models.tiny import write_tiny

FAST = ("Gemma3", "Gemma4", "Phi3", "Qwen3Moe", "Qwen3_5")
WINDOW = 1000  # tokens of the models' windows, which those of the recent tokens must not cover
WINDOWS_ALONE = ("Ministral3", "Mistral", "Phi3")  # their blocks take no rung below 8 bits
# Of two requests of 40,000 tokens, which take twice as much at 16 bits: layers with a window or a state beside others.
MEMORY = {"Gemma3": "8MiB", "GptOss": "14MiB", "Qwen3_5": "6MiB", "Qwen3Next": "6MiB"}
CASES = [
    pytest.param(*each, marks=[] if each[0] in FAST else pytest.mark.slow, id=each[0])
    for each in {each[0]: each for each in FAMILY_CASES}.values()
]


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_a_plan_solves_and_is_served(
    family: str,
    changes: dict,
    make_reference: Callable[..., transformers.PreTrainedModel],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    folder, path, texts = write_tiny(tmp_path / "model"), tmp_path / "plan.json", tmp_path / "texts.jsonl"
    if changes.get("sliding_window"):
        changes = changes | {"sliding_window": WINDOW}
    make_reference(family, **changes).save_pretrained(folder)
    words = ["".join(chr(97 + (7 * n + m * m) % 26) for m in range(200)) for n in range(3)]
    texts.write_text("\n".join(json.dumps({"text": text}) for text in words))
    budget = ["13bits" if family in WINDOWS_ALONE else "4bits"]
    if family in MEMORY:
        budget = [MEMORY[family], "--requests", "2"]
    options = ["--data", str(texts), "--samples", "3", "--context", "40000", "-o", str(path), "--budget", *budget]
    assert main(["plan", str(folder), *options]) == 0, capsys.readouterr().err
    plan = read_plan(path)
    assert plan.model.architecture == f"{family}ForCausalLM" and min(plan.profile.scores.k + plan.profile.scores.v) > 0
    sides = plan.profile.sensitivities
    assert all(max(layers) > 0 for side in (sides.k, sides.v) for name, layers in side.items() if name != "dense16")
    prompt, params = [3 + n % 50 for n in range(400)], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with Engine(str(folder), kv=path, kv_memory=MEMORY.get(family, "16MiB")) as engine:
        assert len(engine.generate([prompt], params)[0].outputs[0].token_ids) == 8
