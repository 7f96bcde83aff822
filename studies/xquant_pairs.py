"""Codes shared by two layers: ``python -m studies.xquant_pairs --samples 4``.

XQuant gives the upper layer of a pair the lower one's codes. The paper also tried codes between the two, the rounded
weighted average gamma lower + (1 - gamma) upper; only the interval of gamma counts, and at 1 bit no average lies
between. For the demo model's K and V a line for each choice: the squared error of the lower and of the upper layer as a
share of the variance within groups, and of their attention's output as a share of its square, that side alone being
quantized. All lines have own ranges and the paper's eta; "own" shares nothing and takes twice the bytes of codes. "by
chance" is the share of equal codes of two independent layers with the same frequencies. Below the table: how far codes
of independent layers of normal values are apart, to be set beside the paper's Fig. 3.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from qkv_engine.bench.table import Table, as_markdown
from qkv_engine.kernels.formats import PageShape
from qkv_engine.kernels.formats.family import SideName
from qkv_engine.kernels.formats.uniform import Uniform
from qkv_engine.kernels.formats.uniform.layout import UniformSide
from qkv_engine.kernels.formats.uniform.reference import encode, spread

from .accuracy import TASKS
from .captured import Attended, conversations
from .xquant_levels import AXES, PAPER, group_mean

Choice = Callable[[Tensor, Tensor], Tensor]  # codes of the lower and the upper layer, float -> those of both


def weighted(gamma: float) -> Choice:
    """The codes nearest to the weighted average; ``gamma`` is one at which no average lies between two codes."""
    return lambda lower, upper: (gamma * lower + (1 - gamma) * upper).round()


CHOICES: dict[str, Choice] = {
    "take first": lambda lower, upper: lower,
    "gamma 3/4 to 5/6": weighted(0.8),
    "gamma 1/2 to 3/4": weighted(0.6),
    "mean, floor": lambda lower, upper: ((lower + upper) / 2).floor(),
    "mean, ceil": lambda lower, upper: ((lower + upper) / 2).ceil(),
    "gamma 1/4 to 1/2": weighted(0.4),
    "gamma 1/6 to 1/4": weighted(0.2),
    "take second": lambda lower, upper: upper,
}
OWN = "own"

Key = tuple[SideName, int, int, str]  # side, bits, group, choice


class Sums:
    """Sums over pairs and conversations: shares of the variance, lower and upper, and of the output; equal codes."""

    def __init__(self) -> None:
        self.lower = self.upper = self.output = self.equal = self.chance = 0.0
        self.number = 0


def measure(tasks: str, samples: int) -> dict[Key, Sums]:
    """The sums of every side, width, group and choice. Conversations that fit the window are left out."""
    found: dict[Key, Sums] = defaultdict(Sums)
    for layers in conversations(tasks, samples):
        for pair in zip(layers[::2], layers[1::2], strict=True):
            if not len(pair[0].old(pair[0].k)):
                continue
            expected = [layer.output(layer.k, layer.v) for layer in pair]
            for name, bits, group in product(AXES, (2, 1), (32, 128)):
                add(found, pair, expected, name, bits, group)
    return found


def add(
    found: dict[Key, Sums],
    pair: tuple[Attended, Attended],
    expected: list[Tensor],
    name: SideName,
    bits: int,
    group: int,
) -> None:
    """Adds a pair of layers of one conversation, whose attention's outputs are ``expected``, to every choice."""
    exact = [layer.k if name == "k" else layer.v for layer in pair]
    blocks = [layer.old(x) for layer, x in zip(pair, exact, strict=True)]
    side = Uniform(bits, AXES[name], group).layout(PageShape(*blocks[0].shape[1:]), name)
    encoded = [encode(x, side) for x in blocks]
    lower, upper = (codes.float() for codes, _ in encoded)
    variances = [float((x - group_mean(x, side)).square().sum()) for x in blocks]
    choices = {OWN: (lower, upper)} | {choice: (take(lower, upper),) * 2 for choice, take in CHOICES.items()}
    for choice, codes in choices.items():
        sums = found[name, bits, group, choice]
        errors, outputs = [], []
        for i, layer in enumerate(pair):
            value = values(codes[i], encoded[i][1], side)
            errors.append(float((value - blocks[i]).square().sum()) / variances[i])
            other = layer.with_old(exact[i], value)
            out = layer.output(other, layer.v) if name == "k" else layer.output(layer.k, other)
            outputs.append(float((out - expected[i]).square().sum() / expected[i].square().sum()))
        sums.lower += errors[0]
        sums.upper += errors[1]
        sums.output += sum(outputs) / 2
        sums.equal += float((lower == upper).float().mean())
        sums.chance += float(torch.dot(*(frequencies(codes, bits) for codes in (lower, upper))))
        sums.number += 1


def frequencies(codes: Tensor, bits: int) -> Tensor:
    """The share of each code, ``[2^bits]``."""
    return torch.bincount(codes.flatten().long(), minlength=2**bits) / codes.numel()


def values(codes: Tensor, meta: Tensor, side: UniformSide) -> Tensor:
    """Values [n, H, 128, D] of codes with levels drawn in by the paper's eta."""
    low, span = (spread(part.float(), side) for part in meta)
    eta = PAPER[side.bits]
    return low + (eta + (1 - 2 * eta) * codes / side.max_code) * span


def as_table(found: dict[Key, Sums]) -> Table:
    headers = ["side", "bits", "group", "equal codes, %", "by chance, %", "codes", "lower", "upper", "mean", "output"]
    cells = []
    for (name, bits, group, choice), sums in sorted(found.items(), key=lambda item: (item[0][0], -item[0][1])):
        lower, upper = sums.lower / sums.number, sums.upper / sums.number
        figures = [f"{x:.3f}" for x in (lower, upper, (lower + upper) / 2, sums.output / sums.number)]
        equal = [f"{100 * share / sums.number:.0f}" for share in (sums.equal, sums.chance)]
        cells.append([name.upper(), str(bits), str(group), *equal, choice, *figures])
    notes = [chance(bits) for bits in (2, 1)]
    return Table("squared errors by the codes that two layers share", headers, cells, notes)


def chance(bits: int, group: int = 32) -> str:
    """How often codes of two independent layers of normal values differ by each step."""
    side = Uniform(bits, "channel", group).layout(PageShape(64, 128, 128), "k")
    x = torch.randn(2, 1, 64, 128, 128, generator=torch.Generator().manual_seed(0))
    lower, upper = (encode(layer, side)[0].int() for layer in x)
    shares = torch.bincount((lower - upper).abs().flatten(), minlength=2**bits) / lower.numel()
    steps = ", ".join(f"by {step} in {100 * share:.1f} %" for step, share in enumerate(shares.tolist()))
    return f"Independent normal layers, {bits} bits, groups of {group}: codes differ {steps}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--samples", type=int, default=4, help="conversations a task")
    args = parser.parse_args()
    with torch.inference_mode():
        print(as_markdown(as_table(measure(args.tasks, args.samples))))


if __name__ == "__main__":
    main()
