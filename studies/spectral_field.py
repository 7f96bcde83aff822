"""Spectral KV beside the field: ``python -m studies.spectral_field --output results/cpu/spectral-field.jsonl``.

The demo model in float32, attention in plain torch (``studies/papers``): papers with presets, KVarN, OSCAR, a Hadamard
rotation, and codecs of the engine's formats, each on its floor. KL divergence from 16 bits of the tokens of right
replies under teacher forcing, and right answers of greedy decoding, against bits with all metadata.

A row is written as soon as it is measured, and a run that goes on measures the schemes that the file lacks; rows of
other settings are measured anew. ``--plot`` draws the rows.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import torch
from torch import Tensor

from qkv_engine.bench.divergence import Mean, bootstrap, nats, task_texts
from qkv_engine.bench.files import write_file
from qkv_engine.bench.forced import ForcedText, TextScore
from qkv_engine.bench.grading import grade, mean_interval, sample_examples
from qkv_engine.bench.judged import packed
from qkv_engine.bench.provenance import Provenance, provenance
from qkv_engine.bench.questions import Ask, Task, ask, parse_tasks
from qkv_engine.bench.report import as_json, number, render
from qkv_engine.bench.result_files import read_records
from qkv_engine.bench.table import Column, Table, from_rows
from qkv_engine.models.llama import LlamaForCausalLM
from qkv_engine.planner.spectral import DEFAULT_SHRINK
from qkv_engine.text.tokenizer import Tokenizer

from .field_plot import FieldPoint, draw
from .field_schemes import NAMES, Field, FieldScheme
from .papers.decode import Prompt, follow, generate_all, read
from .papers.demo import demo_model
from .spectral import Codec, calibrated, spectral

TASKS = "ledger:40,lookup:100,addition:10,sorting:55"
CALIBRATION_TEXTS, CALIBRATION_SEED = 4, 1_000_003  # right conversations a task, unlike those of any likely seed
PIECE = 16  # tokens of a given reply that are computed at once
SPECTRAL_TEXTS = 10  # a task, that spectral codecs are calibrated on
LANES = 48  # questions that are answered at once
REFERENCE = "fp16"
SPECTRAL = ("spectral-2.25", "spectral-2", "spectral-1.75", "spectral-1.5", "spectral-1.25")

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class FieldRow(Provenance):
    """A scheme with all tasks. ``bits`` are those of a block on its floor with all metadata.

    ``settings`` are tasks, numbers, seed and windows in words. By task: right answers of ``asked`` questions, and for
    each text under teacher forcing the ``tokens`` that count, ``kl`` and ``nll`` in nats and ``changed`` first choices,
    summed, and ``exact``, 1 where every token is a first choice.
    """

    kv: str
    kind: str
    bits: float
    settings: str
    right: dict[str, int]
    asked: dict[str, int]
    tokens: dict[str, list[int]]
    kl: dict[str, list[float]]
    changed: dict[str, list[int]]
    nll: dict[str, list[float]]
    exact: dict[str, list[int]]
    seconds: float

    @property
    def divergence(self) -> Mean:
        """Nats a token, mean of the tasks, with its 95 % interval by bootstrap over texts."""
        return bootstrap(*(list(zip(self.kl[task], self.tokens[task], strict=True)) for task in self.kl))

    @property
    def accuracy(self) -> Mean:
        """The share of right answers, mean of the tasks, with its 95 % interval."""
        counts = [(self.right[task], self.asked[task]) for task in self.right]
        return Mean(fmean(right / asked for right, asked in counts), *mean_interval(counts))


class Exam:
    """The texts and the questions of the tasks, their prompts computed once."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: Tokenizer, texts: Sequence[Task], questions: Sequence[Task]):
        self.model, self.tokenizer, self.questions = model, tokenizer, questions
        self.texts = {task.label: task_texts(tokenizer, task) for task in texts}
        self.asks = {task.label: ask(tokenizer, task.examples) for task in questions}
        self._prompts: dict[tuple[int, ...], Prompt] = {}
        self._reference: dict[str, list[Tensor]] = {}  # by task, the log-probabilities of each text

    def prompt(self, ids: Sequence[int]) -> Prompt:
        """The prompt ``ids``, kept."""
        if tuple(ids) not in self._prompts:
            self._prompts[tuple(ids)] = read(self.model, ids)
        return self._prompts[tuple(ids)]

    def forced(self, scheme: FieldScheme) -> dict[str, list[TextScore]]:
        """The scores of every text by task; the first scheme is the one that others diverge from."""
        found = {}
        for task, texts in self.texts.items():
            logprobs = [self._logprobs(scheme, text) for text in _counted(texts, f"{scheme.name}, {task}, texts")]
            exact = self._reference.setdefault(task, logprobs)
            found[task] = [_score(text, *pair) for text, *pair in zip(texts, exact, logprobs, strict=True)]
        return found

    def _logprobs(self, scheme: FieldScheme, text: ForcedText) -> Tensor:
        prompt, reply = text.ids[: text.first_scored], text.ids[text.first_scored :]
        return torch.cat([*follow(self.model, scheme.layers(), self.prompt(prompt), reply, PIECE)])

    def right(self, scheme: FieldScheme) -> dict[str, int]:
        """The right answers of each task."""
        asked = [one for task in self.questions for one in self.asks[task.label]]
        replies = list[str]()
        groups = [asked[first : first + LANES] for first in range(0, len(asked), LANES)]
        for group in _counted(groups, f"{scheme.name}, groups of {LANES} questions"):
            replies += self._answered(scheme, group)
        counts, first = {}, 0
        for task in self.questions:
            mine = replies[first : first + len(task.examples)]
            counts[task.label], first = grade(mine, list(task.examples)).correct, first + len(mine)
        return counts

    def _answered(self, scheme: FieldScheme, group: Sequence[Ask]) -> list[str]:
        assert self.tokenizer.eos_token_id is not None, "of the demo model"
        prompts, limits = [self.prompt(one.prompt) for one in group], [one.params.max_tokens or 1 for one in group]
        lanes = [scheme.layers() for _ in group]
        outputs = generate_all(self.model, lanes, prompts, limits, {self.tokenizer.eos_token_id})
        return [self.tokenizer.decode(ids, skip_special_tokens=False) for ids in outputs]


def _counted(items: Sequence[Item], what: str) -> Iterator[Item]:
    """``items``, counted on stderr."""
    for done, item in enumerate(items, 1):
        yield item
        print(f"\r{what}: {done} of {len(items)}  ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def _score(text: ForcedText, exact: Tensor, found: Tensor) -> TextScore:
    """The reply's tokens after its first, which no cache has a part in."""
    ids = torch.tensor(text.ids[text.first_scored + 1 :])
    kl = float((exact.exp() * (exact - found)).sum(dtype=torch.float64))
    changed = int((exact.argmax(-1) != found.argmax(-1)).sum())
    nll = -float(found.gather(1, ids[:, None]).sum(dtype=torch.float64))
    return TextScore(len(ids), kl, changed, nll, bool((found.argmax(-1) == ids).all()))


def measure(exam: Exam, scheme: FieldScheme, settings: str, seed: int) -> FieldRow:
    """The row of a scheme."""
    start = time.monotonic()
    scores, right = packed(exam.forced(scheme)), exam.right(scheme)
    values: dict[str, Any] = {
        **provenance(device="cpu", dtype="float32", threads=1, seed=seed),
        "command": " ".join(["python -m studies.spectral_field", *sys.argv[1:]]),
        **{"kv": scheme.name, "kind": scheme.kind, "bits": round(scheme.bits, 4), "settings": settings},
        **{"right": right, "asked": {task.label: len(task.examples) for task in exam.questions}},
        **scores,
    }
    return FieldRow(**values, seconds=round(time.monotonic() - start, 1))


def field_table(rows: Sequence[FieldRow]) -> Table:
    """The rows for people."""
    columns: list[Column[FieldRow]] = [
        Column("scheme", lambda row: row.kv, is_text=True),
        Column("bits", lambda row: number(row.bits, 2)),
        Column("KL, nats", lambda row: nats(row.divergence.mean) if row.kv != REFERENCE else ""),
        Column("KL, 95 %", lambda row: _interval(row) if row.kv != REFERENCE else "", spare=4),
        Column("first choice changed", lambda row: f"{_changed(row):.2%}" if row.kv != REFERENCE else ""),
        *(Column(task, partial(_right, task)) for task in rows[0].right),
        Column("right", lambda row: f"{row.accuracy.mean:.1%}"),
        Column("right, 95 %", lambda row: f"{100 * row.accuracy.low:.0f} - {row.accuracy.high:.0%}", spare=3),
        Column("seconds", lambda row: number(row.seconds, 0), spare=1),
    ]
    return from_rows(f"demo model, float32, block on the floor, {rows[0].settings}", rows, columns, [])


def _right(task: str, row: FieldRow) -> str:
    return f"{row.right[task]} of {row.asked[task]}"


def _interval(row: FieldRow) -> str:
    return f"{nats(max(0.0, row.divergence.low))} - {nats(row.divergence.high)}"


def _changed(row: FieldRow) -> float:
    tasks = (list(zip(row.changed[task], row.tokens[task], strict=True)) for task in row.changed)
    return bootstrap(*tasks).mean


def kept_rows(path: Path, *, settings: str, names: Sequence[str]) -> dict[str, FieldRow]:
    """The rows of ``names`` in the file at ``path``, if any, that were measured with ``settings``."""
    records = read_records(path, field="output") if path.exists() and path.stat().st_size else []
    rows = [FieldRow(**record) for record in records]
    return {row.kv: row for row in rows if row.settings == settings and row.kv in names}


def run(args: argparse.Namespace, settings: str, rows: dict[str, FieldRow]) -> Iterator[FieldRow]:
    """The rows that ``rows`` lacks, as they are measured."""
    if all(name in rows for name in args.schemes):
        return
    texts, questions = (
        parse_tasks(args.tasks, samples=samples, seed=args.seed) for samples in (args.texts, args.samples)
    )
    with demo_model() as (model, tokenizer):
        known = [
            example
            for task in parse_tasks(args.calibrate or args.tasks, samples=1)
            for example in sample_examples(task.name, task.size or 0, CALIBRATION_TEXTS, CALIBRATION_SEED)
        ]
        words = [example.chat + example.reply for example in known]
        field = Field(model, [tokenizer.encode(text) for text in words], words, own=args.windows == "own")
        field.codecs.update(spectral_codecs(args, tokenizer))
        exam = Exam(model, tokenizer, texts, questions)
        exam.forced(field.scheme(REFERENCE))
        for name in args.schemes:
            if name not in rows:
                yield measure(exam, field.scheme(name), settings, args.seed)


def spectral_codecs(args: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, Codec]:
    """The codecs of the schemes called "spectral-BITS", by name."""
    names = [name for name in args.schemes if name.startswith("spectral-")]
    if not names:
        return {}
    tasks = ",".join(task.name for task in parse_tasks(args.calibrate or args.tasks, samples=1))
    moments = calibrated(tasks, SPECTRAL_TEXTS, tokenizer)
    return {
        name: spectral(moments, float(name.removeprefix("spectral-")), args.shrink, "planner", name) for name in names
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what is missing, prints the table and returns the exit code; 130 after Ctrl-C."""
    args = parse(argv)
    known = args.calibrate or args.tasks
    settings = f"{args.tasks}: {args.texts} texts and {args.samples} questions a task, seed {args.seed}, "
    settings += f"{args.windows} windows, calibrated on {known}, shrink {args.shrink:g}"
    rows = kept_rows(args.output, settings=settings, names=args.schemes)
    code = 0
    try:
        for row in run(args, settings, rows):
            rows[row.kv] = row
            lines = "".join(as_json(asdict(rows[name])) + "\n" for name in args.schemes if name in rows)
            write_file(args.output, lines.encode())
    except KeyboardInterrupt:
        code = 130
    ordered = [rows[name] for name in args.schemes if name in rows]
    if ordered:
        print(render("md", ordered, field_table(ordered)), end="")
    if args.plot is not None and ordered:
        points = [FieldPoint(row.kv, row.kind, row.bits, row.divergence, row.accuracy) for row in ordered]
        draw(points, args.plot, _title(ordered[0]))
    return code


def _title(row: FieldRow) -> str:
    return f"demo model: {', '.join(row.right)}\n{min(row.asked.values())} questions a task, bars 95 %"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; ``schemes`` is a list. Raises ``SystemExit`` 2 for a mistake."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="rows, .jsonl; those that are there are kept")
    add("--plot", type=Path, help="divergence and right answers against bits, .png")
    usual = (*NAMES, *SPECTRAL)
    known = f"of {', '.join(NAMES)}, spectral-BITS, presets and plan files"
    add("--schemes", default=",".join(usual), metavar="LIST", help=known)
    add("--tasks", default=TASKS, metavar="LIST", help="(default: %(default)s)")
    add("--calibrate", metavar="LIST", help="tasks whose texts calibrate, by default those that are measured")
    add("--shrink", type=float, default=DEFAULT_SHRINK, help="of spectral bases (default: %(default)s)")
    add("--texts", type=int, default=24, help="right replies a task that are forced (default: %(default)s)")
    add("--samples", type=int, default=200, help="questions a task (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--windows", choices=("same", "own"), default="same", help="at 16 bits: 32 + 128 for all, or each paper's own")
    args = parser.parse_args(argv)
    args.schemes = [name.strip() for name in args.schemes.split(",")]
    return args


if __name__ == "__main__":
    sys.exit(main())
