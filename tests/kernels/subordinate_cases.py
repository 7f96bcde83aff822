"""Child of ``test_subordinate``: Triton seals and demotions of subordinate sides against the references."""

from __future__ import annotations

from functools import partial

import torch

from qkv_engine.kernels.formats import PageShape

from .format_cases import demote_case, seal_case
from .interpreted import report
from .subordinate_sides import all_pairs, pair_steps


def main() -> None:
    shape = PageShape(2, 128, 80)
    sides, steps = all_pairs(shape), pair_steps(shape)
    quarters = [i for i in range(len(sides)) if i // 4 % 4 == 0]  # a quarter of the pairs
    cases = {
        "seal": partial(seal_case, [sides[i] for i in quarters], torch.bfloat16),
        "demote": partial(demote_case, [steps[i] for i in range(len(steps)) if i // 4 % 5 == 0]),
    }
    report(cases)


if __name__ == "__main__":
    main()
