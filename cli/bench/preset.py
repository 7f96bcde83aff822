"""Options of ``bench`` that ``--preset`` fills in from a paper's record."""

from __future__ import annotations

import argparse
from typing import Any

from qkv_engine.bench.papers import PAPERS, Paper
from qkv_engine.errors import ConfigError

from .. import common


def resolve(args: argparse.Namespace) -> None:
    """Gives options that were not given the values of the paper that ``--preset`` names.

    The setting is the paper's own for a shape or MODEL, and a small one for the demo model. Raises ``ConfigError`` for
    an unknown paper.
    """
    if args.preset is not None:
        _fill_in(args, _find(args.preset))


def _find(name: str) -> Paper:
    if name not in PAPERS:
        remedy = common.nearest(name, PAPERS, f"Choose from {', '.join(PAPERS)}")
        raise ConfigError("no paper's experiment", field="preset", value=name, remedy=remedy)
    return PAPERS[name]


def _fill_in(args: argparse.Namespace, paper: Paper) -> None:
    is_demo = args.model is None and args.shape is None
    setting = paper.scaled if is_demo else paper.full
    values: dict[str, Any] = {
        "kv": paper.kvs,
        "batch_sweep": setting.batches,
        "input_len": setting.input_len,
        "output_len": setting.output_len,
        "dtype": setting.dtype,
    }
    if args.memory is None and args.kv_memory is None:
        values |= {"memory": setting.memory, "kv_memory": setting.kv_memory}
    if not args.sampled:
        values |= {"repeats": setting.repeats, "warmup": setting.warmup}
    common.fill_in(args, **values)
