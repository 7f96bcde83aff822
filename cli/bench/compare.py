"""``qkv-engine bench --compare A B``: the rows of result files side by side."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from qkv_engine.errors import ConfigError

from .. import common, results

DEFAULT_THRESHOLD = 0.05
NEEDED = {"threshold": ("compare",), "fail_on_regression": ("compare",)}
OPTIONS = {"compare", *NEEDED, "format", "output", "seed", "verbose", "debug"}  # beside which no other has a meaning


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a comparison."""
    add = parser.add_argument_group("comparison").add_argument
    add(
        "--compare",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="measure nothing: print the ratios of the rows in the later of these files (.json, .jsonl or .csv, "
        "as --output of bench and eval writes them) to those of the first",
    )
    add("--threshold", metavar="PERCENT", help="change up to which a metric counts as the same (default: 5%%)")
    add("--fail-on-regression", action="store_true", help="exit with 1 if a metric got worse or a row is missing")


def run(args: argparse.Namespace) -> int:
    """Compare the files of ``args`` and return the exit code."""
    from qkv_engine.bench.compare import compare
    from qkv_engine.bench.report import render

    if len(args.compare) < 2:
        raise ConfigError("one file alone", field="compare", value=str(args.compare[0]), remedy="Give two or more")
    threshold = DEFAULT_THRESHOLD if args.threshold is None else _share(args.threshold)
    results.check_targets(args)
    found = compare(args.compare, threshold)
    what = f"{len(found.changes)} ratios"
    results.deliver(args, lambda form, width: render(form, found.changes, found.table, width=width), what)
    return common.EXIT_FAILURE if args.fail_on_regression and found.has_regressed else common.EXIT_OK


def _share(text: str) -> float:
    """The share that "5%" or "5" stands for. Raises ``ConfigError`` for anything else."""
    match = re.fullmatch(r"\s*(\d{1,4}(?:\.\d{1,4})?)\s*%?\s*", text, re.ASCII)
    if match is None:
        raise ConfigError("not a percentage", field="threshold", value=text, remedy='Give one such as "5%"')
    return float(match[1]) / 100
