"""Divergence from the first KV preset under teacher forcing: every set of texts with every preset, one row each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from qkv_engine.config import KVConfig
from qkv_engine.errors import ConfigError, QKVError, RequestError
from qkv_engine.presets import PRESETS

from .forced import Choices, Forced, ForcedText, TextScore, compare, refer
from .paired import ABOVE, Paired, paired_cell
from .preset_loop import measure_presets
from .provenance import Provenance, block_bits, engine_values, provenance
from .questions import Task, ask
from .report import number, short, unfilled_notes
from .scoring import ScoringEngine, max_pair_tokens
from .status import OK, status_cell, status_notes
from .table import Column, Table, from_rows, joined
from .texts import read_texts
from .watch import Watch, Work, no_watch

if TYPE_CHECKING:
    from qkv_engine.text.tokenizer import Tokenizer

RESAMPLES = 2000  # of a bootstrap
LEAST_SHOWN = 1e-6  # nats: rounding takes part in what is less
PERCENT = "95 %"


@dataclass(frozen=True, kw_only=True)
class DivergencePlan:
    """Presets, of which the first is the reference, and texts: the right replies of ``tasks``, and a file's lines.

    ``samples``: lines of the file that are read. Raises ``ConfigError`` for a reference that nothing is compared with.
    """

    model: str
    kvs: tuple[str, ...]
    tasks: tuple[Task, ...] = ()
    data: Path | None = None
    samples: int = 0
    seed: int = 0  # that the tasks were drawn with

    def __post_init__(self) -> None:
        if len(self.kvs) < 2:
            remedy = (
                f"Give a list, the reference first, such as bf16,{self.kvs[0] if self.kvs[0] != 'bf16' else 'int4'}"
            )
            raise ConfigError("nothing to compare with", field="kv", value=self.kvs[0], remedy=remedy)

    @property
    def sets(self) -> tuple[Task, ...]:
        """The sets of texts by name; that of a file has its questions nowhere but in the file."""
        return self.tasks if self.data is None else (*self.tasks, Task(self.data.stem, None, ()))


@dataclass(frozen=True, kw_only=True)
class DivergenceRow(Provenance):
    """A set of texts with one KV preset.

    ``kl`` is the mean KL divergence of a scored token's distribution from that of the preset ``reference``, in nats;
    ``changed`` the share of tokens at which another token comes first; ``low`` and ``high`` their 95 % intervals, by
    bootstrap over texts. They are None in the reference's own row. ``nll`` is the mean negative log-likelihood in nats;
    ``exact`` counts texts whose every token comes first. ``better`` and ``worse`` count texts that diverge less and
    more than with the preset before, and ``p`` is their sign test. Bits are those of ``AccuracyRow``. ``status`` is
    "ok", "does not fit" or "failed"; ``detail`` says why.
    """

    model: str
    task: str
    size: int | None
    kv: str
    reference: str
    texts: int | None = None
    tokens: int | None = None
    kl: float | None = None
    kl_low: float | None = None
    kl_high: float | None = None
    changed: float | None = None
    changed_low: float | None = None
    changed_high: float | None = None
    nll: float | None = None
    exact: int | None = None
    better: int | None = None
    worse: int | None = None
    p: float | None = None
    kv_bytes_total: int | None = None
    effective_bits: float | None = None
    block_bits: float | None = None
    lowest_bits: float | None = None
    demotions: int | None = None
    preemptions: int | None = None
    seconds: float | None = None
    status: str
    detail: str | None = None


def task_texts(tokenizer: Tokenizer, task: Task) -> list[ForcedText]:
    """The questions of ``task`` with their right replies, which are scored. Raises ``ConfigError`` if one has none."""
    texts = []
    for example, asked in zip(task.examples, ask(tokenizer, task.examples), strict=True):
        reply = tokenizer.encode(example.reply, add_special_tokens=False)
        if not reply:
            raise ConfigError("a question without a reply", field="tasks", value=task.name)
        texts.append(ForcedText(asked.prompt + reply, asked.num_first, len(asked.prompt)))
    return texts


def file_texts(tokenizer: Tokenizer, path: Path, *, samples: int, max_tokens: int) -> list[ForcedText]:
    """Lines of a file, as ``qkv-engine plan --data`` has them: a text counts but for its first token, or a reply does.

    Raises ``ConfigError`` for a line that is none.
    """
    found = read_texts(tokenizer, path, samples=samples, max_tokens=max_tokens)
    return [ForcedText(text.token_ids, text.first_label, text.first_label) for text in found if len(text.token_ids) > 1]


def measure_divergence(
    plan: DivergencePlan,
    open_engine: Callable[[str], AbstractContextManager[ScoringEngine]],
    *,
    watch: Watch = no_watch,
    describe: Callable[[QKVError], str] = str,
) -> Iterator[DivergenceRow]:
    """Yields a row as soon as it is known. Engines and failures are those of ``measure_presets``."""
    measuring = _Measuring(plan, watch)
    sets = dict.fromkeys(plan.kvs, plan.sets)
    return measure_presets(sets, open_engine, measuring.begin, measuring.failure, describe)


@dataclass
class _Measuring:
    plan: DivergencePlan
    watch: Watch
    _reference: dict[str, list[Choices]] = field(default_factory=dict)  # by set of texts
    _last: dict[str, list[TextScore]] = field(default_factory=dict)  # by set, of the preset that was measured last

    def begin(self, kv: str, engine: ScoringEngine) -> Callable[[Task], DivergenceRow]:
        if engine.tokenizer is None:
            raise ConfigError("has no tokenizer to read texts with", field="model", value=self.plan.model)
        return partial(self._set, kv, engine, engine.tokenizer)

    def failure(self, kv: str, of: Task, status: str, detail: str | None) -> DivergenceRow:
        names: dict[str, Any] = {"model": self.plan.model, "task": of.name, "size": of.size, "kv": kv}
        names |= provenance(seed=self.plan.seed)
        return DivergenceRow(**names, reference=self.plan.kvs[0], status=status, detail=detail)

    def _set(self, kv: str, engine: ScoringEngine, tokenizer: Tokenizer, of: Task) -> DivergenceRow:
        texts = self._texts(tokenizer, engine, of)
        engine.reset_stats()
        work = Work(f"{kv}, {of.label}", len(texts), sum(len(text.ids) for text in texts), len(texts))
        start = time.monotonic()
        with self.watch(work, engine):
            found = self._forced(kv, engine, texts, of)
        stats, before = engine.stats(), self._last.get(of.label)
        self._last[of.label] = found.scores
        row = replace(
            self.failure(kv, of, OK, None),
            **engine_values(stats, self.plan.seed),
            block_bits=block_bits(stats),
            texts=len(texts),
            tokens=sum(score.tokens for score in found.scores),
            nll=nll_of(found.scores),
            exact=sum(score.exact for score in found.scores),
            lowest_bits=found.lowest_bits,
            seconds=round(time.monotonic() - start, 3),
        )
        if kv == self.plan.kvs[0]:
            return row
        paired = {} if before is None or row.reference == self._previous(kv) else closer(found.scores, before)._asdict()
        kl, changed = kl_of(found.scores), changed_of(found.scores)
        figures: dict[str, Any] = {"kl": kl.mean, "kl_low": kl.low, "kl_high": kl.high}
        figures |= {"changed": changed.mean, "changed_low": changed.low, "changed_high": changed.high}
        return replace(row, **figures, **paired)

    def _previous(self, kv: str) -> str:
        return self.plan.kvs[self.plan.kvs.index(kv) - 1]

    def _texts(self, tokenizer: Tokenizer, engine: ScoringEngine, of: Task) -> list[ForcedText]:
        if of.examples:
            return task_texts(tokenizer, of)
        assert self.plan.data is not None, "a set without examples is the file's"
        return file_texts(tokenizer, self.plan.data, samples=self.plan.samples, max_tokens=max_pair_tokens(engine))

    def _forced(self, kv: str, engine: ScoringEngine, texts: list[ForcedText], of: Task) -> Forced:
        if kv == self.plan.kvs[0]:
            found, self._reference[of.label] = refer(engine, texts)
            return found
        if of.label not in self._reference:
            raise RequestError(f"{self.plan.kvs[0]}, the reference, was not measured")
        return compare(engine, texts, self._reference[of.label])


class Mean(NamedTuple):
    """A mean over tokens, and its 95 % interval by bootstrap over texts."""

    mean: float
    low: float
    high: float


def kl_of(*sets: Sequence[TextScore]) -> Mean:
    """The divergence of a token in nats, mean of ``sets`` of equal weight."""
    return bootstrap(*([(score.kl, score.tokens) for score in scores] for scores in sets))


def changed_of(*sets: Sequence[TextScore]) -> Mean:
    """The share of tokens at which the first choice changed, mean of ``sets`` of equal weight."""
    return bootstrap(*([(score.changed, score.tokens) for score in scores] for scores in sets))


def nll_of(scores: Sequence[TextScore]) -> float:
    """The mean negative log-likelihood of a token, in nats."""
    return sum(score.nll for score in scores) / sum(score.tokens for score in scores)


def closer(mine: Sequence[TextScore], other: Sequence[TextScore]) -> Paired:
    """Texts that diverge less, and more, than with another preset."""
    return Paired.of([-score.kl for score in mine], [-score.kl for score in other])


def bootstrap(*sets: Sequence[tuple[float, int]]) -> Mean:
    """The mean of a token in ``sets`` of equal weight, each the sum and the number of the tokens of its texts.

    The interval is that of texts drawn anew within each set, the same draws for the same numbers of texts.
    """
    generator = torch.Generator().manual_seed(0)
    means, draws = list[Tensor](), list[Tensor]()
    for texts in sets:
        found = torch.tensor(texts, dtype=torch.float64)
        drawn = found[torch.randint(len(found), (RESAMPLES, len(found)), generator=generator)].sum(dim=1)
        means.append(found[:, 0].sum() / found[:, 1].sum())
        draws.append(drawn[:, 0] / drawn[:, 1])
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = torch.quantile(torch.stack(draws).mean(dim=0), ends).tolist()
    return Mean(float(torch.stack(means).mean()), low, high)


def divergence_table(rows: Sequence[DivergenceRow], ladders: Mapping[str, KVConfig] = PRESETS) -> Table:
    """The rows by set of texts, its ``ladders`` below one another; columns with nothing in them are left out."""
    sets = list(dict.fromkeys((row.task, row.size) for row in rows))
    rows = sorted(rows, key=lambda row: sets.index((row.task, row.size)))  # stable: presets keep their order
    columns: list[Column[DivergenceRow]] = [
        Column("task", lambda row: row.task, is_text=True),
        Column("size", lambda row: number(row.size, 0), spare=13),
        Column("kv", lambda row: row.kv, is_text=True),
        Column("texts", lambda row: number(row.texts, 0), spare=7),
        Column("tokens", lambda row: number(row.tokens, 0), spare=3),
        Column("KL, nats", lambda row: nats(row.kl)),
        Column(f"KL, {PERCENT}", _kl_interval, spare=9),
        Column("first choice changed", lambda row: "" if row.changed is None else f"{row.changed:.2%}"),
        Column(f"changed, {PERCENT}", _changed_interval, spare=6),
        Column(ABOVE, lambda row: paired_cell(row.better, row.worse, row.p), spare=8),
        Column("perplexity", lambda row: "" if row.nll is None else f"{math.exp(row.nll):,.4f}", spare=5),
        Column("to the letter", lambda row: number(row.exact, 0), spare=4),
        Column("bits a block", lambda row: number(row.block_bits, 2), spare=10),
        Column("bits held", lambda row: number(row.effective_bits, 2), spare=11),
        Column("lowest", lambda row: short(row.lowest_bits), spare=2),
        Column("preemptions", lambda row: number(row.preemptions or None, 0), spare=1),
        Column("status", status_cell, spare=12, is_text=True),
    ]
    names = [f"{row.task} {row.kv}" for row in rows]
    notes = [*status_notes(rows, names), *unfilled_notes(rows, names, ladders)]
    return from_rows(_title(rows), rows, columns, notes)


def _kl_interval(row: DivergenceRow) -> str:
    return "" if row.kl_low is None else f"{nats(row.kl_low)} - {nats(row.kl_high)}"


def _changed_interval(row: DivergenceRow) -> str:
    if row.changed_low is None or row.changed_high is None:
        return ""
    return f"{100 * row.changed_low:.2f} - {row.changed_high:.2%}"


def nats(value: float | None) -> str:
    """``value`` with two digits that count and no exponent, down to ``LEAST_SHOWN``; nothing for None."""
    if value is None:
        return ""
    if value < LEAST_SHOWN:
        return f"<{LEAST_SHOWN:.6f}"
    return f"{value:.{max(2, 1 - math.floor(math.log10(value)))}f}"


def _title(rows: Sequence[DivergenceRow]) -> str:
    ran = next((row for row in rows if row.device), rows[0])
    return joined(ran.model, ran.machine, ran.dtype, f"teacher forcing, divergence from {ran.reference}")
