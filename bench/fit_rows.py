"""Rows of ``qkv-engine fit``: formats of weights and KV with their bytes, bits, loss and speed, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qkv_engine.config import KVConfig
from qkv_engine.device.layouts import Ladder
from qkv_engine.fit import FitChoice, FitTask, KVLoss
from qkv_engine.loading import with_weights
from qkv_engine.models.loader import num_parameters
from qkv_engine.planner.predict import predicted_loss
from qkv_engine.planner.profile import Profile
from qkv_engine.sizes import format_size

from .report import number, size, times
from .roofline import GPU, count_weights, limit_seconds
from .table import Column, Table, from_rows, joined

ORDER = "order: what fits, then the least loss, then the fewest bytes a step"


@dataclass(frozen=True, kw_only=True)
class FitRow:
    """Formats of weights and KV for requests that run at once.

    ``weights``: None for the checkpoint's own. ``rung``: the ladder's on which blocks stand as far as they may. ``left_bytes``: of the memory, beside weights and
    KV; negative where they take more. ``step_bytes`` are read by a decode step at the end of the context, in which
    each request gets a token. ``limit_tok_s``: tokens a second of such steps at full bandwidth, a limit; None where
    the device's bandwidth is not known. Losses are in nats a token, ``kv_loss_of`` says whose; None where unknown.
    """

    model: str
    device: str
    dtype: str
    memory_bytes: int
    context: int
    requests: int
    weights: str | None
    kv: str
    rung: str
    fits: bool
    weights_bytes: int
    kv_bytes: int
    left_bytes: int
    weights_bits: float
    kv_bits: float
    step_bytes: int
    limit_tok_s: float | None
    weights_loss: float | None
    kv_loss: float | None
    kv_loss_of: str
    loss: float | None


def fit_row(choice: FitChoice, task: FitTask, *, model: str, device: str, kv_loss_of: str) -> FitRow:
    """The row of a choice; ``device`` is the product's name."""
    config = with_weights(task.model, choice.weights).share(task.num_ranks)
    weights = count_weights(config, task.dtype)
    seconds = limit_seconds(weights, task.requests, choice.kv_nbytes) if GPU in device else None
    return FitRow(
        model=model,
        device=device,
        dtype=str(task.dtype).removeprefix("torch."),
        memory_bytes=task.nbytes,
        context=task.context,
        requests=task.requests,
        weights=choice.weights,
        kv=choice.kv.name,
        rung=choice.ladder.names[choice.rung],
        fits=choice.fits,
        weights_bytes=choice.weights_nbytes,
        kv_bytes=choice.kv_nbytes,
        left_bytes=task.nbytes - choice.nbytes,
        weights_bits=round(8 * choice.weights_nbytes / num_parameters(config), 3),
        kv_bits=round(choice.ladder.effective_bits(choice.rung), 3),
        step_bytes=round(weights.nbytes_read(task.requests)) + choice.kv_nbytes,
        limit_tok_s=None if seconds is None else round(task.requests / seconds, 1),
        weights_loss=choice.weights_loss,
        kv_loss=choice.kv_loss,
        kv_loss_of=kv_loss_of,
        loss=choice.loss,
    )


def profile_loss(profile: Profile) -> KVLoss:
    """The loss of any rung as ``profile`` predicts it."""

    def loss(kv: KVConfig, ladder: Ladder, rung: int) -> float | None:
        return predicted_loss(ladder.stored(rung), profile)

    return loss


def fit_table(rows: Sequence[FitRow]) -> Table:
    """The table of rows of one task, best first."""
    first = rows[0]
    load = f"{first.requests:,} request{'' if first.requests == 1 else 's'} of {first.context:,} tokens"
    title = joined(first.model, first.device, first.dtype, f"memory {format_size(first.memory_bytes)}", load)
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
        Column("speed", lambda row: "" if row.limit_tok_s else times(first.step_bytes, row.step_bytes), spare=7),
        Column("loss", lambda row: "?" if row.loss is None else f"{row.loss:.2g}"),
    ]
    return from_rows(title, rows, columns, _notes(first))._replace(group=None)


def _notes(row: FitRow) -> list[str]:
    notes = [ORDER]
    if row.limit_tok_s is None:
        notes.append(f"speed: bytes a step against those of the first row; no bandwidth is known of {row.device}")
    else:
        notes.append("tok/s, at most: of all requests in decode steps at the end of their context, at full bandwidth")
    notes.append(f"loss, nats a token: of weights as measured on the demo model, of KV from {row.kv_loss_of}")
    return notes
