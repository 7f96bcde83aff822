"""Spectral KV: K and V in bases of their own, few bits for the channels that matter and none for those that do not.

A floor is a layout for K and one for V of each layer: runs of 16 channels of falling width, the same in all heads. The
error of a run is its energy, in nats, times the gain of its bits; all layers and both sides share the budget, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations_with_replacement, groupby, pairwise

import msgspec
import torch

from qkv_engine.config import BLOCK_TOKENS, DENSE16, KVConfig, RungConfig
from qkv_engine.errors import ConfigError
from qkv_engine.fingerprint import ModelFingerprint
from qkv_engine.kernels.formats import Format, PageShape, Side, make_format
from qkv_engine.kernels.formats.family import SideName
from qkv_engine.kernels.formats.graded import ChannelRun, Graded
from qkv_engine.kernels.formats.graded.layout import UNIT
from qkv_engine.kernels.formats.uniform import Uniform
from qkv_engine.layer_kv import WINDOW_BITS, LayerKV
from qkv_engine.models.bases import LayerBases

from .allocate import Choice, efficient
from .basis import GAIN, Basis, channel_energies, solve_basis
from .budget import Budget, solve
from .mixed import RECENT, SINK, can_step
from .moments import SideMoments
from .profile import Profile, Spectra

DEFAULT_SHRINK = 0.3
WIDTHS = (8, 4, 2, 1, 0)  # bits of a run
# Channels at whose multiples widths may change: a dot of the decode kernel takes so many of K at once, of one width.
# Boundaries at 16 would save K a fifth of its error, or .05 bits, for a fifth more of the kernel's time.
STEPS: dict[SideName, int] = {"k": 32, "v": UNIT}
WIDE = {bits: f"int{bits}-channel-128" for bits in (8, 4)}  # formats of all channels alike, through which blocks step


class Spectral(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method", tag="spectral"
):
    """Settings of spectral plans, which turn a profile with spectra into a ladder.

    ``budget``: memory at the floor, such as "1.75bits" or "6GiB"; see ``Budget`` for ``context`` and ``requests``.
    ``shrink``: 0 to 1, how far the bases' metrics are drawn towards the identity. ``eager``: blocks go to the floor at
    once. ``sink``, ``recent``: first and newest tokens of a request that stay dense. Raises ``ConfigError`` for a value
    out of range.
    """

    budget: str
    context: int
    requests: int = 1
    shrink: float = DEFAULT_SHRINK
    eager: bool = False
    sink: int = SINK
    recent: int = RECENT

    def __post_init__(self) -> None:
        self.parsed()
        self._ladder(())  # checks the windows
        if not 0 <= self.shrink <= 1:
            raise ConfigError("out of range", field="shrink", value=self.shrink, remedy="Give a number from 0 to 1")

    def parsed(self) -> Budget:
        return Budget.parse(self.budget, self.context, self.requests)

    def solve(self, profile: Profile, model: ModelFingerprint) -> KVConfig:
        """The ladder of least error.

        Raises ``ConfigError`` for a profile without spectra or of another ``shrink``, and for heads that 16 does not
        divide; ``CapacityError``, naming the smallest budget that has a ladder, if this one has none.
        """
        spectra = profile.spectra
        if not isinstance(spectra, Spectra):
            remedy = "Profile the model with qkv-engine plan --method spectral"
            raise ConfigError("its profile has no spectra", field="method", value="spectral", remedy=remedy)
        if spectra.shrink != self.shrink:
            remedy = f"Give {spectra.shrink:g}, or profile the model anew"
            raise ConfigError("the bases have another", field="shrink", value=self.shrink, remedy=remedy)
        layers = model.kv_of_layers
        items = list[list[Choice]]()
        for layer, k, v in zip(layers, spectra.k, spectra.v, strict=True):
            items += [choices(layer, "k", k), choices(layer, "v", v)]

        def make(floor: Sequence[Choice], number: int) -> KVConfig:
            return self._ladder(self._rungs(floor, layers))

        budget = self.parsed()
        shares = budget.shares(self._ladder(()), model)
        return solve(budget, self.budget, items, make, (len(WIDE) + 2,), shares, model)

    def _ladder(self, rungs: Sequence[RungConfig]) -> KVConfig:
        """The ladder of ``rungs`` below the dense one."""
        rungs = (DENSE16, *rungs)
        return KVConfig(name="plan", rungs=rungs, sink=self.sink, recent=self.recent, eager=self.eager)

    def _rungs(self, floor: Sequence[Choice], layers: Sequence[LayerKV]) -> list[RungConfig]:
        """The rungs below the dense one: all channels at 8 bits, then at 4 where that leads on, then ``floor``."""
        names = [choice.name for choice in floor]
        rungs = [RungConfig("spectral", tuple(names[::2]), tuple(names[1::2]))]
        for bits, wide in () if self.eager else reversed(WIDE.items()):
            above = [wide if _leads(wide, name, layers[item // 2]) else WIDE[8] for item, name in enumerate(names)]
            k, v = tuple(above[::2]), tuple(above[1::2])
            if (k, v) != (rungs[0].k, rungs[0].v):
                rungs.insert(0, RungConfig(f"int{bits}", k, v))
        return rungs


def num_runs(layer: LayerKV) -> int:
    """Runs of 16 channels of a head. Raises ``ConfigError`` for heads that 16 does not divide."""
    if layer.head_dim % UNIT:
        message = f"{UNIT} must divide the channels of a head, and this model's have {layer.head_dim}"
        raise ConfigError(message, field="method", value="spectral", remedy="Choose another method")
    return layer.head_dim // UNIT


def choices(layer: LayerKV, side: SideName, energies: Sequence[float]) -> list[Choice]:
    """The layouts of a side that cost less than all smaller ones; blocks of windows keep 8 bits.

    Codes are nested from 8 bits, so a block gets to each of them. ``energies``: of runs of 16 channels.
    """
    if layer.least_bits(1) >= WINDOW_BITS:
        widths = [8] * len(energies)
        fmt = format_of(widths)
        return [Choice(fmt.name, _side(fmt, layer).nbytes, error(widths, energies))]
    found, weights = _layouts(layer, side), torch.tensor(energies, dtype=torch.float64)
    costs = (torch.tensor([[GAIN[bits] for bits in each[0]] for each in found]).double() @ weights).tolist()
    return efficient([Choice(name, nbytes, cost) for (_, name, nbytes), cost in zip(found, costs, strict=True)])


def error(widths: Sequence[int], energies: Sequence[float]) -> float:
    """What the errors of runs of ``widths`` cost: each run's energy times the gain of its bits."""
    return sum(GAIN[bits] * energy for bits, energy in zip(widths, energies, strict=True))


def format_of(widths: Sequence[int]) -> Format:
    """The format whose runs of 16 channels have ``widths``, which do not rise."""
    if len(set(widths)) == 1 and widths[0] in WIDE:
        return Uniform(widths[0], "channel", BLOCK_TOKENS)
    return Graded(tuple(ChannelRun(UNIT * len(list(of)), bits) for bits, of in groupby(widths) if bits))


def widths_of(name: str, number: int) -> list[int] | None:
    """The widths of the ``number`` runs of a head in the format ``name``; None if it is dense."""
    fmt = make_format(name, torch.bfloat16)
    if isinstance(fmt, Uniform):
        return [int(fmt.bits)] * number
    if not isinstance(fmt, Graded):
        return None
    coded = [run.bits for run in fmt.runs for _ in range(run.channels // UNIT)]
    return coded + [0] * (number - len(coded))


@lru_cache
def _layouts(layer: LayerKV, side: SideName) -> list[tuple[tuple[int, ...], str, int]]:
    """Widths of runs, name and bytes of every layout that a side may have, all with codes."""
    found = combinations_with_replacement(WIDTHS, num_runs(layer))
    formats = [(widths, format_of(widths)) for widths in found if widths[0] and _keeps_steps(widths, STEPS[side])]
    return [(widths, fmt.name, _side(fmt, layer).nbytes) for widths, fmt in formats]


def _keeps_steps(widths: Sequence[int], step: int) -> bool:
    """Whether ``widths`` of runs of 16 channels change at multiples of ``step`` channels alone."""
    return all(a == b or UNIT * number % step == 0 for number, (a, b) in enumerate(pairwise(widths), 1))


def _side(fmt: Format, layer: LayerKV) -> Side:
    """The layout of K; that of V has as many bytes and the same steps."""
    return fmt.layout(PageShape(layer.num_kv_heads, BLOCK_TOKENS, layer.head_dim), "k")


def _leads(wide: str, name: str, layer: LayerKV) -> bool:
    """Whether a side can step from the format ``wide`` to ``name``."""
    return can_step(*(_side(make_format(each, torch.bfloat16), layer) for each in (wide, name)))


def run_energies(basis: Basis, moments: SideMoments) -> list[float]:
    """What each run of 16 channels costs without codes, all heads together, in nats, to six digits."""
    channels = channel_energies(basis.spectrum, moments.covariance, moments.gradient).sum(0)
    return [float(f"{run:.6g}") for run in torch.unflatten(channels, 0, (-1, UNIT)).sum(-1).tolist()]


def solve_spectra(
    moments: Sequence[tuple[SideMoments, SideMoments]], shrink: float
) -> tuple[list[LayerBases], Spectra]:
    """The bases of each layer, and what plans are made from. ``moments``: those of K and of V, by layer."""
    solved = [[solve_basis(side.metric, side.covariance, shrink) for side in layer] for layer in moments]
    bases = [LayerBases(k.matrix.float(), v.matrix.float(), k.spectrum.float(), v.spectrum.float()) for k, v in solved]
    k, v = ([run_energies(layer[side], of[side]) for layer, of in zip(solved, moments, strict=True)] for side in (0, 1))
    return bases, Spectra(shrink, k, v)


def empty_spectra(model: ModelFingerprint, shrink: float) -> Spectra:
    """Spectra of zeros, with which settings are checked before the passes over the texts."""
    nothing = [[0.0] * num_runs(layer) for layer in model.kv_of_layers]
    return Spectra(shrink, nothing, nothing)
