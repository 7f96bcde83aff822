"""The command line. ``run`` is the program, which imports everything else."""

from __future__ import annotations

import signal


def run() -> int:
    """Run the program and return its exit code; Ctrl-C while its modules are imported ends it without a word."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it was started to ignore Ctrl-C
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .main import main

    return main()
