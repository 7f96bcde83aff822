"""Child of ``test_calibrated``: Triton operations on calibrated uniform sides against the references."""

from __future__ import annotations

from functools import partial

import torch

from qkv_engine.kernels.formats import PageShape

from .calibrated_sides import calibrated_sides, calibrated_steps
from .format_cases import demote_case, seal_case, tile_case
from .interpreted import report


def main() -> None:
    cases = {}
    for head_dim, every in {64: 3, 80: 5}.items():
        shape = PageShape(2, 128, head_dim)
        sides = calibrated_sides(shape)[::every]
        cases[f"seal D{head_dim}"] = partial(seal_case, sides, torch.bfloat16)
        cases[f"tile D{head_dim}"] = partial(tile_case, sides)
        cases[f"demote D{head_dim}"] = partial(demote_case, calibrated_steps(shape)[::every])
    report(cases)


if __name__ == "__main__":
    main()
