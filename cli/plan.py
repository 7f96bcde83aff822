"""``qkv-engine plan``: formats of K and V layer by layer, chosen by what a model's gradients say, in a file."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qkv_engine.calibrate.kvmix import KVmix, LayerScores
from qkv_engine.config import PLAN_SUFFIX, EngineConfig, KVConfig
from qkv_engine.errors import ConfigError
from qkv_engine.fingerprint import ModelFingerprint

from . import common, results, tasks
from .eval import DEFAULT_TASKS
from .model import ModelFiles, check_shape, read_model, weight_dtype
from .progress import progress_bar

if TYPE_CHECKING:
    from qkv_engine.bench.texts import TextSet
    from qkv_engine.calibrate.plan import KVPlan
    from qkv_engine.kv.ladder import Ladder
    from qkv_engine.models.config import ModelConfig

METHODS = ("kvmix",)
DEFAULT_SAMPLES = 24
MAX_SAMPLES, MAX_TOKENS = 10_000, 2**20  # texts are held in memory; a slip of the pen ends before they are made
DEFAULT_PLAN, DEFAULT_PLOT = Path("plan.json"), Path("scores.png")

EPILOG = """\
kvmix: a layer's score is the norm of the loss gradient with respect to W_k or
W_v, the mean over texts. The layers with the highest scores get more bits, K and
V apart. Of a question with a known reply only the reply counts. The plan, with
scores and settings, goes to --output; take it with --kv plan.json. Ctrl-C
writes nothing.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``plan``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    common.add_loading_arguments(parser)
    add = parser.add_argument_group("plan").add_argument
    add("--method", choices=METHODS, default=METHODS[0], help="how formats are chosen (default: %(default)s)")
    add("-o", "--output", type=Path, default=DEFAULT_PLAN, metavar="FILE", help="the plan (default: %(default)s)")
    results.add_plot(add, "the scores", DEFAULT_PLOT)
    results.add_format(add)
    _add_texts(parser.add_argument_group("texts").add_argument)
    _add_kvmix(parser.add_argument_group("kvmix").add_argument)


def _add_texts(add: Any) -> None:
    tasks.add_argument(
        add, "task", metavar="LIST", help=f'demo tasks with their sizes, such as "ledger:40" (default: {DEFAULT_TASKS})'
    )
    add("--data", type=Path, metavar="FILE.jsonl", help='{"text": "..."} or {"prompt": "...", "answer": "..."} a line')
    add("--shape", metavar="NAME", help="random weights of a known shape instead of MODEL, and random tokens")
    add("--samples", type=int, default=DEFAULT_SAMPLES, metavar="N", help="texts in all (default: %(default)s)")
    add("--max-tokens", type=int, default=1024, metavar="N", help="tokens of each that count (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of tasks and of --random (default: %(default)s)")


def _add_kvmix(add: Any) -> None:
    usual = KVmix()
    add("--share", type=float, default=usual.share, help="share of layers with more bits (default: %(default)s)")
    add("--k-bits", type=int, default=usual.k_bits, metavar="N", help="bits of their K (default: %(default)s)")
    add("--v-bits", type=int, default=usual.v_bits, metavar="N", help="bits of their V (default: %(default)s)")
    add("--low-bits", type=int, default=usual.low_bits, metavar="N", help="bits of the others (default: %(default)s)")
    add("--group", type=int, default=usual.group, metavar="N", help="elements of a group (default: %(default)s)")
    add(
        "--recent-ratio",
        type=float,
        default=usual.recent_ratio,
        metavar="RATIO",
        help="share of the context, the newest, that stays dense (default: %(default)s)",
    )
    add("--random", action="store_true", help="draw the layers at random, whatever their scores: the control")


def run(args: argparse.Namespace) -> int:
    """Make the plan that ``args`` ask for and return the exit code."""
    settings = _settings(args)
    check_shape(args)
    results.check_targets_and_plot(args, output=(PLAN_SUFFIX,))
    common.load_torch()
    options = common.engine_options(args)
    files = read_model(args, args.shape)
    config = _engine_config(args, options, files.config)
    _check_formats(settings, files.config)
    texts = _texts(args, files)
    scores, weights = _profile(config, texts)
    model = ModelFingerprint.of(args.shape or args.model or common.DEMO, files.config, weights)
    _deliver(args, _plan(args, settings, model, texts, scores), files.config)
    return common.EXIT_OK


def _settings(args: argparse.Namespace) -> KVmix:
    for field, least, most in (("samples", 1, MAX_SAMPLES), ("max_tokens", 2, MAX_TOKENS)):
        value = getattr(args, field)
        if not least <= value <= most:
            remedy = f"Give an integer from {least} to {most:,}"
            raise ConfigError("out of range", field=field, value=value, remedy=remedy)
    return KVmix(
        share=args.share,
        k_bits=args.k_bits,
        v_bits=args.v_bits,
        low_bits=args.low_bits,
        group=args.group,
        recent_ratio=args.recent_ratio,
        random_seed=args.seed if args.random else None,
    )


def _check_formats(settings: KVmix, config: ModelConfig) -> None:
    """Refuse formats that do not fit the model, before the work is done."""
    nothing = [0.0] * config.num_layers
    _ladder(settings.ladder("plan", LayerScores(nothing, nothing)), config)


def _ladder(kv: KVConfig, config: ModelConfig) -> Ladder:
    from qkv_engine.bench.sizing import make_ladder

    return make_ladder(kv, config, config.dtype)


def _engine_config(args: argparse.Namespace, options: dict[str, Any], model: ModelConfig) -> EngineConfig:
    """How the model is loaded. In float16 small gradients would vanish, so bfloat16 takes its place."""
    from qkv_engine.startup import resolve_device

    if args.shape is not None:
        options |= {"model": args.shape, "load_format": "random"}
    dtype = weight_dtype(args.dtype or "auto", model, resolve_device(args.device or "auto"))
    name = str(dtype).removeprefix("torch.")
    return EngineConfig(**options | {"dtype": "bfloat16" if name == "float16" else name})


def _texts(args: argparse.Namespace, files: ModelFiles) -> TextSet:
    from qkv_engine.bench.texts import file_texts, random_texts, task_texts

    given = tasks.given(args)
    if given is not None and args.data is not None:
        raise ConfigError(f"cannot be combined with --{given.field}", field="data", value=str(args.data))
    limits = {"samples": args.samples, "max_tokens": min(args.max_tokens, files.config.max_context)}
    if given is None and args.data is None and files.folder is None:
        return random_texts(files.config.vocab_size, **limits, seed=args.seed)
    text, field = (DEFAULT_TASKS, "task") if given is None else (given.text, given.field)
    with closing(files.tokenizer(field if args.data is None else "data")) as tokenizer:
        if args.data is not None:
            return file_texts(tokenizer, args.data, **limits)
        return task_texts(tokenizer, text, **limits, seed=args.seed, field=field)


def _profile(config: EngineConfig, texts: TextSet) -> tuple[LayerScores, str | None]:
    """The scores of the model that ``config`` names, and the digest of its weights; None for random ones."""
    from qkv_engine.calibrate.gradients import mean_scores, score_texts
    from qkv_engine.device.threads import computing_with
    from qkv_engine.models import LlamaForCausalLM
    from qkv_engine.models.checkpoint import weights_digest
    from qkv_engine.startup import load, resolve_device

    loaded, _ = load(config, resolve_device(config.device), pack=False)
    found: list[LayerScores] = []
    with progress_bar(len(texts.texts)) as bar, computing_with(config.num_threads):
        bar.begin(f"profiling {len(texts.texts)} texts")
        for scores in score_texts(cast(LlamaForCausalLM, loaded.model), texts.texts):
            found.append(scores)
            bar.reach(len(found))
    if config.load_format == "random":
        return mean_scores(found), None
    assert loaded.folder is not None, "only random weights have no folder"
    return mean_scores(found), weights_digest(loaded.folder)


def _plan(
    args: argparse.Namespace, settings: KVmix, model: ModelFingerprint, texts: TextSet, scores: LayerScores
) -> KVPlan:
    from qkv_engine.calibrate.plan import KVPlan, PlannedLadder

    return KVPlan(
        method=args.method,
        model=model,
        settings=settings,
        prompts=texts.prompts,
        scores=scores,
        ladder=PlannedLadder.of(settings.ladder("plan", scores)),
    )


def _deliver(args: argparse.Namespace, plan: KVPlan, config: ModelConfig) -> None:
    """The layers to stdout, the plan to its file, and the plot to its own."""
    from qkv_engine.bench.plan_report import layer_rows, plan_table
    from qkv_engine.bench.plot_plan import plot_plan
    from qkv_engine.bench.report import render
    from qkv_engine.calibrate.plan import plan_bytes

    rows = layer_rows(plan)
    table = plan_table(plan, rows, _ladder(plan.config("plan"), config))
    files = [results.Extra(args.output, lambda: plan_bytes(plan), "the plan")]
    if args.plot is not None:
        kind = args.plot.suffix.lower().removeprefix(".")
        files.append(results.Extra(args.plot, lambda: plot_plan(plan, kind=kind), "a plot"))
    results.show_and_write(args.format, lambda form, width: render(form, rows, table, width=width), files)
