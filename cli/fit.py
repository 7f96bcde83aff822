"""``qkv-engine fit``: formats of weights and KV that fit one budget of memory together, best first."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from qkv_engine.config import EngineConfig
from qkv_engine.presets import PLAN_SUFFIX, resolve_kv
from qkv_engine.sizes import format_size

from . import common, results
from .model import read_model

if TYPE_CHECKING:
    from qkv_engine.bench.table import Table
    from qkv_engine.config import KVConfig
    from qkv_engine.device.layouts import Ladder
    from qkv_engine.fit import FitRow, FitTask, KVLoss
    from qkv_engine.planner.profile import Profile

ORDER = "order: what fits, then the least loss, then the fewest bytes a step"
_OPTIONS = ("dtype", "extend_context", "tensor_parallel")
EPILOG = """\
Nothing is loaded but the model's configuration. MODEL may be a known shape, and
--device cuda with --memory a GPU that is not here. Without --weights and --kv
the first row is what --fit of serve and chat takes. Exit code 3: nothing fits;
the error names the smallest changes with which something does.

  weights       as stored in the checkpoint, or quantized while they load, from
                which a CPU gains nothing; with --weights in that format alone
  KV            a ladder, and the rung of its blocks; of one that steps down
                under pressure the widest on which the requests fit
  left          of the memory, beside weights and KV
  bits          of a weight; KV bits of a KV element in a block on the rung, of
                which a layer with a window holds its window alone
  a step reads  weights and KV in a decode step at the end of the context
  tok/s         of such steps at full bandwidth, where that was measured;
                otherwise speed, relative to the first row
  loss          nats a token, of weights and KV together: what the demo model
                lost orders formats, and is not what another model loses. With
                a plan in --kv its profile predicts the loss of KV
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``fit``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    common.add_loading_arguments(parser)
    group = parser.add_argument_group("load")
    common.add_fit_fields(group)
    group.add_argument(
        "--kv", metavar="LIST", help="KV presets and plan files (.json) to compare (default: six presets)"
    )
    common.add_state_argument(group)
    group.add_argument(
        "--extend-context", action="store_const", const=True, help="allow a context beyond what the model was made for"
    )
    group.add_argument(
        "--tp",
        "--tensor-parallel",
        type=int,
        dest="tensor_parallel",
        metavar="N",
        help="GPUs that share the model; --memory is that of each (default: 1)",
    )
    results.add_arguments(parser.add_argument_group("output").add_argument)


def run(args: argparse.Namespace) -> int:
    """Print what fits as ``args`` ask and return the exit code."""
    results.check_targets(args)
    common.load_torch()
    import torch

    from qkv_engine.bench.provenance import device_name
    from qkv_engine.fit import LADDERS, FitTask, fit_rows, no_fit
    from qkv_engine.loading import resolve_device
    from qkv_engine.measured_loss import measured_kv_loss

    weights, args.weights = args.weights, None  # the model as it is stored: rows have formats of their own
    ladders, profile = tuple(common.kv_ladders(args.kv).values()) if args.kv else LADDERS, _profile(args.kv)
    options = EngineConfig(
        kv=resolve_kv(ladders[0], args.state_dtype), weights=weights, **common.given(args, *_OPTIONS)
    )
    is_here = args.device != "cuda" or args.memory is None or torch.cuda.is_available()
    device = resolve_device(args.device or "auto") if is_here else torch.device("cuda")
    task = FitTask.of(common.fit_of(args), read_model(args, args.model).config, device, options, is_here=is_here)
    for kv in ladders if args.kv else ():
        if kv.model is not None:
            kv.model.check_shape(task.model, kv.name)
        task.ladder(kv)  # raises for one that does not fit the model
    rows = fit_rows(task, ladders, measured_kv_loss if profile is None else _by(profile), (weights,) if weights else ())
    product = device_name(str(device)) if is_here else "a GPU that is not here"
    shown = [_with_speed(row, task, product) for row in rows]
    source = "of weights and KV" if profile is None else "of KV from the plan's profile, of weights"
    results.deliver_rows(args, shown, [_table(shown, task, args.model or common.DEMO, product, source)])
    if not rows[0].fits:
        raise no_fit(task, rows, ladders)
    return common.EXIT_OK


def _profile(kv: str | None) -> Profile | None:
    """The profile of the first plan file in ``--kv``."""
    from qkv_engine.planner.plan import read_plan

    words = (word.strip() for word in (kv or "").split(","))
    path = next((word for word in words if word.endswith(PLAN_SUFFIX)), None)
    return None if path is None else read_plan(path).profile


def _by(profile: Profile) -> KVLoss:
    from qkv_engine.measured_loss import measured_kv_loss
    from qkv_engine.planner.predict import predicted_loss, spectral_loss

    spectra = profile.spectra
    if not spectra:
        return lambda kv, ladder, rung: predicted_loss(ladder.stored(rung), profile)

    def loss(kv: KVConfig, ladder: Ladder, rung: int) -> float | None:
        return measured_kv_loss(kv, ladder, rung) if kv.bases is None else spectral_loss(ladder.stored(rung), spectra)

    return loss


def _with_speed(row: FitRow, task: FitTask, product: str) -> FitRow:
    """``row`` with the bytes that a step reads of chosen experts alone, and the limit where the bandwidth is known."""
    from qkv_engine.bench.roofline import GPU, count_weights, limit_seconds
    from qkv_engine.loading import with_weights

    weights = count_weights(with_weights(task.model, row.weights).share(task.num_ranks), task.dtype)
    limit = round(task.requests / limit_seconds(weights, task.requests, row.kv_bytes), 1) if GPU in product else None
    return replace(row, step_bytes=round(weights.nbytes_read(task.requests)) + row.kv_bytes, limit_tok_s=limit)


def _table(rows: Sequence[FitRow], task: FitTask, model: str, product: str, source: str) -> Table:
    from qkv_engine.bench.report import number, size, times
    from qkv_engine.bench.table import Column, from_rows, joined

    dtype = str(task.dtype).removeprefix("torch.")
    columns: list[Column[FitRow]] = [
        Column("weights", lambda row: row.weights or "as stored", is_text=True),
        Column("KV", lambda row: row.kv if row.kv == row.rung else f"{row.kv} ({row.rung})", is_text=True),
        Column("fits", lambda row: "yes" if row.fits else "no"),
        Column("weights take", lambda row: size(row.weights_bytes), spare=4),
        Column("KV takes", lambda row: size(row.kv_bytes), spare=5),
        Column("left", lambda row: format_size(row.left_bytes), spare=3),
        Column("bits", lambda row: number(row.weights_bits, 2), spare=2),
        Column("KV bits", lambda row: number(row.kv_bits, 2), spare=1),
        Column("a step reads", lambda row: size(row.step_bytes), spare=6),
        Column("tok/s, at most", lambda row: number(row.limit_tok_s, 0), spare=8),
        Column("speed", lambda row: "" if row.limit_tok_s else times(rows[0].step_bytes, row.step_bytes), spare=7),
        Column("loss", lambda row: "?" if row.loss is None else f"{row.loss:.2g}"),
    ]
    notes = [ORDER, f"loss {source} as measured on the demo model"]
    if rows[0].limit_tok_s is None:
        notes.append(f"speed by the bytes of a step: no bandwidth is known of {product}")
    title = joined(model, product, dtype, f"memory {format_size(task.nbytes)}", task.load)
    return from_rows(title, rows, columns, notes)._replace(group=None)
