"""Models whose layers are of several kinds on a GPU beside the CPU, with KV at 4 and 2 bits, all rungs in one batch.

Both engines compute in float32 and store blocks at the same positions, so that they read equal codes but for a few on
a border. What is left between them is measured by what the codes themselves cost: a block that is read at another rung,
in another group or beyond its window costs as much as all of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from qkv_engine import Engine, KVConfig, RequestOutput, SamplingParams
from qkv_engine.config import RungConfig
from qkv_engine.kernels.formats.uniform.presets import uniform_rung
from qkv_engine.presets import PRESETS

from .test_families import FAMILIES, NEW_TOKENS, OPTIONS, PROMPTS, ROOM, save

pytestmark = pytest.mark.gpu

CASES = {
    "windows": ("Gemma3", FAMILIES["Gemma3"]),
    "windows, two head dims": ("Gemma4", FAMILIES["Gemma4"]),
    "windows, null logits": ("GptOss", FAMILIES["GptOss"]),
    "states": ("Qwen3_5", FAMILIES["Qwen3_5"]),
}
DENSE32 = RungConfig("dense32", "dense32", "dense32")
LADDERS = {
    name: replace(kv, rungs=(DENSE32, *kv.rungs[1:]), narrow_windows=True)
    for name, kv in PRESETS.items()
    if name in ("int4", "kivi-2")
} | {
    "4 and 2": KVConfig(
        name="4 and 2", rungs=(DENSE32, uniform_rung(4), uniform_rung(2)), sink=32, eager=True, narrow_windows=True
    )
}
PLAIN = KVConfig(name="dense32", rungs=(DENSE32,))
# Of two orders of sums on the CPU at most .002 of the cost. A step that runs ahead may read a block a token later.
SHARE = 0.05
ROUNDING = 2e-4  # in the mean, of float32 alone


def floors(kv: KVConfig) -> list[str]:
    """The rung that each prompt's blocks step down to: all rungs by turns, the narrowest first."""
    names = [rung.name for rung in reversed(kv.rungs)]
    return [names[index % len(names)] for index in range(len(PROMPTS))]


def answers(folder: Path, device: str, kv: KVConfig) -> list[RequestOutput]:
    """Greedy answers to all prompts in one batch, whose blocks stand on all rungs."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, kv_floor=floor)
        for floor in floors(kv)
    ]
    with Engine(folder, kv=kv, kv_memory=ROOM, device=device, prefix_caching=False, **OPTIONS) as engine:
        outputs = engine.generate(PROMPTS, params)
    assert {name for output in outputs for name in output.kv.blocks} == {rung.name for rung in kv.rungs}
    return outputs


def scores(folder: Path, device: str, kv: KVConfig, outputs: list[RequestOutput]) -> tuple[list[float], list[float]]:
    """Of all tokens of ``outputs``, computed as if generated: log-probabilities, and how much less than the likeliest.

    A ladder of one rung has no floor to choose.
    """
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=1,
            num_prefill_tokens=len(output.prompt_token_ids),
            kv_floor=floor if kv is not PLAIN else None,
        )
        for output, floor in zip(outputs, floors(kv), strict=True)
    ]
    paths = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
    with Engine(folder, kv=kv, kv_memory=ROOM, device=device, prefix_caching=False, **OPTIONS) as engine:
        scored = engine.generate(paths, params)
    found, gaps = list[float](), list[float]()
    for output, score in zip(outputs, scored, strict=True):
        assert score.prompt_logprobs is not None
        entries = score.prompt_logprobs[len(output.prompt_token_ids) :]
        for token, entry in zip(output.outputs[0].token_ids, entries, strict=True):
            assert entry is not None
            found.append(entry[token].logprob)
            gaps.append(max(each.logprob for each in entry.values()) - entry[token].logprob)
    return found, gaps


def difference(left: list[float], right: list[float]) -> float:
    return mean(abs(a - b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("kv", LADDERS.values(), ids=LADDERS.keys())
@pytest.mark.parametrize(("family", "changes"), CASES.values(), ids=CASES.keys())
def test_codes_are_read_as_on_the_cpu(
    family: str, changes: dict[str, Any], kv: KVConfig, tmp_path: Path, report: list[str], device: str = "cuda"
) -> None:
    """Tokens that are generated one by one, and the same tokens given."""
    folder = save(family, tmp_path, changes)
    outputs = answers(folder, device, kv)
    generated = [
        entry[token].logprob
        for output in outputs
        for token, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs or [], strict=True)
    ]
    given = scores(folder, device, kv, outputs)[0]
    expected, gaps = scores(folder, "cpu", kv, outputs)
    cost = difference(expected, scores(folder, "cpu", PLAIN, outputs)[0])
    errors = {
        "generated": difference(generated, expected),
        "given": difference(given, expected),
        "from the likeliest": mean(gaps),
    }
    pairs = zip(outputs, answers(folder, "cpu", kv), strict=True)
    equal = sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in pairs)
    report.append(
        f"{family}, {kv.name}: {equal} of {len(outputs)} answers equal, codes cost {cost:.4f} a token, apart by "
        + ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    )
    assert max(errors.values()) <= SHARE * cost + ROUNDING
