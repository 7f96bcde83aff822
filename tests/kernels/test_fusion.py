"""Every launch says whether products and sums may be fused: Triton's default changes between versions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from qkv_engine.kernels.fusion import FUSED, UNFUSED

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for folder in ("kernels", "studies", "tests/kernels") for path in (ROOT / folder).rglob("*.py")]
EXACT = {"seal_kernel", "demote_kernel", "peak_kernel", "weigh_kernel", "limit_kernel", "pick_kernel", "edit_kernel"}


def launches() -> Iterator[tuple[str, str, set[str]]]:
    """Place, kernel and unpacked options of every ``kernel[grid](...)``."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                kernel = ast.unparse(node.func.value)
                if kernel.endswith("kernel"):
                    unpacked = {ast.unparse(option.value) for option in node.keywords if option.arg is None}
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", kernel, unpacked


def test_every_launch_says_whether_to_fuse() -> None:
    found = list(launches())
    assert len(found) >= 20
    assert [place for place, _, options in found if len(options & {"FUSED", "UNFUSED"}) != 1] == []
    assert (FUSED, UNFUSED) == ({"enable_fp_fusion": True}, {"enable_fp_fusion": False})


def test_kernels_whose_bytes_are_compared_are_not_fused() -> None:
    unfused = {kernel for _, kernel, options in launches() if "UNFUSED" in options}
    assert unfused >= EXACT
