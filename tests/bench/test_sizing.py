"""Memory in requests: exactly so many of them run together at 16 bits."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from qkv_engine import Engine
from qkv_engine.bench import sizing
from qkv_engine.bench.batches import parse_requests
from qkv_engine.bench.sizing import largest_batch, make_ladder, nbytes_for
from qkv_engine.errors import ConfigError
from qkv_engine.models.registry import config_from_hf
from qkv_engine.models.shapes import SHAPES
from qkv_engine.presets import PRESETS


def test_sizes_in_requests() -> None:
    assert (parse_requests("8x"), parse_requests(" 12 X ")) == (8, 12)
    assert [parse_requests(size) for size in ("8GiB", "50%", "8", None)] == [None] * 4
    for size in ("0x", "9999x"):
        with pytest.raises(ConfigError, match="not a number of requests"):
            parse_requests(size)


@pytest.mark.parametrize(("num_requests", "num_tokens"), [(1, 1), (2, 129), (8, 300), (8, 2800), (3, 8000)])
def test_the_engine_runs_that_many_together_and_no_more(num_requests: int, num_tokens: int) -> None:
    nbytes = nbytes_for(config_from_hf(SHAPES["demo"]), num_requests, num_tokens)
    needed = num_requests * -(-num_tokens // 128) * 2**20
    assert needed <= nbytes <= 1.06 * needed + 2**20
    if nbytes < 2**27:
        with Engine(kv="bf16", kv_memory=nbytes, max_model_len=max(2, num_tokens)) as engine:
            assert f"at most {num_requests} request" in engine.describe()[1]


@pytest.mark.parametrize("num_tokens", [2000, 20_000])
def test_windows_alone_hold_so_many_requests_whatever_their_length(num_tokens: int) -> None:
    """Four blocks of a window of 300 tokens, 1 MiB each at 16 bits."""
    config = config_from_hf(SHAPES["demo"])
    config = replace(config, attention=tuple(spec._replace(window=300) for spec in config.attention))
    ladder = make_ladder(PRESETS["bf16"], config, torch.bfloat16)
    assert [largest_batch(ladder, n * 2**20, num_tokens) for n in (3, 4, 7, 40)] == [0, 1, 1, 10]
    assert nbytes_for(config, 10, num_tokens) == 40 * 2**20


def test_states_are_part_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 24 layers take as much as 12 blocks; each size that is tried makes books anew."""
    make_tables = Mock(wraps=sizing.make_tables)
    monkeypatch.setattr(sizing, "make_tables", make_tables)
    config = config_from_hf(SHAPES["qwen3.5-4b"])
    nbytes = nbytes_for(config, 20, 1000)
    ladder = make_ladder(PRESETS["bf16"], config, torch.bfloat16)
    assert make_tables.call_count <= 5 and largest_batch(ladder, nbytes, 1000) == 20
    assert nbytes >= 20 * (48 + 8 * 4) * 2**20
