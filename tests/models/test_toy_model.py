"""An architecture that only the tests register: its logits, its greedy tokens in the engine, and its refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qkv_engine import Engine, ModelError, SamplingParams
from qkv_engine.models.loader import LoadedModel

from ..toy_model.reference import logits as plain_logits
from ..toy_model.registered import NAME, registered
from .tiny import CONFIG, WEIGHTS, tiny_tensors, write_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
IDS = torch.arange(200) * 7 % 61 + 3


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tiny_tensors(CONFIG).items() if "post_attention" not in name}


@pytest.fixture
def folder(tmp_path: Path, tensors: dict[str, Tensor]) -> Path:
    write_tiny(tmp_path, architectures=[NAME], model_type="parallel", rope_scaling=None)
    save_file(tensors, tmp_path / WEIGHTS)
    return tmp_path


@pytest.fixture
def _registered() -> Iterator[None]:
    with registered():
        yield


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("steps", [(), (1, 1, 130, 68)], ids=["at-once", "in-steps"])
def test_logits_are_those_of_the_reference(
    folder: Path,
    tensors: dict[str, Tensor],
    steps: tuple[int, ...],
    load: Callable[..., LoadedModel],
    logits_of: Callable[..., Tensor],
) -> None:
    loaded = load(folder)
    expected = plain_logits(tensors, loaded.config, IDS)
    torch.testing.assert_close(logits_of(loaded, IDS, steps), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_registered")
def test_greedy_tokens_are_those_of_the_reference(
    folder: Path, tensors: dict[str, Tensor], load: Callable[..., LoadedModel]
) -> None:
    config = load(folder).config
    with Engine(folder, kv="fp32", kv_memory="8MiB", device="cpu") as engine:
        outputs = engine.generate([IDS[:5].tolist(), IDS.tolist()], GREEDY)
    for output in outputs:
        ids = output.prompt_token_ids + output.outputs[0].token_ids
        rows = plain_logits(tensors, config, torch.tensor(ids))[len(output.prompt_token_ids) - 1 : -1]
        assert rows.argmax(-1).tolist() == output.outputs[0].token_ids


@pytest.mark.usefixtures("_registered")
def test_its_blocks_step_down_like_any_others(folder: Path) -> None:
    with Engine(folder, kv="int4", kv_memory="8MiB", device="cpu") as engine:
        output = engine.generate([IDS.tolist()], GREEDY)[0]
    assert output.error is None and output.kv.lowest_bits == 4


def test_it_is_refused_where_nobody_registered_it(folder: Path, load: Callable[..., LoadedModel]) -> None:
    with pytest.raises(ModelError, match=f"architecture='{NAME}'.*Supported: .*Llama"):
        load(folder)
