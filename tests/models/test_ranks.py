"""A model on several tensor-parallel ranks, in threads: each has its part of the weights, all have the same result."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from qkv_engine.errors import ConfigError
from qkv_engine.models.key_scale import fold_key_scale
from qkv_engine.models.loader import LoadedModel, ModelSource, find_model, load_weights, weights_nbytes
from qkv_engine.models.ranks import Part, Ranks

from .conftest import CPU, DenseBatch

IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
STATES = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "shared_expert_intermediate_size": 12,
    "layer_types": ["linear_attention", "full_attention"],
}
MODELS = [
    ("Llama", {"vocab_size": 96}),
    ("Llama", {"num_key_value_heads": 1, "vocab_size": 96}),
    ("Llama", {"attention_bias": True, "mlp_bias": True}),
    ("Qwen2", {"tie_word_embeddings": True}),
    ("Qwen3", {"vocab_size": 96}),
    ("Cohere2", {"sliding_window": 5}),
    ("Gemma3", {"sliding_window": 5}),
    ("Gemma4", {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "global_head_dim": 32}),
    ("GptOss", {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 5}),
    ("Granite", {"residual_multiplier": 0.5}),
    ("GraniteMoe", {"num_local_experts": 5, "num_experts_per_tok": 3}),
    ("GraniteMoeShared", {"num_local_experts": 5, "shared_intermediate_size": 24}),
    ("Glm4", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "pad_token_id": 0}),
    ("HunYuanDenseV1", {}),
    ("Ministral3", {}),
    ("Mixtral", {"num_local_experts": 5, "sliding_window": 5}),
    ("Olmo2", {"num_key_value_heads": 4}),
    ("Olmo2", {"num_key_value_heads": 2}),
    ("Olmoe", {"num_experts": 5, "num_experts_per_tok": 3, "pad_token_id": 0, "eos_token_id": 2}),
    ("Phi3", {"pad_token_id": 0}),
    ("Qwen3Next", STATES | {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20}),
    ("Qwen3_5", STATES),
    ("Qwen3Moe", {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "mlp_only_layers": [1]}),
]


@dataclass
class Meeting:
    """A place where the ranks of threads exchange tensors."""

    size: int
    tensors: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.size, timeout=60)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.tensors[rank] = x.clone()
        self.barrier.wait()
        found = [self.tensors[each] for each in range(self.size)]
        self.barrier.wait()
        return found


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    """A rank among threads."""

    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x)).sum(0)

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self.meeting.exchange(self.rank, x), dim=-1)


def on_ranks(size: int, work: Callable[[Ranks], Tensor]) -> list[Tensor]:
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, [ThreadRanks(rank, size, meeting) for rank in range(size)]))


def logits_of(loaded: LoadedModel, ranks: Ranks, rows: Tensor | None = None) -> Tensor:
    batch = DenseBatch(loaded.config.share(ranks.size).attention)
    with torch.inference_mode():
        return loaded.model.compute_logits(loaded.model(IDS, torch.arange(len(IDS)), batch, rows))


def saved(folder: Path, make_reference: Callable[..., Any], family: str, **changes: Any) -> ModelSource:
    make_reference(family, **changes).save_pretrained(folder)
    return find_model(str(folder))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("family", "changes"), MODELS, ids=str)
def test_all_ranks_compute_the_logits_of_one(size, family, changes, make_reference, tmp_path):
    """Those of all tokens, then of some."""
    source, rows = saved(tmp_path, make_reference, family, **changes), torch.tensor([7, 2, 2])

    def run(ranks: Ranks) -> Tensor:
        loaded = load_weights(source, dtype=torch.float32, device=CPU, ranks=ranks)
        return torch.cat((logits_of(loaded, ranks), logits_of(loaded, ranks, rows)))

    expected = run(Ranks())
    torch.testing.assert_close(expected[len(IDS) :], expected[rows], rtol=1e-4, atol=1e-5)
    for logits in on_ranks(size, run):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_a_rank_holds_no_more_than_its_part(make_reference, tmp_path):
    source = saved(tmp_path, make_reference, "Qwen3", vocab_size=96)
    whole, half = (
        load_weights(source, dtype=torch.float32, device=CPU, ranks=Ranks(0, size), pack=False).model for size in (1, 2)
    )
    sizes = {name: weight.numel() for name, weight in whole.named_parameters()}
    held = {name: weight.numel() for name, weight in half.named_parameters()}
    split = {name for name in sizes if "proj.weight" in name or name.startswith("lm_head") or "qk_norm" in name}
    assert {name for name in sizes if held[name] != sizes[name]} == split
    assert all(2 * held[name] == sizes[name] for name in split)
    assert 4 * sum(held.values()) == weights_nbytes(source.config, torch.float32, 2)


def test_random_weights_that_ranks_share_are_equal(make_reference, tmp_path):
    source = saved(tmp_path, make_reference, "Llama", vocab_size=96)
    first, second = (
        load_weights(source, dtype=torch.float32, device=CPU, load_format="random", ranks=Ranks(rank, 2), pack=False)
        for rank in range(2)
    )
    for (name, one), (_, other) in zip(first.model.named_parameters(), second.model.named_parameters(), strict=True):
        is_split = "proj" in name or name.startswith("lm_head")
        assert torch.equal(one, other) is not is_split, name


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_a_key_scale_is_folded_by_rank(family, make_reference, tmp_path):
    source = saved(tmp_path, make_reference, family)
    scale = torch.rand(2, 2, 8, generator=torch.Generator().manual_seed(0)).add(0.5).tolist()

    def run(ranks: Ranks) -> Tensor:
        loaded = load_weights(
            source, dtype=torch.float32, device=CPU, ranks=ranks, prepare=lambda net: fold_key_scale(net, scale)
        )
        return logits_of(loaded, ranks)

    expected = run(Ranks())
    for logits in on_ranks(2, run):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["HunYuanDenseV1", "Olmo2"])
def test_a_key_scale_is_refused_where_keys_are_normed_otherwise(family, make_reference, tmp_path):
    source = saved(tmp_path, make_reference, family)
    net = load_weights(source, dtype=torch.float32, device=CPU, pack=False).model
    with pytest.raises(ConfigError, match="key_scale"):
        fold_key_scale(net, torch.ones(2, 2, 8).tolist())


def test_parts_are_equal_and_shared_where_there_are_fewer_features_than_ranks() -> None:
    assert [Ranks(rank, 2).part(8) for rank in range(2)] == [Part(4, 0, 8), Part(4, 4, 8)]
    assert [Ranks(rank, 4).part(2) for rank in range(4)] == [Part(1, 0, 2), Part(1, 0, 2), Part(1, 1, 2), Part(1, 1, 2)]
    assert Part(1, 1, 2).times(16) == Part(16, 16, 32)


@pytest.mark.parametrize("size", [3, 8])
def test_a_model_that_cannot_be_split_is_refused(size, make_reference, tmp_path):
    config = saved(tmp_path, make_reference, "Llama").config
    with pytest.raises(ConfigError, match="split") as caught:
        config.check_ranks(size)
    assert caught.value.field == "tensor_parallel" and caught.value.value == size
