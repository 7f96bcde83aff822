"""Bugs put into what a shrink of memory asks of blocks on purpose, each with a seed that shows it."""

from __future__ import annotations

from .mutants_cases import Bug

SHRINK_BUGS = (
    Bug(
        "cached blocks step down for a shrink that lacks nothing",
        "pressure",
        "Pressure.shrink",
        "not self.space.shrink()",
        "self.space.shrink() is None",
        case="resizes",
        seed=9000,
    ),
    Bug(
        "cached blocks are given up for a shrink before they step down",
        "pressure",
        "Pressure.shrink",
        "self._step_down_idle(RELIEF_BLOCKS, self.space.shortage_of_shrink())",
        "False",
        case="resizes",
        seed=9002,
    ),
    Bug(
        "a shrink lets many cached blocks step down at once",
        "pressure",
        "Pressure.shrink",
        "RELIEF_BLOCKS",
        "10 * RELIEF_BLOCKS",
        case="resizes",
        seed=9009,
    ),
    Bug(
        "a shrink lets cached blocks step down one at a time",
        "pressure",
        "Pressure.shrink",
        "RELIEF_BLOCKS",
        "1",
        case="resizes",
        seed=9002,
    ),
    Bug(
        "cached blocks step down for a shrink again and again",
        "pressure",
        "Pressure.shrink",
        "if self._step_down_idle(RELIEF_BLOCKS, self.space.shortage_of_shrink()):\n    break",
        "if self._step_down_idle(RELIEF_BLOCKS, self.space.shortage_of_shrink()):\n    continue",
        case="resizes",
        seed=9009,
    ),
    Bug(
        "cached blocks are kept from a shrink",
        "pressure",
        "Pressure.shrink",
        "not self.space.evict()",
        "True",
        case="resizes",
        seed=9002,
    ),
    Bug(
        "cached blocks are all that a shrink takes",
        "pressure",
        "Pressure.shrink",
        "self._step_down_for_shrink()",
        "",
        case="resizes",
        seed=9015,
    ),
    Bug(
        "a shrink lets many blocks step down at once",
        "pressure",
        "Pressure._step_down_for_shrink",
        "RELIEF_BLOCKS",
        "10 * RELIEF_BLOCKS",
        case="resizes",
        seed=9015,
    ),
    Bug(
        "all tenants pay for a shrink at once",
        "pressure",
        "Pressure._step_down_for_shrink",
        "if self._step_down(tenant, RELIEF_BLOCKS, shortage) or self._step_down_any(tenant):\n    return",
        "if self._step_down(tenant, RELIEF_BLOCKS, shortage) or self._step_down_any(tenant):\n    pass",
        case="resizes",
        seed=9252,
    ),
)
