"""The accuracy page on any model: ``python -m studies.judge MODEL --output rows.jsonl --plot picture.png``.

Every KV ladder of ``judge_ladders``, on its floor, or with ``--weights`` every format of weights, beside 16 bits under
teacher forcing: KL divergence, changed first choices, perplexity, and right replies where the texts are questions. The
demo model reads its tasks; any other model the lines of ``--data``, or the pages of this checkout. Plans are made from
texts like those and from unlike ones.

A row is written as soon as it is measured, and a run that goes on measures the ladders that the file lacks. Rows of
other weights or settings are measured anew.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean

from qkv_engine import Engine
from qkv_engine.bench.files import write_file
from qkv_engine.bench.forced import Choices, Forced, ForcedText, compare, refer
from qkv_engine.bench.judged import JudgedRow, judged_tables, packed
from qkv_engine.bench.preset_loop import measure_presets
from qkv_engine.bench.provenance import block_bits, provenance
from qkv_engine.bench.report import as_json, render
from qkv_engine.bench.result_files import read_records
from qkv_engine.bench.status import OK
from qkv_engine.cli.results import exit_code
from qkv_engine.loading import demo_folder
from qkv_engine.models.checkpoint import weights_digest
from qkv_engine.models.loader import find_model

from .judge_harness import run_lm_eval
from .judge_ladders import Contender, Planner, contenders, weights_contenders
from .judge_plot import draw
from .judge_texts import DEMO, Material, material_for

WEIGHTS_CHARS = 12  # of the digest, that stand in rows


@dataclass
class Judge:
    """Measures ladders on one model, the reference first; ``rows`` are those there are, by name."""

    model: str
    weights: str
    material: Material
    contenders: Mapping[str, Contender]
    rows: dict[str, JudgedRow]
    open_engine: Callable[[Contender], Engine]
    _references: dict[str, list[Choices]] = field(default_factory=dict)  # by set of texts

    def run(self, save: Callable[[], None]) -> None:
        """Measures what is missing; ``save`` is called after each row."""
        missing = [name for name in self.contenders if name not in self.rows]
        if not missing:
            return
        wanted = {name: [None] for name in (self.reference, *missing)}
        for row in measure_presets(
            wanted, lambda kv: self.open_engine(self.contenders[kv]), self._begin, self._row, str
        ):
            self.rows[row.kv] = row
            save()

    @property
    def reference(self) -> str:
        return next(iter(self.contenders))

    def _begin(self, kv: str, engine: Engine) -> Callable[[None], JudgedRow]:
        return partial(self._measure, kv, engine)

    def _row(self, kv: str, _: None, status: str, detail: str | None, **figures: object) -> JudgedRow:
        one = self.contenders[kv]
        values = {
            **provenance(seed=self.material.seed),
            **{"model": self.model, "weights": self.weights, "settings": self.material.settings},
            **{"replies": self.material.has_replies, "reference": self.reference},
            **{"kv": kv, "method": one.method, "profile": one.profile, "status": status, "detail": detail},
            **{"sink": one.kv.sink, "recent": one.kv.recent, "recent_ratio": one.kv.recent_ratio},
        }
        return JudgedRow(**{**values, **figures, "command": command_line()})

    def _measure(self, kv: str, engine: Engine, item: None) -> JudgedRow:
        assert engine.tokenizer is not None, "a model of texts has one"
        found, held, start = dict[str, Forced](), list[float](), time.monotonic()
        for name, texts in self.material.sets(engine.tokenizer, engine.max_model_len - 1).items():
            engine.reset_stats()
            found[name] = self._forced(kv, engine, name, texts)
            held.append(engine.stats().effective_bits)
            print(f"{kv}, {name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
        stats = engine.stats()
        lowest = [forced.lowest_bits for forced in found.values() if forced.lowest_bits is not None]
        return self._row(
            kv, item, OK, None,
            **provenance(device=stats.device, dtype=stats.dtype, threads=stats.num_threads, seed=self.material.seed),
            **packed({name: forced.scores for name, forced in found.items()}),
            block_bits=block_bits(stats),
            held_bits=round(fmean(held), 3),
            lowest_bits=min(lowest, default=None),
            seconds=round(time.monotonic() - start, 1),
        )  # fmt: skip

    def _forced(self, kv: str, engine: Engine, name: str, texts: Sequence[ForcedText]) -> Forced:
        if kv != self.reference:
            return compare(engine, texts, self._references[name])
        found, self._references[name] = refer(engine, texts)
        return found


def command_line() -> str:
    """How this run was started."""
    return " ".join(["python -m studies.judge", *sys.argv[1:]])


def kept_rows(path: Path, *, weights: str, settings: str, names: Sequence[str]) -> dict[str, JudgedRow]:
    """The measured rows of ``names`` in the file at ``path``, if any, of these weights and settings."""
    records = read_records(path, field="output") if path.exists() and path.stat().st_size else []
    rows = [JudgedRow(**record) for record in records]
    same = [row for row in rows if (row.weights, row.settings, row.status) == (weights, settings, OK)]
    return {row.kv: row for row in same if row.kv in names}


def main() -> int:
    """Measures what is missing, prints the tables, and returns the exit code: that of a command with such rows."""
    args = parse(sys.argv[1:])
    source = find_model(args.model) if args.model != DEMO else None
    folder = demo_folder() if source is None else source.folder
    assert folder is not None, "a model with weights has a folder"
    weights = weights_digest(folder)[:WEIGHTS_CHARS]
    work = args.work / weights
    work.mkdir(parents=True, exist_ok=True)
    material = material_for(args.model, work, data=args.data, samples=args.samples, seed=args.seed)
    planner = Planner([args.model, *_options(args, "device", "dtype")], work, material.profiles)
    asked = {one.name: one for one in (weights_contenders() if args.weights else contenders(planner))}

    def open_engine(one: Contender) -> Engine:
        options = {"device": args.device, "dtype": args.dtype, "kv_memory": args.kv_memory}
        given = {name: value for name, value in options.items() if value is not None}
        model = None if args.model == DEMO else args.model
        return Engine(model, kv=one.kv, weights=one.weights, prefix_caching=False, **given)

    rows = kept_rows(args.output, weights=weights, settings=material.settings, names=list(asked))
    judge = Judge(args.model, weights, material, asked, rows, open_engine)

    def ordered() -> list[JudgedRow]:
        return [rows[name] for name in asked if name in rows]

    def save() -> None:
        lines = "".join(as_json(asdict(row)) + "\n" for row in ordered())
        write_file(args.output, lines.encode())

    judge.run(save)
    save()
    print(render("md", ordered(), *judged_tables(ordered())), end="")
    if args.plot is not None:
        draw(ordered(), args.plot)
    if args.lm_eval:
        path = args.output.with_stem(f"{args.output.stem}-lm-eval")
        run_lm_eval(args.model, asked, open_engine, path, tasks=args.lm_eval, limit=args.limit)
    return exit_code(row.status for row in ordered())


def _options(args: argparse.Namespace, *names: str) -> list[str]:
    """Those of the options ``names`` that were given, as words of a command line."""
    return [word for name in names if getattr(args, name) is not None for word in (f"--{name}", getattr(args, name))]


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The options on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", nargs="?", default=DEMO, help="folder or Hugging Face name (default: the demo model)")
    add("--weights", action="store_true", help="formats of weights in place of ladders of KV")
    add("--output", type=Path, required=True, help="rows, .jsonl")
    add("--plot", type=Path, help="divergence against bits, .png")
    add("--data", type=Path, help="lines of text in place of the checkout's pages, as eval --divergence takes them")
    add("--samples", type=int, default=24, help="texts of each set (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--lm-eval", metavar="TASKS", help="tasks of the lm-evaluation-harness, too, in a file of rows beside --output")
    add("--limit", type=int, default=200, help="questions of each of them (default: %(default)s)")
    add("--work", type=Path, default=Path("build/judge"), help="folder for plans and texts (default: %(default)s)")
    for name in ("device", "dtype", "kv-memory"):
        add(f"--{name}")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
