"""Frequencies of released rope settings against transformers', and the rotation against complex multiplication."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qkv_engine.kernels.rope_kv_write.cpu import rotate
from qkv_engine.models.registry import config_from_hf
from qkv_engine.models.rope import RopeConfig, RotaryEmbedding
from qkv_engine.models.shapes import SHAPES

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = SHAPES["llama-3.1-8b"]["rope_scaling"] | {"rope_theta": 5e5}
RELEASED = [
    YARN,
    YARN | {"truncate": False},
    YARN | {"beta_fast": 20.0, "beta_slow": 3.0, "factor": 7.5},
    YARN | {"factor": None},
    YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8},
    YARN | {"attention_factor": 1.25},
    YARN | {"factor": 1.0},
    LLAMA3,
    LLAMA3 | {"factor": 32.0},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
]


@pytest.mark.parametrize("rope", RELEASED, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_frequencies_equal_transformers(rope, head_dim):
    changes = {"head_dim": head_dim, "max_position_embeddings": 131072, "rope_parameters": rope}
    reference = LlamaConfig(**changes)
    expected, attention_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](reference, torch.device("cpu"))
    ours = config_from_hf({**SHAPES["llama-3.1-8b"], "rope_scaling": None, **changes}).ropes[0]
    assert torch.allclose(ours.inverse_frequencies(head_dim), expected, rtol=2e-6, atol=0)
    assert ours.attention_factor == pytest.approx(attention_factor, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_turns_pairs_by_position_times_frequency(dtype):
    config = RopeConfig(theta=100.0)
    cos, signed_sin = RotaryEmbedding(config, 8)(torch.tensor([0, 5, 100_000]))
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = torch.empty_like(x)
    rotate(x, cos, signed_sin, out=out)
    assert out.dtype == dtype and torch.equal(out[0], x[0])
    for n, position in enumerate([0, 5, 100_000]):
        for i in range(4):
            angle = torch.tensor(position * (1.0 / 100.0 ** (2 * i / 8)), dtype=torch.float32)
            pair = torch.complex(x[n, :, i].float(), x[n, :, i + 4].float())
            turned = pair * torch.polar(torch.tensor(1.0), angle)
            close = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 or n == 2 else {"atol": 1e-5}
            assert torch.allclose(out[n, :, i].float(), turned.real, **close)
            assert torch.allclose(out[n, :, i + 4].float(), turned.imag, **close)
    rotate(x, cos, signed_sin, out=x)
    assert torch.equal(x, out)
