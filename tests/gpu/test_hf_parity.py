"""The demo model in bf16 on a GPU beside transformers: same arithmetic, other roundings.

Two programs that round differently cannot agree to the last token. So each is measured by transformers in float32 on
the same tokens: we may be about as far from it as transformers in bf16 is.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from qkv_engine import Engine, SamplingParams

pytestmark = pytest.mark.gpu

DEMO = Path(__file__).resolve().parents[2] / "engine" / "assets" / "demo"
DEVICE = "cuda"
NEW_TOKENS = 128
PROMPT_LENGTHS = (1, 3, 31, 127, 128, 129, 300, 700)
QUESTIONS = ("What is 47*86?", "What is 12+30?", "Tell me a story.", "Why?")
TOP = 5
# Errors are of sums over thousands of values, whose roundings differ at random: 1.25 leaves room for chance alone.
ERROR_RATIO = 1.25


def make_prompts(engine: Engine) -> list[list[int]]:
    """Random tokens of all lengths, and questions."""
    rng = random.Random(0)
    prompts = [[rng.randrange(5, 1000) for _ in range(n)] for n in PROMPT_LENGTHS]
    assert engine.tokenizer is not None
    return prompts + [engine.tokenizer.chat_prompt([{"role": "user", "content": text}])[1] for text in QUESTIONS]


def generate(model: transformers.PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of transformers for all prompts at once, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=DEVICE)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=DEVICE)
    found = model.generate(
        ids, attention_mask=mask, do_sample=False, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, pad_token_id=0
    )
    return found[:, width:].tolist()


@torch.inference_mode()
def their_logprobs(model: transformers.PreTrainedModel, paths: list[list[int]]) -> list[Tensor]:
    """Log-probabilities [tokens - 1, V] float32 of what follows each token of each path."""
    return [model(torch.tensor([path], device=DEVICE)).logits[0, :-1].float().log_softmax(-1) for path in paths]


def our_logprobs(engine: Engine, paths: list[list[int]]) -> tuple[list[dict[int, float]], list[int]]:
    """Along all paths in one batch: at each position log-probabilities by token, and the likeliest token."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=TOP)
    values, best = [], []
    for output in engine.generate(paths, params):
        assert output.prompt_logprobs is not None
        for entries in output.prompt_logprobs[1:]:
            assert entries is not None
            values.append({token: entry.logprob for token, entry in entries.items()})
            best.append(next(token for token, entry in entries.items() if entry.rank == 1))
    return values, best


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def test_bf16_is_as_near_to_float32_as_transformers(report: list[str]) -> None:
    half, exact = (
        transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=dtype).eval().to(DEVICE)
        for dtype in (torch.bfloat16, torch.float32)
    )
    with Engine(kv="bf16", kv_memory="1GiB", device=DEVICE, dtype="bfloat16") as engine:
        prompts = make_prompts(engine)
        theirs = generate(half, prompts)
        greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS)
        ours = [output.outputs[0].token_ids for output in engine.generate(prompts, greedy)]
        paths = [prompt + tokens for prompt, tokens in zip(prompts, theirs, strict=True)]
        values, best = our_logprobs(engine, paths)
    check_paths(values, best, torch.cat(their_logprobs(half, paths)), torch.cat(their_logprobs(exact, paths)), report)
    check_tokens(prompts, ours, theirs, half, report)


def check_paths(
    values: list[dict[int, float]], best: list[int], half: Tensor, exact: Tensor, report: list[str]
) -> None:
    """On the path of transformers in bf16, token by token."""
    rows = torch.tensor([row for row, entries in enumerate(values) for _ in entries], device=DEVICE)
    tokens = torch.tensor([token for entries in values for token in entries], device=DEVICE)
    found = torch.tensor([x for entries in values for x in entries.values()], device=DEVICE)
    us, them = (relative_error(x, exact[rows, tokens]) for x in (found, half[rows, tokens]))
    us_alike, them_alike, alike = (
        float((a == b).float().mean())
        for a, b in (
            (torch.tensor(best, device=DEVICE), exact.argmax(-1)),
            (half.argmax(-1), exact.argmax(-1)),
            (torch.tensor(best, device=DEVICE), half.argmax(-1)),
        )
    )
    report.append(
        f"bf16 against float32, {len(best):,} positions: relative error of log-probabilities {us:.2e}, transformers "
        f"{them:.2e}; same likeliest token {us_alike:.2%}, transformers {them_alike:.2%}, each other {alike:.2%}"
    )
    assert us <= ERROR_RATIO * them
    assert 1 - us_alike <= ERROR_RATIO * (1 - them_alike) + 0.005  # ties are few, and fall as they may


def check_tokens(
    prompts: list[list[int]],
    ours: list[list[int]],
    theirs: list[list[int]],
    half: transformers.PreTrainedModel,
    report: list[str],
) -> None:
    """Our greedy tokens part from those of transformers only where two tokens are as good as equal to it."""
    same, gaps = 0, []
    for prompt, mine, reference in zip(prompts, ours, theirs, strict=True):
        until = next((i for i, pair in enumerate(zip(mine, reference, strict=True)) if pair[0] != pair[1]), NEW_TOKENS)
        same += until
        if until < NEW_TOKENS:
            path = prompt + reference[: until + 1]
            logprobs = their_logprobs(half, [path])[0][-1]
            gaps.append(float(logprobs[reference[until]] - logprobs[mine[until]]))
    total = NEW_TOKENS * len(prompts)
    report.append(
        f"greedy tokens equal to generate's up to the first that differs: {same / total:.1%} of {total:,}; "
        f"{len(gaps)} of {len(prompts)} requests part, where transformers prefers its token by at most "
        f"{max(gaps, default=0.0):.3f}"
    )
    assert max(gaps, default=0.0) <= 0.5  # two bf16 roundings of logits of up to 32 on either side
