"""``qkv-engine plan``: formats of K and V layer by layer, chosen by what a model's gradients say, in a file."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from msgspec.structs import replace

from qkv_engine.config import EngineConfig
from qkv_engine.errors import ConfigError
from qkv_engine.fingerprint import ModelFingerprint
from qkv_engine.presets import PLAN_SUFFIX, resolve_kv
from qkv_engine.sizes import MAX_SIZE, parse_size

from . import common, plan_bases, plan_settings, results, tasks
from .combinations import check_combinations
from .eval import DEFAULT_TASKS
from .model import ModelFiles, check_shape, read_model, weight_dtype
from .progress import progress_bar

if TYPE_CHECKING:
    from qkv_engine.bench.texts import TextSet
    from qkv_engine.models.config import ModelConfig
    from qkv_engine.models.llama import LlamaForCausalLM
    from qkv_engine.plan_file import KeyScale
    from qkv_engine.planner.moments import SideMoments
    from qkv_engine.planner.plan import KVPlan
    from qkv_engine.planner.profile import Profile

DEFAULT_SAMPLES, DEFAULT_TOKENS = 24, 1024
MAX_SAMPLES, MAX_TOKENS = 10_000, 2**20  # texts are held in memory; a slip of the pen ends before they are made
MAX_POSITION_SCALE = 64  # four times what made PM-KVQ's results worse
DEFAULT_PLAN, DEFAULT_PLOT = Path("plan.json"), Path("scores.png")
EXCLUDED = {"task": ("tasks", "data"), "tasks": ("data",)}
PROFILED = ("data", "shape", "samples", "max_tokens", "position_scale", "key_scale")  # options of a new profile

EPILOG = """\
mixed: of each layer's K and V the format, of any family, so that the errors
matter least to the loss within --budget; a ladder of up to 12 nested rungs.
spectral: K and V in bases of their own, a file beside the plan; few bits for the
channels that matter, none for the others.
pm-kvq: K and V per token, halved in bits together, each layer down to a floor.
kvmix: more bits for the layers whose W_k or W_v has the largest loss gradients.
Of a question with a known reply only the reply counts. The plan, with its
profile and settings, goes to --output; take it with --kv plan.json. Another
budget or method needs no new profile: --from plan.json. Ctrl-C writes nothing.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``plan``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    common.add_loading_arguments(parser)
    add = parser.add_argument_group("plan").add_argument
    methods = plan_settings.METHODS
    add("--method", choices=methods, default=methods[0], help="how formats are chosen (default: %(default)s)")
    add("--from", type=Path, dest="source", metavar="FILE", help="the profile of another plan: no model is loaded")
    add("--kv-memory", metavar="SIZE", help="say how much of such a KV cache each rung holds")
    add("-o", "--output", type=Path, default=DEFAULT_PLAN, metavar="FILE", help="the plan (default: %(default)s)")
    results.add_plot(add, "the layers", DEFAULT_PLOT)
    results.add_format(add)
    _add_texts(parser.add_argument_group("profile").add_argument)
    plan_settings.add_arguments(parser)


def _add_texts(add: Any) -> None:
    tasks.add_argument(
        add, "task", metavar="LIST", help=f'demo tasks with their sizes, such as "ledger:40" (default: {DEFAULT_TASKS})'
    )
    add("--data", type=Path, metavar="FILE.jsonl", help='{"text": "..."} or {"prompt": "...", "answer": "..."} a line')
    add("--shape", metavar="NAME", help="random weights of a known shape instead of MODEL, and random tokens")
    add("--samples", type=int, metavar="N", help=f"texts in all (default: {DEFAULT_SAMPLES})")
    add("--max-tokens", type=int, metavar="N", help=f"tokens of each that count (default: {DEFAULT_TOKENS})")
    add("--seed", type=int, default=0, metavar="N", help="seed of tasks and of --random (default: %(default)s)")
    add("--position-scale", type=int, metavar="N", help="positions count N times, as in longer texts (default: 1)")
    add(
        "--key-scale",
        action=argparse.BooleanOptionalAction,
        help="divide K by scales that are folded into the weights (default: with pm-kvq)",
    )


def run(args: argparse.Namespace) -> int:
    """Make the plan that ``args`` ask for and return the exit code."""
    check_combinations(args, excluded=EXCLUDED, needed={})
    check_shape(args)
    results.check_targets_and_plot(args, output=(PLAN_SUFFIX,))
    if args.method == "spectral":
        plan_bases.check_target(args.output)
    memory = None if args.kv_memory is None else parse_size(args.kv_memory, field="kv_memory", free=MAX_SIZE)
    common.load_torch()
    _deliver(args, *(_profiled(args) if args.source is None else _solved_again(args)), memory)
    return common.EXIT_OK


def _profiled(args: argparse.Namespace) -> tuple[KVPlan, bytes | None]:
    """A plan of a new profile, and its bases. What can be wrong with it is found before the model is loaded."""
    from qkv_engine.planner.budget import ladder_of
    from qkv_engine.planner.plan import KVPlan
    from qkv_engine.planner.spectral import Spectral, empty_spectra

    options = common.engine_options(args)
    options.pop("kv_memory", None)  # whose capacity is told; nothing is cached here
    files = read_model(args, args.shape)
    config = _engine_config(args, options, files.config)
    settings = plan_settings.settings(args, files.config.max_position_embeddings)
    shape = ModelFingerprint.of(args.shape or args.model or common.DEMO, files.config, None)
    texts = _texts(args, files)
    empty = _empty_profile(args, files.config, texts)
    if isinstance(settings, Spectral):
        plan_bases.check(args)
        empty = replace(empty, spectra=empty_spectra(shape, settings.shrink))
    ladder_of(settings.solve(empty, shape), shape)
    found = _profile(args, config, texts)
    model, profile, bases = replace(shape, weights=found.weights), found.profile, None
    if isinstance(settings, Spectral):
        profile, bases = plan_bases.with_bases(profile, found.moments, settings.shrink, model)
    return KVPlan.make(settings, profile, model), bases


def _solved_again(args: argparse.Namespace) -> tuple[KVPlan, bytes | None]:
    """A plan of the profile in another plan's file, for the same model, and its bases."""
    from qkv_engine.planner.budget import ladder_of
    from qkv_engine.planner.plan import KVPlan, read_plan

    source = str(args.source)
    given = tasks.given(args)
    for field in (*PROFILED, *(() if given is None else (given.field,))):
        if getattr(args, field) is not None:
            message = "belongs to a new profile"
            raise ConfigError(message, field=field, value=getattr(args, field), remedy="Leave --from out")
    found = read_plan(args.source, "source")
    if args.model is not None:
        _check_model(args, found.model, source)
    if args.dtype not in (None, "auto", found.profile.dtype):
        message = f"the profile of a model in {found.profile.dtype}"
        raise ConfigError(message, field="source", value=source, remedy="Profile the model in that dtype")
    if args.method == "spectral" and args.shrink is None and found.profile.spectra:
        args.shrink = found.profile.spectra.shrink
    settings = plan_settings.settings(args, found.profile.context)
    plan = KVPlan.make(settings, found.profile, found.model)
    ladder_of(plan.config("plan"), plan.model)
    return plan, plan_bases.read(args.source, plan.profile.bases) if plan.profile.bases else None


def _check_model(args: argparse.Namespace, model: ModelFingerprint, source: str) -> None:
    """Raises ``ConfigError`` unless MODEL is the one that a profile was taken of."""
    from qkv_engine.models.checkpoint import weights_digest

    files = read_model(args)
    model.check_shape(files.config, source, "source")
    if files.folder is not None and Path(args.model).is_dir():  # of one on the Hub only the small files are here
        model.check_weights(weights_digest(files.folder), source, "source")


def _engine_config(args: argparse.Namespace, options: dict[str, Any], model: ModelConfig) -> EngineConfig:
    """How the model is loaded. In float16 small gradients would vanish, so bfloat16 takes its place."""
    from qkv_engine.loading import resolve_device

    if args.shape is not None:
        options |= {"model": args.shape, "load_format": "random"}
    dtype = weight_dtype(args.dtype or "auto", model, resolve_device(args.device or "auto"))
    name = str(dtype).removeprefix("torch.")
    options["dtype"] = "bfloat16" if name == "float16" else name
    return EngineConfig(kv=resolve_kv(None), **options)


def _texts(args: argparse.Namespace, files: ModelFiles) -> TextSet:
    from qkv_engine.bench.texts import file_texts, random_texts, task_texts

    samples, max_tokens = (
        _number(args, field, usual, least, most)
        for field, usual, least, most in (
            ("samples", DEFAULT_SAMPLES, 1, MAX_SAMPLES),
            ("max_tokens", DEFAULT_TOKENS, 2, MAX_TOKENS),
        )
    )
    given = tasks.given(args)
    limits = {"samples": samples, "max_tokens": min(max_tokens, files.config.max_context)}
    if given is None and args.data is None and files.folder is None:
        return random_texts(files.config.vocab_size, **limits, seed=args.seed)
    text, field = (DEFAULT_TASKS, "task") if given is None else (given.text, given.field)
    with closing(files.tokenizer(field if args.data is None else "data")) as tokenizer:
        if args.data is not None:
            return file_texts(tokenizer, args.data, **limits)
        return task_texts(tokenizer, text, **limits, seed=args.seed, field=field)


def _number(args: argparse.Namespace, field: str, usual: int, least: int, most: int) -> int:
    value = usual if getattr(args, field) is None else int(getattr(args, field))
    if not least <= value <= most:
        remedy = f"Give an integer from {least:,} to {most:,}"
        raise ConfigError("out of range", field=field, value=value, remedy=remedy)
    return value


def _position_scale(args: argparse.Namespace) -> int:
    return _number(args, "position_scale", 1, 1, MAX_POSITION_SCALE)


def _empty_profile(args: argparse.Namespace, config: ModelConfig, texts: TextSet) -> Profile:
    from qkv_engine.planner.gradients import empty_profile

    return empty_profile(config, texts.prompts, _position_scale(args))


class _Found(NamedTuple):
    """A model's profile, the digest of its weights, None for random ones, and its moments by layer, if wanted."""

    profile: Profile
    weights: str | None
    moments: list[tuple[SideMoments, SideMoments]]


def _profile(args: argparse.Namespace, config: EngineConfig, texts: TextSet) -> _Found:
    """The profile of the model that ``config`` names."""
    from qkv_engine.device.cpu.threads import computing_with
    from qkv_engine.layer_kv import kv_of_layers
    from qkv_engine.loading import load, resolve_device
    from qkv_engine.models.checkpoint import weights_digest
    from qkv_engine.models.key_scale import fold_key_scale
    from qkv_engine.planner.gradients import mean_profile, profile_texts
    from qkv_engine.planner.moments import moments_of
    from qkv_engine.planner.sensitivity import Candidates

    loaded, dtype = load(config, resolve_device(config.device), pack=False)
    model, scale, key_scale = cast("LlamaForCausalLM", loaded.model), _position_scale(args), None
    sums = plan_bases.begin(model) if args.method == "spectral" else []
    with computing_with(config.num_threads):
        if plan_settings.wants_key_scale(args):
            key_scale = _key_scale(model, texts, scale)
            fold_key_scale(model, key_scale)
        layers = kv_of_layers(model.config)
        # Quantizing K and V in every format takes most of the time, and bases have no use for it.
        candidates = [Candidates.none()] * len(layers) if sums else Candidates.of_layers(layers, dtype)
        found = []
        with progress_bar(len(texts.texts)) as bar:
            bar.begin(f"profiling {len(texts.texts)} texts")
            for profile in profile_texts(model, texts.texts, candidates, scale, sums):
                found.append(profile)
                bar.reach(len(found))
    mean = mean_profile(found, model.config, dtype, candidates[0], texts.prompts, scale, key_scale)
    moments = moments_of(model, sums) if sums else []
    if config.load_format == "random":
        return _Found(mean, None, moments)
    assert loaded.folder is not None, "only random weights have no folder"
    return _Found(mean, weights_digest(loaded.folder), moments)


def _key_scale(model: LlamaForCausalLM, texts: TextSet, position_scale: int) -> KeyScale:
    """The key scale of ``model``: one pass for its keys' largest magnitudes, one for each layer's power of them."""
    from qkv_engine.planner.key_scale import SEARCH_TEXTS, best_key_scale, key_peaks, output_errors

    searched = texts.texts[:SEARCH_TEXTS]
    with progress_bar(len(texts.texts) + len(searched)) as bar:
        bar.begin(f"scaling the keys of {len(texts.texts)} texts")
        peaks = None
        for number, text in enumerate(texts.texts, 1):
            mine = key_peaks(model, text, position_scale)
            peaks = mine if peaks is None else peaks.maximum(mine)
            bar.reach(number)
        assert peaks is not None, "there is a text"
        errors = []
        for number, text in enumerate(searched, 1):
            errors.append(output_errors(model, text, peaks, position_scale))
            bar.reach(len(texts.texts) + number)
    return best_key_scale(peaks, sum(errors[1:], errors[0]))


def _deliver(args: argparse.Namespace, plan: KVPlan, bases: bytes | None, memory: int | None) -> None:
    """The layers to stdout, the bases and then the plan that names them to their files, and the plot to its own."""
    from qkv_engine.bench.plan_report import layer_rows, plan_table
    from qkv_engine.bench.plots.plan import plot_plan
    from qkv_engine.bench.report import render
    from qkv_engine.plan_file import BASES_SUFFIX, plan_bytes

    rows = layer_rows(plan)
    table = plan_table(plan, rows, memory)
    files = [results.Extra(args.output, lambda: plan_bytes(plan), "the plan")]
    if bases is not None:
        files.insert(0, results.Extra(args.output.with_suffix(BASES_SUFFIX), lambda: bases, "its bases"))
    files += results.plot(args, lambda kind: plot_plan(plan, kind=kind))
    results.show_and_write(args.format, lambda form, width: render(form, rows, table, width=width), files)
