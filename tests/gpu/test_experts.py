"""Experts that stay quantized on a GPU in bfloat16: log-probabilities beside those of a CPU, which unpacks them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..models.weights import test_mxfp4
from ..models.weights.writers import FORMS, quantize
from .test_families import SIZES, save
from .test_weights import ERROR_RATIO, mean_error

pytestmark = pytest.mark.gpu

SHAPE = {
    **SIZES,
    "moe_intermediate_size": 128,
    "intermediate_size": 128,
    "num_experts": 16,
    "num_local_experts": 16,
    "num_experts_per_tok": 3,
    "tie_word_embeddings": False,
}
QWEN = ["int4 zeros", "int8 group", "fp8 blocks", "fp8 channel", "awq", "gptq"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Plain checkpoints by family."""
    return {family: save(family, tmp_path_factory.mktemp(family), SHAPE) for family in ("Qwen3Moe", "GptOss")}


def check(folder: Path, plain: Path, weights: str | None, ratio: float, report: list[str]) -> None:
    """Not much more error than plain matrices have, whether steps are captured when met or at start."""
    expected = mean_error(plain, None, "lazy")[0]
    lazy, tokens = mean_error(folder, weights, "lazy")
    full, again = mean_error(folder, weights, "full")
    report.append(f"{folder.name} {weights or ''}: mean error {lazy:.4f}, at start {full:.4f}; plain {expected:.4f}")
    assert max(lazy, full) <= ratio * expected
    assert tokens == again


@pytest.mark.parametrize("form", QWEN)
def test_checkpoints(form: str, sources: dict[str, Path], tmp_path: Path, report: list[str]) -> None:
    folder = tmp_path / form.replace(" ", "-")
    plain = quantize(sources["Qwen3Moe"], folder, FORMS[form], left=())
    check(folder, plain, None, ERROR_RATIO["fp8"] if form.startswith("fp8") else 2.0, report)


def test_mxfp4_experts(sources: dict[str, Path], tmp_path: Path, report: list[str]) -> None:
    plain = test_mxfp4.write(sources["GptOss"], tmp_path / "mxfp4")
    check(tmp_path / "mxfp4", plain, None, 2.0, report)


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
@pytest.mark.parametrize("weights", ERROR_RATIO)
def test_quantized_on_load(family: str, weights: str, sources: dict[str, Path], report: list[str]) -> None:
    check(sources[family], sources[family], weights, ERROR_RATIO[weights], report)
