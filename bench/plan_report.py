"""A plan layer by layer, for people: scores, sensitivities and bits of K and V; and rung by rung."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from statistics import fmean

import torch

from qkv_engine.config import BLOCK_TOKENS, RungConfig
from qkv_engine.device.layouts import SIDES
from qkv_engine.device.per_token import per_token
from qkv_engine.errors import CapacityError
from qkv_engine.kernels.formats import PageShape, make_format
from qkv_engine.kernels.formats.family import SideName
from qkv_engine.kv.slabs import make_tables
from qkv_engine.layer_kv import LayerKV
from qkv_engine.planner.budget import ladder_of
from qkv_engine.planner.kvmix import KVmix
from qkv_engine.planner.plan import KVPlan
from qkv_engine.planner.pm_kvq import PMKVQ
from qkv_engine.planner.predict import as_good, outlier_layers, predicted_loss, spectral_loss
from qkv_engine.planner.profile import Profile
from qkv_engine.planner.spectral import error
from qkv_engine.sizes import format_size

from .table import Column, Table, from_rows

GUESSING = 0.5  # of the loss of guessing: a model above it knows too little of a text to be profiled on it
REFERENCE_K, REFERENCE_V = "int2-channel-128", "int2-token-128"  # whose sensitivities stand for a layer's


@dataclass(frozen=True)
class LayerRow:
    """A layer of a plan, K and V.

    ``score``: mean gradient norms of W_k and W_v. ``nats``: sensitivity at 2 bits, or what these cost in bases. ``k``,
    ``v``, ``bits``: format and code bits at the floor. ``rungs``: code bits on every rung, widest first.
    """

    layer: int
    k_score: float
    v_score: float
    k_nats: float | None
    v_nats: float | None
    k: str
    v: str
    k_bits: float
    v_bits: float
    k_rungs: list[float]
    v_rungs: list[float]


@dataclass(frozen=True)
class RungRow:
    """A rung of a plan: effective bits of a block, predicted loss in nats, tokens and requests that a cache holds.

    Layers with a window count by what they hold of a request of the plan's context. None where something cannot be
    told: formats that were not profiled, no cache or context given.
    """

    rung: str
    bits: float
    loss: float | None
    tokens: int | None
    requests: int | None


def layer_rows(plan: KVPlan) -> list[LayerRow]:
    """The layers of ``plan`` in order, with the formats that their blocks really take."""
    number, profile, ladder = plan.model.num_layers, plan.profile, ladder_of(plan.config("plan"), plan.model)
    rungs = [ladder.stored(rung) for rung in range(len(ladder.names))]
    k, v = ([rung.formats(side, number) for rung in rungs] for side in SIDES)
    k_nats, v_nats = _nats(plan)
    return [
        LayerRow(
            layer,
            profile.scores.k[layer],
            profile.scores.v[layer],
            k_nats[layer],
            v_nats[layer],
            k[-1][layer],
            v[-1][layer],
            _bits(k[-1][layer], "k", kv),
            _bits(v[-1][layer], "v", kv),
            [_bits(rung[layer], "k", kv) for rung in k],
            [_bits(rung[layer], "v", kv) for rung in v],
        )
        for layer, kv in enumerate(plan.model.kv_of_layers)
    ]


def _nats(plan: KVPlan) -> list[Sequence[float | None]]:
    """What K and V of each layer cost at 2 bits: sensitivities, or in a plan with bases what it was solved for."""
    profile, unknown = plan.profile, [None] * plan.model.num_layers
    if profile.spectra:
        return [[error([2] * len(each), each) for each in side] for side in (profile.spectra.k, profile.spectra.v)]
    reference = REFERENCE_V if isinstance(plan.settings, PMKVQ) else REFERENCE_K
    return [profile.sensitivities.k.get(reference, unknown), profile.sensitivities.v.get(REFERENCE_V, unknown)]


def rung_rows(plan: KVPlan, memory: int | None = None) -> list[RungRow]:
    """The rungs of ``plan``, widest first; ``memory`` is the cache in bytes whose capacity is told."""
    ladder = ladder_of(plan.config("plan"), plan.model)
    context = None if isinstance(plan.settings, KVmix) else plan.settings.context
    tables = None if memory is None else make_tables(ladder.spec, memory)
    return [
        RungRow(
            name,
            per_token(ladder, number, plan.context).bits,
            _loss(ladder.stored(number), plan.profile),
            None if tables is None else tables.max_tokens(number, context=plan.profile.context),
            None if tables is None or context is None else tables.max_requests(context, number),
        )
        for number, name in enumerate(ladder.names)
    ]


def _loss(rung: RungConfig, profile: Profile) -> float | None:
    return spectral_loss(rung, profile.spectra) if profile.spectra else predicted_loss(rung, profile)


def plan_title(plan: KVPlan) -> str:
    """Model, method and texts."""
    prompts = plan.profile.prompts
    texts = f"{prompts.count} texts of {prompts.source}"
    return f"{plan.model.name} · {plan.method}, {_choice(plan)} · {texts}, {prompts.tokens:,} tokens"


def plan_table(plan: KVPlan, rows: Sequence[LayerRow], memory: int | None = None) -> Table:
    """The table of a plan, with what its rungs take and lose, and what else there is to know."""
    is_ranked = isinstance(plan.settings, KVmix)
    columns: list[Column[LayerRow]] = [
        Column("layer", lambda row: str(row.layer)),
        Column("K score", lambda row: f"{row.k_score:.3g}" if is_ranked else ""),
        Column("K nats", lambda row: "" if is_ranked or row.k_nats is None else f"{row.k_nats:.2g}"),
        Column("K bits", lambda row: _steps(row.k_rungs)),
        Column("V score", lambda row: f"{row.v_score:.3g}" if is_ranked else ""),
        Column("V nats", lambda row: "" if is_ranked or row.v_nats is None else f"{row.v_nats:.2g}"),
        Column("V bits", lambda row: _steps(row.v_rungs)),
        Column("K", lambda row: row.k, spare=2),
        Column("V", lambda row: row.v, spare=1),
    ]
    notes = [*_loss_notes(plan), _summary(rows), *_rung_notes(plan, memory), *_advice(plan)]
    return from_rows(plan_title(plan), rows, columns, notes)


def _choice(plan: KVPlan) -> str:
    settings = plan.settings
    if isinstance(settings, KVmix):
        return "layers at random" if settings.random_seed is not None else "layers by gradient norm"
    held = "" if settings.parsed().nbytes is None else f"{settings.requests:,} of "
    return f"{settings.budget} for {held}{settings.context:,} tokens"


def _loss_notes(plan: KVPlan) -> list[str]:
    """The loss of the profiled model, and a warning where it is near that of guessing."""
    loss, scale, guessing = plan.profile.loss, plan.profile.position_scale, log(plan.model.vocab_size)
    if loss is None:
        return []
    where = f" at positions times {scale}" if scale > 1 else ""
    lines = [f"Loss of the texts at 16 bits{where}: {loss:.2g} nats a token"]
    if loss >= GUESSING * guessing:
        remedy = ": choose a smaller --position-scale" if scale > 1 else ""
        lines.append(f"Warning: guessing has {guessing:.2f}. What matters to a model that is lost says little{remedy}")
    return lines


def _summary(rows: Sequence[LayerRow]) -> str:
    k, v = fmean(row.k_bits for row in rows), fmean(row.v_bits for row in rows)
    return f"Codes at the floor: K {k:.5g} bits and V {v:.5g} on average"


def _rung_notes(plan: KVPlan, memory: int | None) -> list[str]:
    """A line a rung: metadata counted, windows not."""
    nbytes = memory if isinstance(plan.settings, KVmix) else memory or plan.settings.parsed().nbytes
    try:
        rungs = rung_rows(plan, nbytes)
    except CapacityError as error:
        return [*_rung_notes_of(rung_rows(plan), None), f"{format_size(nbytes or 0)}: {error.message}"]
    return _rung_notes_of(rungs, nbytes)


def _rung_notes_of(rungs: Sequence[RungRow], nbytes: int | None) -> list[str]:
    lines = []
    for rung in rungs:
        loss = "" if rung.loss is None else f", predicted loss {rung.loss:.2g} nats"
        tokens = "" if rung.tokens is None else f", {rung.tokens:,} tokens in {format_size(nbytes or 0)}"
        requests = "" if rung.requests is None else f", {rung.requests:,} requests"
        lines.append(f"{rung.rung}: {rung.bits:.2f} bits an element with metadata{loss}{tokens}{requests}")
    return lines


def _advice(plan: KVPlan) -> list[str]:
    """Presets that do as well, and keys that few bits a token do not suit."""
    lines = [f"Preset {name} is predicted as good: {loss:.2g} nats at no more bytes" for name, loss in as_good(plan)]
    layers = outlier_layers(plan.profile)
    if layers:
        most = max(plan.profile.key_outliers)
        where = ", ".join(map(str, layers[:8])) + (", ..." if len(layers) > 8 else "")
        lines.append(
            f"Keys have channels up to {most:.0f} times the median (layers {where}) and no q/k norm tames them: "
            "prefer K per channel, or --key-scale"
        )
    return lines


def _steps(bits: Sequence[float]) -> str:
    """Bits rung by rung, each once."""
    return " ".join(dict.fromkeys(f"{width:g}" for width in bits))


def _bits(name: str, side: SideName, kv: LayerKV) -> float:
    """Code bits an element."""
    return (
        make_format(name, torch.float32)
        .layout(PageShape(kv.num_kv_heads, BLOCK_TOKENS, kv.head_dim), side)
        .element_bits
    )
