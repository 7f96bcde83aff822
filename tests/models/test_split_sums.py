"""Products left in splits: only where a norm with a residual reads them, in every family, and the same logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qkv_engine.kernels.linear import (
    Addend,
    LateProduct,
    SplitSums,
    linear,
    linear_addend,
    pack_steadily,
    pack_weight,
    reference,
)
from qkv_engine.kernels.rms_norm import add_rms_norm
from qkv_engine.models import layers
from qkv_engine.models.config import ModelConfig
from qkv_engine.models.layers import RowParallelLinear
from qkv_engine.models.ranks import Part, Ranks
from qkv_engine.models.registry import FAMILIES

from .test_families import FAMILY_CASES, IDS, case_id, load_for
from .test_parity import VARIANTS

CASES = dict([*VARIANTS, *FAMILY_CASES])
# Products in splits of a layer: attention's and the MLP's, or attention's beside experts.
IN_LAYERS = Counter(
    {f"{name}ForCausalLM": 2 for name in ("Glm", "HunYuanDenseV1", "Llama", "Ministral", "Ministral3", "Mistral")}
    | {f"{name}ForCausalLM": 2 for name in ("Phi3", "Qwen2", "Qwen3", "Qwen3_5", "SeedOss", "SmolLM3")}
    | {f"{name}ForCausalLM": 1 for name in ("GptOss", "Mixtral", "Olmoe", "Qwen3Moe", "Qwen3Next", "Qwen3_5Moe")}
)


def num_products(config: ModelConfig) -> int:
    """Products in splits of a step."""
    num_layers = len(config.ropes)
    dense: frozenset[int] = getattr(config, "dense_layers", frozenset())
    return num_layers * IN_LAYERS[config.architecture] + len(dense)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[Addend]:
    """Has layers leave every product that they may, as rows do on a GPU: those that they left.

    By turns they are in two splits, as of few rows, and not yet computed, as of many.
    """
    found: list[Addend] = []

    def leave(x: Tensor, weight: Any, bias: Tensor | None = None) -> Addend:
        out = linear(x, weight).float()
        late = bias is None and len(found) % 2
        splits = SplitSums(torch.stack((out / 4, out - out / 4)), bias)
        found.append(LateProduct(out, torch.eye(out.shape[1])) if late else splits)
        return found[-1]

    def add(x: Tensor | SplitSums, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        whole = reference.add_sums(x, residual.dtype) if isinstance(x, SplitSums) else x
        return add_rms_norm(whole, residual, weight, eps)

    monkeypatch.setattr(layers, "linear_addend", leave)
    monkeypatch.setattr(layers, "add_rms_norm", add)
    return found


@pytest.mark.parametrize(("family", "changes"), CASES.items(), ids=case_id)
def test_norms_alone_read_splits(
    family: str,
    changes: dict[str, Any],
    saved: Callable[..., Any],
    logits_of: Callable[..., Tensor],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    saved(family, changes)
    loaded = load_for(tmp_path)
    expected = logits_of(loaded, IDS[:40])
    left = request.getfixturevalue("left")
    assert (logits_of(loaded, IDS[:40]) - expected).norm() <= 1e-4 * expected.norm()
    assert len(left) == num_products(loaded.config)


def test_every_architecture_is_tested() -> None:
    assert {f"{family}ForCausalLM" for family in CASES} == set(FAMILIES) >= set(IN_LAYERS)


def test_what_leaves_no_splits(left: list[Addend]) -> None:
    """One of several ranks; any layer that is called; products on a CPU, and those of a deterministic engine."""
    x, weight, bias = torch.randn(16, 64), torch.randn(64, 64), torch.randn(64)
    ranks = RowParallelLinear(Part(64, 0, 128), {"o_proj": 64}, Ranks(0, 2), bias=False)
    alone = RowParallelLinear(Part.all(64), {"o_proj": 64}, Ranks(), bias=False)
    assert all(isinstance(out, Tensor) for out in (ranks.sums(x), ranks(x), alone(x))) and not left
    assert isinstance(alone.sums(x), SplitSums) and isinstance(alone.sums(x), LateProduct)
    for packed in (weight, pack_weight(weight.clone()), pack_steadily(weight)):
        assert torch.equal(linear_addend(x, packed, bias), linear(x, packed, bias))
