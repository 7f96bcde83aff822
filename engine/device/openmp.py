"""OpenMP's spinning threads. Nothing here imports torch, whose import fixes the spin count for the process."""

from __future__ import annotations

import os
import sys

SPIN_COUNT = 1000  # rounds, some microseconds: bridges two operators of a step, wastes little beside a busy program

_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def shorten_spinning() -> None:
    """Lets libgomp's threads spin for a short time, before torch is loaded and unless the user has decided.

    Its default is 300,000 rounds at the end of each of a step's hundred parallel regions. On a machine with other work
    a thread that has lost its core keeps the others spinning for a scheduler's time slice, each time.
    """
    if "torch" not in sys.modules and not is_decided():
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def is_decided() -> bool:
    """Whether this package or the user has chosen how threads wait."""
    return any(name in os.environ for name in _VARIABLES)
