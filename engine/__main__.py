"""``python -m qkv_engine``: the command line."""

import sys

from qkv_engine.cli import run

if __name__ == "__main__":
    sys.exit(run())
