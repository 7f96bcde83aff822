"""Best levels of 2-bit and 1-bit codes: ``python -m studies.xquant_levels --samples 4``.

XQuant draws levels in by eta, a share of the group's range: values shrink towards the middle of the range by 1 - 2 eta.
For K and V of the demo model, with the bytes that the engine would store, a line for each side, width and group:

    error           squared error as a share of the variance within groups: without eta, with the paper's, with the
                    best, which is exact, the error being a parabola in eta
    gain            slope of values over elements within groups, without eta and at the eta of the least error
    eta of gain 1   also exact, the gain being linear in eta
    output error    squared error of attention's output as a share of its square, this side alone being quantized
    attention       of K: what falls on quantized tokens, as a share of what falls on them with exact keys

Queries are those of the newest 128 tokens, which stay in full precision with their keys and values, as under presets.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from qkv_engine.bench.table import Table, as_markdown, from_columns
from qkv_engine.kernels.formats import PageShape
from qkv_engine.kernels.formats.family import SideName
from qkv_engine.kernels.formats.uniform import Uniform
from qkv_engine.kernels.formats.uniform.layout import Axis, UniformSide
from qkv_engine.kernels.formats.uniform.reference import encode, spread

from .accuracy import TASKS
from .captured import Attended, conversations

GRID = {2: (0.0, 0.0225, 0.045, 0.09), 1: (0.0, 1 / 12, 1 / 6, 0.2, 1 / 4, 1 / 3)}
PAPER = {2: 0.045, 1: 1 / 6}
AXES: dict[SideName, Axis] = {"k": "channel", "v": "token"}


@dataclass
class Sums:
    """Sums over all conversations of one layer, side, width and group.

    A value less its element is residue + eta * slope: their squares, their product, and their products with the
    element's distance from its group's mean. ``output_error`` and ``attention`` on old tokens: by eta of the grid;
    ``exact_attention``: the latter with exact keys.
    """

    residue: float = 0.0
    slope: float = 0.0
    product: float = 0.0
    residue_gain: float = 0.0
    slope_gain: float = 0.0
    variance: float = 0.0
    fourth: float = 0.0  # fourth power of values over the deviation of their group
    number: int = 0
    output: float = 0.0
    output_error: dict[float, float] = field(default_factory=dict)
    exact_attention: float = 0.0
    attention: dict[float, float] = field(default_factory=dict)

    @property
    def best(self) -> float:
        """The eta of the least squared error."""
        return -self.product / self.slope

    def error(self, eta: float) -> float:
        """The squared error as a share of the variance within groups."""
        return (self.residue + 2 * eta * self.product + eta**2 * self.slope) / self.variance

    def gain(self, eta: float) -> float:
        """The slope of values over elements within groups."""
        return 1 + (self.residue_gain + eta * self.slope_gain) / self.variance

    @property
    def unbiased(self) -> float:
        """The eta at which the gain is 1."""
        return -self.residue_gain / self.slope_gain


# Sums whose ratios are taken over all layers together.
SUMMED = ("residue", "slope", "product", "residue_gain", "slope_gain", "variance", "fourth", "number")


def total(each: Iterable[Sums]) -> Sums:
    """Sums over layers. Errors of outputs are shares of each layer's output, so that all layers count alike."""
    found = Sums()
    layers = list(each)
    for sums in layers:
        for name in SUMMED:
            setattr(found, name, getattr(found, name) + getattr(sums, name))
        found.exact_attention += sums.exact_attention
        for eta, error in sums.output_error.items():
            found.output_error[eta] = found.output_error.get(eta, 0.0) + error / sums.output / len(layers)
            found.attention[eta] = found.attention.get(eta, 0.0) + sums.attention.get(eta, 0.0)
    found.output = 1.0
    return found


Key = tuple[SideName, int, int, int]  # side, bits, group, layer


def measure(tasks: str, samples: int) -> dict[Key, Sums]:
    """The sums of every side, width, group and layer. Conversations that fit the window are left out."""
    found: dict[Key, Sums] = {}
    for layers in conversations(tasks, samples):
        for number, layer in enumerate(layers):
            if not len(layer.old(layer.k)):
                continue
            expected = layer.output(layer.k, layer.v)
            for name, bits, group in product(AXES, (2, 1), (32, 128)):
                add(found.setdefault((name, bits, group, number), Sums()), layer, expected, name, bits, group)
    return found


def add(sums: Sums, layer: Attended, expected: Tensor, name: SideName, bits: int, group: int) -> None:
    """Adds one conversation's layer to ``sums``; ``expected`` is its output."""
    exact = layer.k if name == "k" else layer.v
    x = layer.old(exact)
    side = Uniform(bits, AXES[name], group).layout(PageShape(x.shape[1], x.shape[2], x.shape[3]), name)
    plain, slope = parabola(x, side)
    residue, distance = plain - x, x - group_mean(x, side)
    scale = group_mean(distance.square(), side).sqrt()
    sums.residue += float(residue.square().sum())
    sums.slope += float(slope.square().sum())
    sums.product += float((residue * slope).sum())
    sums.residue_gain += float((residue * distance).sum())
    sums.slope_gain += float((slope * distance).sum())
    sums.variance += float(distance.square().sum())
    sums.fourth += float((distance / torch.where(scale > 0, scale, 1)).pow(4).sum())
    sums.number += x.numel()
    sums.output += float(expected.square().sum())
    sums.exact_attention += layer.old_share(layer.k)
    for eta in GRID[bits]:
        other = layer.with_old(exact, plain + eta * slope)
        out = layer.output(other, layer.v) if name == "k" else layer.output(layer.k, other)
        error = float((out - expected).square().sum())
        sums.output_error[eta] = sums.output_error.get(eta, 0.0) + error
        if name == "k":
            sums.attention[eta] = sums.attention.get(eta, 0.0) + layer.old_share(other)


def parabola(x: Tensor, side: UniformSide) -> tuple[Tensor, Tensor]:
    """Values of ``x`` [n, H, 128, D] at eta 0, and their change by eta: range * (1 - 2 code / (2^bits - 1))."""
    codes, meta = encode(x, side)
    low, span = (spread(part.float(), side) for part in meta)
    share = codes.float() / side.max_code
    return low + share * span, span * (1 - 2 * share)


def group_mean(x: Tensor, side: UniformSide) -> Tensor:
    """The mean of each element's group, which broadcasts with ``x`` [n, H, 128, D]; groups divide D."""
    if side.axis == "channel":
        return spread(torch.unflatten(x, 2, (-1, side.group)).mean(3), side)
    return spread(torch.unflatten(x, 3, (-1, side.group)).mean(4).mT, side)


def side_table(found: dict[Key, Sums]) -> Table:
    """All layers together."""
    rows = sorted({key[:3] for key in found}, key=lambda key: (key[0], -key[1], key[2]))
    sums = [total(found[key] for key in found if key[:3] == row) for row in rows]
    columns = {
        "side": [name.upper() for name, *_ in rows],
        "bits": [str(bits) for _, bits, _ in rows],
        "group": [str(group) for *_, group in rows],
        "kurtosis": [f"{s.fourth / s.number:.2f}" for s in sums],
        "error, eta 0": [f"{s.error(0):.3f}" for s in sums],
        "paper's eta": [f"{s.error(PAPER[row[1]]):.3f}" for row, s in zip(rows, sums, strict=True)],
        "best": [f"{s.error(s.best):.3f}" for s in sums],
        "best eta": [f"{s.best:.3f}" for s in sums],
        "gain, eta 0": [f"{s.gain(0):.2f}" for s in sums],
        "gain, best": [f"{s.gain(s.best):.2f}" for s in sums],
        "eta of gain 1": [f"{s.unbiased:.3f}" for s in sums],
    }
    return from_columns("all layers", columns, [])


def grid_table(found: dict[Key, Sums], bits: int) -> Table:
    """Output error and attention on old tokens by eta, all layers."""
    rows = sorted(key for key in {key[:3] for key in found} if key[1] == bits)
    sums = [total(found[key] for key in found if key[:3] == row) for row in rows]
    columns = {"": [f"{name.upper()}, group {group}" for name, _, group in rows]}
    for eta in GRID[bits]:
        columns[f"{eta:.3g}"] = [
            f"{s.output_error[eta]:.4f}" + (f", {s.attention[eta] / s.exact_attention:.2f}" if row[0] == "k" else "")
            for row, s in zip(rows, sums, strict=True)
        ]
    return from_columns(f"{bits} bits: output error, and of K attention, by eta", columns, [])


def layer_table(found: dict[Key, Sums]) -> Table:
    """The best eta of each layer, by squared error, by gain and by attention's output."""
    rows = sorted({key[:3] for key in found}, key=lambda key: (key[0], -key[1], key[2]))
    layers = sorted({key[3] for key in found})
    columns = {"": [f"{name.upper()} {bits} bits, {group}" for name, bits, group in rows]}
    for layer in layers:
        sums = [found[(*row, layer)] for row in rows]
        columns[str(layer)] = [f"{s.best:.3f}, {s.unbiased:.3f}, {_least(s):.3f}" for s in sums]
    return from_columns("eta by layer: least squared error, gain 1, least output error", columns, [])


def _least(sums: Sums) -> float:
    return min(sums.output_error, key=sums.output_error.__getitem__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--samples", type=int, default=4, help="conversations a task")
    args = parser.parse_args()
    found = measure(args.tasks, args.samples)
    print(as_markdown(side_table(found)))
    for bits in GRID:
        print(as_markdown(grid_table(found, bits)))
    print(as_markdown(layer_table(found)))


if __name__ == "__main__":
    main()
