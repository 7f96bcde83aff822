"""Every family computes some tokens' hidden states as it does all: its last layer leaves the others out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qkv_engine.models.registry import FAMILIES

from .test_families import FAMILY_CASES, HYBRID, IDS, LINEAR, ODD, case_id, load_for

CASES: list[tuple[str, dict[str, Any]]] = [
    *FAMILY_CASES,
    ("Llama", ODD),
    ("Llama", ODD | {"num_hidden_layers": 1}),
    ("Qwen3", ODD),
    ("Qwen3_5", HYBRID | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}),
]
BEHIND_ATTENTION = {"mlp", "shared_mlp", "o_proj", "out_proj", "gate", "projection"}
FIRST, ROWS = 41, torch.tensor([18, 0, 7, 7, 3])


def watch(net: nn.Module) -> dict[int, set[int]]:
    """Numbers of rows that each layer's modules behind attention are called with, by layer."""
    seen: dict[int, set[int]] = defaultdict(set)

    def spied(layer: int, call: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def spy(x: Tensor) -> Any:
            seen[layer].add(len(x))
            return call(x)

        return spy

    for number, layer in enumerate(net.model.layers):
        for name, module in layer.named_modules():
            if name.rpartition(".")[2] in BEHIND_ATTENTION:
                vars(module)["forward"] = spied(number, module.forward)
                vars(module)["sums"] = spied(number, module.sums)
    return seen


@pytest.mark.parametrize(("family", "changes"), CASES, ids=case_id)
def test_hidden_states_of_rows_are_those_of_all(
    family: str, changes: dict[str, Any], saved: Callable[..., Any], dense_batch: Any, tmp_path: Path
) -> None:
    """Of a token in a prompt's middle, then of some behind it, which find the K and V or the states of all before."""
    saved(family, changes)
    loaded = load_for(tmp_path)
    net, num_layers = loaded.model, len(loaded.config.ropes)
    whole, some = (dense_batch(loaded.config.attention) for _ in range(2))
    with torch.inference_mode():
        for ids, first, rows in ((IDS[:FIRST], 0, ROWS[:1]), (IDS[FIRST:60], FIRST, ROWS)):
            positions = torch.arange(first, first + len(ids))
            expected = net(ids, positions, whole)
            seen = watch(net)
            found = net(ids, positions, some, rows)
            assert seen == {layer: {len(ids) if layer + 1 < num_layers else len(rows)} for layer in range(num_layers)}
            torch.testing.assert_close(found, expected[rows], rtol=1e-5, atol=1e-5)


def test_every_architecture_is_tested() -> None:
    assert {f"{family}ForCausalLM" for family, _ in CASES} == set(FAMILIES)


def test_layers_with_a_state_may_come_last() -> None:
    assert any(changes.get("layer_types", [None])[-1] == LINEAR for _, changes in CASES)
