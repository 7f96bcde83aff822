"""Perplexity of a text through the quantized cache: windows of its tokens, whose last part is scored."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qkv_engine.config import KVConfig
from qkv_engine.errors import CapacityError, ConfigError, ModelError, QKVError
from qkv_engine.input_files import read_input
from qkv_engine.presets import PRESETS

from .provenance import Provenance, block_bits, engine_values, provenance
from .questions import MAX_FILE_NBYTES
from .report import number, short, unfilled_notes
from .scoring import Pair, Score, ScoringEngine, max_pair_tokens, score
from .status import FAILED, FAILURES, NO_FIT, OK, cause, status_cell, status_notes
from .table import Column, Table, from_rows, joined
from .watch import Watch, Work, no_watch

if TYPE_CHECKING:
    from qkv_engine.text.tokenizer import Tokenizer

DEFAULT_CONTEXT = 2048  # tokens of a window, where the model takes as many


class PerplexityText(NamedTuple):
    """A text by the name of its file."""

    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class PerplexityPlan:
    """A text, and how it is cut. None for ``context``: what the model takes; for ``stride``: half of the context."""

    model: str
    kvs: tuple[str, ...]
    text: PerplexityText
    context: int | None = None
    stride: int | None = None


@dataclass(frozen=True, kw_only=True)
class PerplexityRow(Provenance):
    """A text with one KV preset.

    ``context`` are the tokens of a window, ``stride`` those that are scored, ``tokens`` the scored ones of all
    windows. ``nll`` is their mean negative log-likelihood in nats, ``ratio`` the perplexity divided by that of the
    first preset. ``tok_s`` counts the tokens of all windows. Bits count all metadata: ``effective_bits`` those held at
    the peak of KV memory, ``block_bits`` those of a block on the last rung. ``status`` is "ok", "does not fit" or
    "failed"; ``detail`` says why.
    """

    model: str
    text: str
    kv: str
    context: int | None
    stride: int | None
    windows: int | None = None
    tokens: int | None = None
    nll: float | None = None
    perplexity: float | None = None
    bits_per_byte: float | None = None
    ratio: float | None = None
    kv_bytes_total: int | None = None
    effective_bits: float | None = None
    block_bits: float | None = None
    lowest_bits: float | None = None
    demotions: int | None = None
    preemptions: int | None = None
    tok_s: float | None = None
    seconds: float | None = None
    status: str
    detail: str | None = None


def read_text(path: Path) -> PerplexityText:
    """The text of the file ``--perplexity``. Raises ``ConfigError`` unless it is a regular UTF-8 file up to 64 MiB."""
    data = read_input(path, field="perplexity", max_nbytes=MAX_FILE_NBYTES)
    try:
        return PerplexityText(path.name, data.decode("utf-8"))
    except UnicodeDecodeError as error:
        remedy = "Convert it to UTF-8"
        raise ConfigError(
            f"is not UTF-8 at byte {error.start}", field="perplexity", value=str(path), remedy=remedy
        ) from error


class Windows(NamedTuple):
    """A text as pairs to score, and the bytes of the text that their continuations are."""

    pairs: list[Pair]
    num_bytes: int


def cut(tokenizer: Tokenizer, text: PerplexityText, *, context: int, stride: int) -> Windows:
    """Windows of ``context`` tokens, each ``stride`` behind the one before, of which the last ``stride`` are scored.

    The first ``context - stride`` tokens of the text are never scored, every other one once. A window begins with the
    BOS token if the model's texts do. Raises ``ConfigError`` for a text with nothing to score.
    """
    bos = [tokenizer.bos_token_id] if tokenizer.bos_token_id in tokenizer.encode("")[:1] else []
    ids = tokenizer.encode(text.text, add_special_tokens=False)
    num_prompt = context - stride
    first = num_prompt - len(bos)
    if len(ids) <= first:
        message = f"has {len(ids)} tokens, and the first {first} are not scored"
        raise ConfigError(message, field="perplexity", value=text.name, remedy="Use a longer text or a smaller context")
    windows = [bos + ids[start : start + context - len(bos)] for start in range(0, len(ids) - first, stride)]
    unscored = tokenizer.decode(ids[:first], skip_special_tokens=False)
    num_bytes = len(text.text.encode()) - len(unscored.encode())
    return Windows([Pair(ids[:num_prompt], ids[num_prompt:]) for ids in windows], num_bytes)


def measure_perplexity(
    plan: PerplexityPlan,
    open_engine: Callable[[str], AbstractContextManager[ScoringEngine]],
    *,
    watch: Watch = no_watch,
    describe: Callable[[QKVError], str] = str,
) -> Iterator[PerplexityRow]:
    """One row a preset, each as soon as it is measured. The first preset's engine decides the default context.

    Raises ``ConfigError`` for a text that is too short, and for windows that cannot be.
    """
    context, base = plan.context, None
    for kv in plan.kvs:
        names: dict[str, Any] = {"model": plan.model, "text": plan.text.name, "kv": kv} | provenance()
        row = PerplexityRow(**names, context=context, stride=plan.stride, status=FAILED)
        try:
            with open_engine(kv) as engine:
                context = context or min(DEFAULT_CONTEXT, max_pair_tokens(engine))
                row = replace(row, context=context, stride=_stride(plan.stride, context))
                row = _measure(row, plan.text, engine, watch)
        except CapacityError as error:
            row = replace(row, status=NO_FIT, detail=describe(error))
        except (ConfigError, ModelError):
            raise
        except FAILURES as error:
            row = replace(row, detail=cause(error, describe))
        base = base or row.perplexity
        yield replace(row, ratio=row.perplexity / base if row.perplexity and base else None)


def _stride(stride: int | None, context: int) -> int:
    if context < 2:
        raise ConfigError("must be at least 2", field="context", value=context)
    if stride is not None and not 1 <= stride < context:
        remedy = f"Use 1 to {context - 1}: a window begins with a token that is not scored"
        raise ConfigError("does not fit the context", field="stride", value=stride, remedy=remedy)
    return stride or context // 2


def _measure(row: PerplexityRow, text: PerplexityText, engine: ScoringEngine, watch: Watch) -> PerplexityRow:
    if engine.tokenizer is None:
        raise ConfigError("has no tokenizer to read a text with", field="model", value=row.model)
    assert row.context is not None and row.stride is not None
    pairs, num_bytes = cut(engine.tokenizer, text, context=row.context, stride=row.stride)
    longest = max(len(pair.ids) for pair in pairs)
    if longest > max_pair_tokens(engine):
        raise CapacityError(
            f"windows of {longest} tokens exceed the engine's {max_pair_tokens(engine)}",
            field="context",
            value=row.context,
            remedy="Use a smaller context or more kv_memory",
        )
    engine.reset_stats()
    num_tokens = sum(len(pair.ids) for pair in pairs)
    start = time.perf_counter()
    with watch(Work(row.kv, len(pairs), num_tokens, len(pairs)), engine):
        scores = list(score(engine, pairs))
    return _with_figures(row, pairs, scores, num_bytes, engine, time.perf_counter() - start)


def _with_figures(
    row: PerplexityRow,
    pairs: list[Pair],
    scores: list[Score],
    num_bytes: int,
    engine: ScoringEngine,
    seconds: float,
) -> PerplexityRow:
    total = -sum(one.logprob for one in scores)
    tokens = sum(len(pair.continuation) for pair in pairs)
    bits = [one.lowest_bits for one in scores if one.lowest_bits is not None]
    figures: dict[str, Any] = {
        **engine_values(engine.stats()),
        "block_bits": block_bits(engine.stats()),
        "windows": len(pairs),
        "tokens": tokens,
        "nll": total / tokens,
        "perplexity": math.exp(total / tokens),
        "bits_per_byte": total / math.log(2) / num_bytes,
        "lowest_bits": min(bits, default=None),
        "tok_s": sum(len(pair.ids) for pair in pairs) / seconds,
        "seconds": round(seconds, 3),
        "status": OK,
    }
    return replace(row, **figures)


def perplexity_table(rows: Sequence[PerplexityRow], ladders: Mapping[str, KVConfig] = PRESETS) -> Table:
    """A line for each of ``ladders``; columns with nothing in them are left out."""
    is_compared = len(rows) > 1
    columns: list[Column[PerplexityRow]] = [
        Column("kv", lambda row: row.kv, is_text=True),
        Column("tokens", lambda row: number(row.tokens, 0), spare=9),
        Column("nll", lambda row: number(row.nll, 4), spare=5),
        Column("perplexity", lambda row: number(row.perplexity, 4)),
        Column("bits/byte", lambda row: number(row.bits_per_byte, 4), spare=6),
        Column(f"vs {rows[0].kv}", lambda r: f"{r.ratio:.4f}x" if is_compared and r.ratio is not None else ""),
        Column("bits a block", lambda row: number(row.block_bits, 2), spare=7),
        Column("bits held", lambda row: number(row.effective_bits, 2), spare=8),
        Column("lowest", lambda row: short(row.lowest_bits), spare=4),
        Column("demotions", lambda row: number(row.demotions or None, 0), spare=3),
        Column("preemptions", lambda row: number(row.preemptions or None, 0), spare=2),
        Column("tok/s", lambda row: number(row.tok_s, 0), spare=1),
        Column("status", status_cell, spare=10, is_text=True),
    ]
    names = [row.kv for row in rows]
    notes = [*status_notes(rows, names), *unfilled_notes(rows, names, ladders)]
    return from_rows(_title(rows), rows, columns, notes)


def _title(rows: Sequence[PerplexityRow]) -> str:
    ran = next((row for row in rows if row.device), rows[0])
    windows = f"windows of {ran.context:,} tokens, the last {ran.stride:,} scored" if ran.device else None
    return joined(ran.text, ran.model, ran.machine, ran.dtype, windows)
