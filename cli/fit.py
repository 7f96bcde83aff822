"""``qkv-engine fit``: formats of weights and KV that fit one budget of memory together, best first."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from qkv_engine.presets import PLAN_SUFFIX

from . import common, results
from .model import read_model

if TYPE_CHECKING:
    import torch

    from qkv_engine.planner.profile import Profile

EPILOG = """\
Nothing is loaded but the model's configuration; MODEL may be a known shape, and --device cuda with --memory
a GPU that is not here. The first row is what --fit of serve and
chat takes. Exit code 3: nothing fits; the last line names the smallest changes with which something does.

Weights are as the checkpoint has them (auto), or quantized while they load, which a CPU does not gain from. A ladder
that steps down under pressure stands on the widest rung on which the requests fit. Losses of the demo model order
formats; they are not those of another model. With a plan in --kv its profile predicts the loss of all KV formats.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``fit``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    common.add_loading_arguments(parser)
    group = parser.add_argument_group("load")
    common.add_fit_arguments(group)
    group.add_argument(
        "--kv", metavar="LIST", help="KV presets and plan files (.json) to compare (default: six presets)"
    )
    group.add_argument(
        "--extend-context", action="store_true", help="allow a context beyond what the model was made for"
    )
    group.add_argument(
        "--tp",
        "--tensor-parallel",
        type=int,
        default=1,
        dest="tensor_parallel",
        metavar="N",
        help="GPUs that share the model; --memory is that of each (default: 1)",
    )
    results.add_arguments(parser.add_argument_group("output").add_argument)


def run(args: argparse.Namespace) -> int:
    """Print what fits as ``args`` ask and return the exit code."""
    results.check_targets(args)
    ladders = common.kv_ladders(args.kv) if args.kv else {}
    common.load_torch()
    from qkv_engine.bench import fit_rows
    from qkv_engine.bench.provenance import device_name
    from qkv_engine.bench.sizing import make_ladder
    from qkv_engine.fit import LADDERS, fit_choices, fit_task, is_here, no_fit
    from qkv_engine.measured_loss import measured_kv_loss

    config, device = read_model(args, args.model).config, _device(args)
    task = fit_task(
        common.fit_of(args),
        config,
        device,
        dtype=args.dtype or "auto",
        extend_context=args.extend_context,
        num_ranks=args.tensor_parallel,
    )
    for kv in ladders.values():
        make_ladder(kv, config, task.dtype, task.num_ranks)  # raises for one that does not fit the model
    profile = _profile(args.kv)
    kv_loss = measured_kv_loss if profile is None else fit_rows.profile_loss(profile)
    choices = fit_choices(task, tuple(ladders.values()) or LADDERS, kv_loss)
    facts = {
        "model": args.model or common.DEMO,
        "device": device_name(str(device)) if is_here(device) else "a GPU that is not here",
        "kv_loss_of": "measurements of the demo model" if profile is None else "the plan's profile",
    }
    rows = [fit_rows.fit_row(choice, task, **facts) for choice in choices]
    results.deliver_rows(args, rows, [fit_rows.fit_table(rows)])
    if not choices[0].fits:
        raise no_fit(task, choices)
    return common.EXIT_OK


def _device(args: argparse.Namespace) -> torch.device:
    """The device asked for; with ``--memory`` also a GPU that this machine does not have."""
    import torch

    from qkv_engine.loading import resolve_device

    if args.device == "cuda" and args.memory is not None and not torch.cuda.is_available():
        return torch.device("cuda")
    return resolve_device(args.device or "auto")


def _profile(kv: str | None) -> Profile | None:
    """The profile of the first plan file in ``--kv``."""
    from qkv_engine.planner.plan import read_plan

    words = (word.strip() for word in (kv or "").split(","))
    path = next((word for word in words if word.endswith(PLAN_SUFFIX)), None)
    return None if path is None else read_plan(path).profile
