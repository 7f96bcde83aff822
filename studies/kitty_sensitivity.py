"""Which channels of K matter to attention: ``python -m studies.kitty_sensitivity --samples 2``.

Kitty's eq. 1: a channel's sensitivity is the mean squared error of the attention matrix when this channel alone has 2
bits and all others are exact. For each layer of the demo model: the share of the sum of sensitivities in the channels
that have most of it, and in as many channels that a rule picks from the keys alone, as boosting must. The nearer a rule
comes to the best, the better it boosts.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from statistics import fmean

import torch
from torch import Tensor

from qkv_engine.bench.table import Table, as_markdown
from qkv_engine.kernels.formats import PageShape
from qkv_engine.kernels.formats.uniform import Uniform
from qkv_engine.kernels.formats.uniform import reference as uniform

from .accuracy import TASKS
from .captured import Attended, conversations

SHARES = (0.125, 0.25)  # of the channels: Kitty and Kitty-Pro
PIECE = 16  # channels whose attention exists at once

# Rules that rank the channels of a head's keys [T, D]: the larger, the sooner boosted.
RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "magnitude": lambda k: k.abs().mean(0),
    "variance": lambda k: k.var(0),
    "range": lambda k: k.amax(0) - k.amin(0),
    "chance": lambda k: torch.rand(k.shape[1], generator=torch.Generator().manual_seed(0)),
}


def sensitivities(layer: Attended) -> Tensor:
    """The error of the window's attention, one channel of the old keys at 2 bits at a time: [H, D]."""
    old = layer.old(layer.k)
    side = Uniform(2, "channel", 128).layout(PageShape(*old.shape[1:]), "k")
    rough = layer.with_old(layer.k, uniform.dequantize(uniform.quantize(old, side), side))
    queries = torch.unflatten(layer.q, 0, (len(layer.k), -1))  # [H, G, WINDOW, D]
    return torch.stack([_of_head(*head) for head in zip(queries, layer.k, rough - layer.k, strict=True)])


def _of_head(q: Tensor, k: Tensor, error: Tensor) -> Tensor:
    """Mean squared errors [D] of attention, for queries q [G, WINDOW, D], keys k and their errors [T, D]."""
    number, length, scale = q.shape[1], len(k), q.shape[2] ** -0.5
    hidden = torch.ones(number, length, dtype=torch.bool).triu(length - number + 1)
    scores = (scale * q @ k.T).masked_fill(hidden, -torch.inf)
    exact, found = scores.softmax(-1), []
    for channels in torch.split(torch.arange(q.shape[2]), PIECE):
        change = scale * q[..., channels].movedim(2, 0).unsqueeze(3) * error[:, channels].T[:, None, None]
        found.append(((scores + change).softmax(-1) - exact).square().mean((1, 2, 3)))
    return torch.cat(found)


def measure(tasks: str, samples: int) -> list[dict[tuple[str, float], list[float]]]:
    """Of each layer the shares of sensitivity by rule and share of channels, of all heads and conversations."""
    found: list[dict[tuple[str, float], list[float]]] = []
    for layers in conversations(tasks, samples):
        found = found or [defaultdict(list) for _ in layers]
        for layer, shares in zip(layers, found, strict=True):
            if not len(layer.old(layer.k)):
                continue
            old = layer.old(layer.k).transpose(0, 1).flatten(1, 2)
            for k, mine in zip(old, sensitivities(layer), strict=True):
                ranks = {"best": mine} | {name: rule(k) for name, rule in RULES.items()}
                for name, rank in ranks.items():
                    for share in SHARES:
                        top = rank.topk(int(share * len(rank))).indices
                        shares[name, share].append(float(mine[top].sum() / mine.sum()))
    return found


def as_table(found: list[dict[tuple[str, float], list[float]]]) -> Table:
    """A line a layer, and the mean."""
    columns = [(name, share) for share in SHARES for name in ("best", *RULES)]
    rows = [[f"{100 * fmean(layer[column]):.0f}" for column in columns] for layer in found]
    means = [f"{100 * fmean(fmean(layer[column]) for layer in found):.1f}" for column in columns]
    headers = ["layer", *(f"{name}, {100 * share:g} %" for name, share in columns)]
    lines = [[str(number), *row] for number, row in enumerate(rows)] + [["mean", *means]]
    return Table("% of K's sensitivity in the channels that a rule picks", headers, lines, [], None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--samples", type=int, default=2, help="conversations a task")
    args = parser.parse_args()
    with torch.inference_mode():
        print(as_markdown(as_table(measure(args.tasks, args.samples))))


if __name__ == "__main__":
    main()
