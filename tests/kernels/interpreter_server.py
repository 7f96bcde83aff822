"""A process that has imported PyTorch and Triton's interpreter, and runs each module of cases in a fork of its own.

It reads lines ``[module, file for its output, file for its errors, arguments...]`` and answers each with the exit
status.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from typing import NoReturn

from studies.kernels import inputs as _inputs

assert _inputs  # what nearly all cases import


def main() -> None:
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            _run(*json.loads(line))
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(module: str, output: str, errors: str, *arguments: str) -> NoReturn:
    """In the fork: as ``python -m module``."""
    status, sys.argv[1:] = 1, arguments
    try:
        for path, descriptor in ((output, 1), (errors, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
