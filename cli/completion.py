"""``qkv-engine completion``: the script that makes a shell complete commands, options and their values."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from qkv_engine.bench.papers import PAPERS
from qkv_engine.config import STATE_DTYPES, WEIGHTS
from qkv_engine.presets import PRESETS

from . import common

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``completion``."""
    parser.epilog = (
        "Write the script where your shell looks for it, once: bash: ~/.local/share/bash-completion/completions/"
        "qkv-engine; zsh: _qkv-engine in a folder of $fpath; fish: ~/.config/fish/completions/qkv-engine.fish"
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    """Print the script and return the exit code."""
    import shtab

    from .main import build_parser, command_parsers

    parser = build_parser()
    for command in command_parsers(parser):
        _offer_values(command._actions)
    sys.stdout.write(shtab.complete(parser, args.shell))
    return common.EXIT_OK


def _offer_values(actions: Iterable[argparse.Action]) -> None:
    """Values that shells offer after options whose parser takes any text."""
    import shtab

    common.load_torch()  # the shapes' package imports it
    from qkv_engine.models.shapes import SHAPES

    words: dict[str, Iterable[str]] = {
        "kv": PRESETS,
        "shape": SHAPES,
        "preset": PAPERS,
        "dtype": ("auto", "bfloat16", "float16", "float32"),
        "weights": WEIGHTS,
        "state_dtype": STATE_DTYPES,
        "device": ("auto", "cpu", "cuda"),
    }
    for action in actions:
        if action.dest in words:
            action.choices = list(words[action.dest])
        elif action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.dest in ("model", "folder"):
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
