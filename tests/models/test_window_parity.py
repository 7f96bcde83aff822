"""Greedy tokens of the engine equal transformers' for models whose layers have windows, in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from qkv_engine import Engine, RequestOutput, SamplingParams
from qkv_engine.config import KVConfig, RungConfig
from qkv_engine.models.loader import read_config

PROMPT_LENGTHS, NEW_TOKENS = (1, 33, 129, 300), 40
LAYERS = 3
SIZES = {"num_hidden_layers": LAYERS, "max_position_embeddings": 512}
PARAMS = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
WITH_SINK = KVConfig(name="sink", rungs=(RungConfig("dense32", "dense32", "dense32"),), sink=32)
MODELS = {
    "every layer": ("Mistral", {"sliding_window": 20}, [20] * LAYERS),
    "a window of a block": ("Mistral", {"sliding_window": 128}, [128] * LAYERS),
    "all but one": (
        "Qwen2",
        {"sliding_window": 150, "use_sliding_window": True, "max_window_layers": 1},
        [None, 150, 150],
    ),
    "all but every third": (
        "Gemma3",
        {"sliding_window": 150, "sliding_window_pattern": 3, "query_pre_attn_scalar": 30},
        [150, 150, None],
    ),
}


@pytest.mark.parametrize(("family", "changes", "windows"), MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("kv", ["fp32", WITH_SINK], ids=["fp32", "sink"])
def test_greedy_tokens_equal_transformers(
    family: str,
    changes: dict[str, object],
    windows: list[int | None],
    kv: str | KVConfig,
    make_reference: Callable[..., transformers.PreTrainedModel],
    tmp_path: Path,
):
    reference = make_reference(family, **SIZES, **changes)
    reference.save_pretrained(tmp_path)
    assert [spec.window for spec in read_config(tmp_path).attention] == windows
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 97, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    with Engine(tmp_path, kv=kv, kv_memory="8MiB", max_num_batched_tokens=48, max_model_len=512) as engine:
        outputs = engine.generate(prompts, PARAMS)
    check(reference, outputs)


@pytest.mark.parametrize(("family", "changes", "windows"), list(MODELS.values())[1:], ids=list(MODELS)[1:])
@pytest.mark.parametrize("kv", ["fp32", "auto", "int4"])
def test_tokens_under_pressure_and_on_shared_prefixes(
    family: str,
    changes: dict[str, object],
    windows: list[int | None],
    kv: str,
    make_reference: Callable[..., transformers.PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    """Requests that are preempted, and that begin alike. Where all layers keep 16 bits tokens are the reference's."""
    monkeypatch.setattr("qkv_engine.kv.manager.KVManager.admits", lambda *args: True)
    reference = make_reference(family, **SIZES, **changes)
    reference.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(0)
    head = torch.randint(5, 97, (280,), generator=generator).tolist()
    prompts = [head + torch.randint(5, 97, (n,), generator=generator).tolist() for n in (1, 40, 90, 150)]
    block = 2 * LAYERS * reference.config.num_key_value_heads * 128 * reference.config.head_dim * 4
    with Engine(
        tmp_path,
        kv=kv,
        kv_memory=5 * block,
        max_num_batched_tokens=48,
        max_model_len=512,
        dtype="float32",
    ) as engine:
        first = engine.generate(prompts[:1], PARAMS)
        outputs = engine.generate(prompts, PARAMS)
        stats = engine.stats()
    assert all(len(output.outputs[0].token_ids) == NEW_TOKENS for output in outputs)
    assert stats.prefix_hit_tokens > 0
    if kv == "fp32":
        assert stats.num_preemptions > 0 or None not in windows
        check(reference, first + outputs)


@pytest.mark.slow
def test_two_ranks_give_the_same_tokens(make_reference: Callable[..., transformers.PreTrainedModel], tmp_path: Path):
    family, changes, _ = MODELS["all but every third"]
    reference = make_reference(family, **SIZES, **changes)
    reference.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 97, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    options = {"kv": "fp32", "kv_memory": "4MiB", "max_num_batched_tokens": 48, "max_model_len": 512}
    with Engine(tmp_path, tensor_parallel=2, num_threads=1, **options) as engine:
        check(reference, engine.generate(prompts, PARAMS))


def check(reference: transformers.PreTrainedModel, outputs: list[RequestOutput]) -> None:
    """Every token is the reference's likeliest after those before it."""
    for output in outputs:
        tokens, start = output.outputs[0].token_ids, len(output.prompt_token_ids)
        with torch.inference_mode():
            logits = reference(torch.tensor([output.prompt_token_ids + tokens])).logits[0, start - 1 : -1]
        assert len(tokens) == NEW_TOKENS and logits.argmax(-1).tolist() == tokens
