"""Greedy tokens of the whole engine equal transformers', through chunked prefill and forced preemption.

Our tokens are checked by one forward pass of transformers over prompt and output: each must be its argmax there. By
induction that is its own greedy output, and a difference is reported where it arises. The demo model is also
compared with ``generate`` itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from qkv_engine import Engine, RequestOutput, SamplingParams

from .test_parity import VARIANTS

NEW_TOKENS = 75
PROMPT_LENGTHS = (1, 3, 31, 64, 127, 128, 150, 200)
PARAMS = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)


def ragged_prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(5, vocab_size) for _ in range(n)] for n in PROMPT_LENGTHS]


def run_under_pressure(folder: str | None, prompts: list[list[int]], block_nbytes: int) -> list[RequestOutput]:
    """A ragged batch in chunks of at most 48 tokens, with blocks for half of what the batch needs at once."""
    with Engine(
        folder, kv="fp32", kv_memory=10 * block_nbytes, max_num_seqs=8, max_num_batched_tokens=48, max_model_len=512
    ) as engine:
        outputs = engine.generate(prompts, PARAMS)
        stats = engine.stats()
        assert stats.num_preemptions > 0
        assert stats.kv_bytes_used == 0
    return outputs


def assert_greedy(reference: transformers.PreTrainedModel, output: RequestOutput, num_tokens: int = NEW_TOKENS) -> None:
    tokens, start = output.outputs[0].token_ids, len(output.prompt_token_ids)
    assert len(tokens) == num_tokens
    with torch.inference_mode():
        logits = reference(torch.tensor([output.prompt_token_ids + tokens])).logits[0, start - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens
    theirs = logits.log_softmax(-1)[torch.arange(num_tokens), torch.tensor(tokens)]
    entries = output.outputs[0].logprobs
    assert entries is not None
    ours = torch.tensor([entry[token].logprob for entry, token in zip(entries, tokens, strict=True)])
    assert (ours - theirs).abs().max() < 1e-4


@pytest.fixture(autouse=True)
def _overcommitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission that looks at nothing, so that memory runs out and requests are preempted."""
    monkeypatch.setattr("qkv_engine.kv.manager.KVManager.admits", lambda *args: True)


@pytest.mark.parametrize(
    ("family", "changes"),
    [*VARIANTS[::2], *(pytest.param(*each, marks=pytest.mark.slow) for each in VARIANTS[1::2])],
    ids=str,
)
def test_greedy_tokens_equal_transformers(
    family: str, changes: dict, make_reference: Callable[..., transformers.PreTrainedModel], tmp_path: Path
):
    longer = {key: 1024 for key in ("sliding_window",) if changes.get(key)} | {"max_position_embeddings": 1024}
    reference = make_reference(family, **changes | longer)
    reference.save_pretrained(tmp_path)
    config = reference.config
    block_nbytes = config.num_hidden_layers * 2 * config.num_key_value_heads * 128 * config.head_dim * 4
    prompts = ragged_prompts(config.vocab_size)
    for output in run_under_pressure(str(tmp_path), prompts, block_nbytes):
        assert_greedy(reference, output)


def test_the_demo_model_equals_transformers_generate(demo_folder: Path):
    reference = transformers.AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32).eval()
    prompts = ragged_prompts(reference.config.vocab_size)
    outputs = run_under_pressure(None, prompts, 8 * 2 * 2 * 128 * 128 * 4)
    for output in outputs:
        assert_greedy(reference, output)
    generated = reference.generate(
        torch.tensor([prompts[4]]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
    )
    eos_free = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS)
    with Engine(kv="fp32", kv_memory="64MiB") as engine:
        ours = engine.generate([prompts[4]], eos_free)[0].outputs[0].token_ids
    assert ours == generated[0, PROMPT_LENGTHS[4] :].tolist()
