"""Choices in PatternKV, one against another: ``python -m studies.pattern_choices --group keys --samples 20``.

Right replies to the demo tasks are read, not sampled: the prompt in one pass, then up to each window's end, so that a
query finds its earlier windows quantized and its own in full precision. A reply counts as right if every one of its
tokens was the likeliest, as greedy decoding would then have given it. Errors are those of a layer by itself: of the
keys and values in windows against what went in, of attention against the same queries in full precision.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv_engine.bench.grading import wilson_interval
from qkv_engine.bench.questions import parse_tasks
from qkv_engine.bench.table import Table, as_markdown, from_columns
from qkv_engine.models.llama import LlamaForCausalLM
from qkv_engine.models.loader import load_model
from qkv_engine.text.tokenizer import Tokenizer

from .papers import patternkv, quantizers
from .papers.__main__ import DEMO, HEAD_DIM
from .papers.cache import LayerCache, Side, attention, by_channel, by_token
from .papers.decode import SimulatedBatch
from .papers.patternkv import WINDOW, Assign, Mine, PatternSide, flattest, gate_limit, gated, nearest

TASKS = "ledger:40,lookup:100,addition:10,sorting:40"
BITS = 2
Along = Callable[[Callable[[Tensor], Tensor], int], Callable[[Tensor], Tensor]]  # by_channel or by_token

# ---- keys


def unassigned(x: Tensor, patterns: Tensor) -> Tensor:
    """No pattern for any token: KIVI."""
    return torch.zeros_like(x)


def pages(x: Tensor) -> Tensor:
    """``[H, n, D]`` -> [H, pages, 128, D]."""
    return torch.unflatten(x, 1, (-1, WINDOW))


def channel_ranges(x: Tensor) -> Tensor:
    """Range of each channel of a page, ``[..., 128, D]`` -> [..., D]."""
    return x.amax(-2) - x.amin(-2)


def if_shrinks(assign: Assign, power: int = 1) -> Assign:
    """``assign`` for pages of which it makes the sum of the channels' ranges, to ``power``, smaller; else no pattern."""

    def assigned(x: Tensor, patterns: Tensor) -> Tensor:
        found = pages(assign(x, patterns))
        before, after = (channel_ranges(each).pow(power).sum(-1) for each in (pages(x), pages(x) - found))
        return torch.where((after < before)[..., None, None], found, 0).flatten(1, 2)

    return assigned


def refined(assign: Assign, rounds: int, power: int) -> Assign:
    """``assign``, then in each round a page's tokens choose again, by the distance from the middle of its intervals.

    The middle of a channel's residuals is subtracted by the quantizer anyway. Distances are sums over channels of
    ``power``; the larger, the more the farthest channels count.
    """

    def assigned(x: Tensor, patterns: Tensor) -> Tensor:
        found = assign(x, patterns)
        for _ in range(rounds):
            left = pages(x - found)
            middle = ((left.amin(2, keepdim=True) + left.amax(2, keepdim=True)) / 2).expand_as(left).flatten(1, 2)
            distance = [(x - middle - p[:, None]).abs().pow(power).sum(-1) for p in patterns.unbind(1)]
            found = patternkv._gather(patterns, torch.stack(distance, -1))
        return found

    return assigned


def descended(assign: Assign, rounds: int, power: int = 2) -> Assign:
    """``assign``, then token after token takes the pattern that makes its page's intervals smallest, all others kept."""

    def assigned(x: Tensor, patterns: Tensor) -> Tensor:
        found = assign(x, patterns)
        left = pages(x - found).clone()  # [H, pages, 128, D]
        original = pages(x)
        for _ in range(rounds):
            for t in range(WINDOW):
                others = torch.cat((left[:, :, :t], left[:, :, t + 1 :]), 2)
                low, high = others.amin(2)[:, :, None], others.amax(2)[:, :, None]
                choice = original[:, :, t, None] - patterns[:, None]  # [H, pages, M, D]
                cost = (torch.maximum(high, choice) - torch.minimum(low, choice)).pow(power).sum(-1)
                best = cost.argmin(-1, keepdim=True)[..., None].expand(-1, -1, -1, x.shape[2])
                left[:, :, t] = choice.gather(2, best)[:, :, 0]
        return (original - left).flatten(1, 2)

    return assigned


# ---- patterns


def mined(x: Tensor, patterns: int, iterations: int, tokens: int) -> Tensor:
    """k-means of up to ``tokens`` tokens, evenly thinned, from evenly spaced ones; empty clusters keep their pattern."""
    x = x[:, spaced(x.shape[1], min(tokens, x.shape[1]))]
    found = x[:, spaced(x.shape[1], min(patterns, x.shape[1]))]
    for _ in range(iterations):
        label = (found.square().sum(-1)[:, None] - 2 * x @ found.transpose(1, 2)).argmin(-1)
        of = F.one_hot(label, found.shape[1]).float().transpose(1, 2)  # [H, M, n]
        size = of.sum(-1, keepdim=True)
        found = torch.where(size > 0, of @ x / size.clamp(min=1), found)
    return found.half().float()


def spaced(length: int, count: int) -> Tensor:
    """``count`` evenly spaced positions below ``length``."""
    return torch.arange(count) * length // count


class WithoutCentres(PatternSide):
    """A side whose windows add no pattern."""

    def _decoded(self, x: Tensor) -> Tensor:
        return self._coded(x, self.window)


class MinedLate(WithoutCentres):
    """A side without centres that mines a prompt shorter than a window with the tokens that fill it."""

    def settle(self) -> None:
        if self.length >= WINDOW:
            super().settle()


def around_means(x: Tensor) -> Tensor:
    """Tokens ``[H, n, D]`` less the mean of their page, which costs a quantizer of channels nothing."""
    return torch.cat([page - page.mean(1, keepdim=True) for page in x.split(WINDOW, 1)], 1)


class Choice(NamedTuple):
    """A form of the scheme. ``keys`` and ``values``: how they are assigned, None for full precision."""

    keys: Assign | None = None
    values: Assign | None = None
    patterns: int = 32
    iterations: int = 10
    tokens: int = 1024
    kind: type[PatternSide] = PatternSide
    mine: Mine | None = None
    around: Callable[[Tensor], Tensor] = lambda x: x  # keys as patterns see them

    def layer(self) -> LayerCache:
        """A layer's cache."""
        keys = None if self.keys is None else self._seen(self.keys)
        return LayerCache(self._side(keys, by_channel, self.around), self._side(self.values, by_token, lambda x: x))

    def _seen(self, assign: Assign) -> Assign:
        return lambda x, patterns: assign(self.around(x), patterns)

    def _side(self, assign: Assign | None, along: Along, around: Callable[[Tensor], Tensor]) -> Side:
        if assign is None:
            return Side(lambda full: 0, lambda x: x)
        mine = self.mine or partial(mined, patterns=self.patterns, iterations=self.iterations, tokens=self.tokens)
        quantize = along(lambda groups: quantizers.kivi(groups, BITS).values(), WINDOW)
        return self.kind(lambda x: mine(around(x)), assign, assign, quantize)


GATE = gate_limit(HEAD_DIM)
SOUND_K, SOUND_V = if_shrinks(nearest), gated(flattest, GATE)

GROUPS: dict[str, dict[str, Choice]] = {
    "keys": {
        "none": Choice(unassigned),
        "always, range of the token": Choice(flattest),
        "always, L2": Choice(nearest),
        "L2 if the page shrinks": Choice(SOUND_K),
        "L2 if squares shrink": Choice(if_shrinks(nearest, 2)),
        "around the middle, L2": Choice(if_shrinks(refined(nearest, 3, 2), 2)),
        "around the middle, L4": Choice(if_shrinks(refined(nearest, 3, 4), 2)),
        "around the middle, L8": Choice(if_shrinks(refined(nearest, 3, 8), 2)),
        "one after another": Choice(if_shrinks(descended(nearest, 1), 2)),
    },
    "key patterns": {
        "none": Choice(unassigned),
        "L2": Choice(nearest),
        "no centres": Choice(nearest, kind=WithoutCentres),
        "late": Choice(nearest, kind=MinedLate),
        "around means": Choice(nearest, kind=WithoutCentres, around=around_means),
        "around means, late": Choice(nearest, kind=MinedLate, around=around_means),
        "around means, late, one after another": Choice(descended(nearest, 1), kind=MinedLate, around=around_means),
        "around means, late, if squares": Choice(if_shrinks(nearest, 2), kind=MinedLate, around=around_means),
    },
    "values": {
        "none": Choice(None, unassigned),
        "range, always": Choice(None, flattest),
        "range, if it shrinks": Choice(None, gated(flattest, 1)),
        "range, gate": Choice(None, SOUND_V),
        "L2, always": Choice(None, nearest),
        "L2, gate": Choice(None, gated(nearest, GATE)),
    },
    "bank": {
        **{f"{m} patterns": Choice(SOUND_K, SOUND_V, patterns=m) for m in (8, 16, 32, 64)},
        **{f"{n} iterations": Choice(SOUND_K, SOUND_V, iterations=n) for n in (1, 2, 5, 20, 30)},
        **{f"{n} tokens": Choice(SOUND_K, SOUND_V, tokens=n) for n in (256, 512)},
        "no centres": Choice(SOUND_K, SOUND_V, kind=WithoutCentres),
        "as released": Choice(SOUND_K, SOUND_V, mine=patternkv.mine),
    },
}

# ---- measures


@dataclass
class Sums:
    """Sums over questions and layers of a choice, of one task."""

    error: dict[str, float] = field(default_factory=dict)  # squared, by what
    power: dict[str, float] = field(default_factory=dict)
    right: int = 0
    asked: int = 0
    loss: float = 0.0  # nats
    tokens: int = 0
    seconds: float = 0.0

    def add(self, name: str, found: Tensor, exact: Tensor) -> None:
        self.error[name] = self.error.get(name, 0.0) + float((found - exact).square().sum())
        self.power[name] = self.power.get(name, 0.0) + float(exact.square().sum())

    def relative(self, name: str) -> float:
        return self.error.get(name, 0.0) / max(self.power.get(name, 0.0), 1e-30)


class Measured(LayerCache):
    """A layer's cache that keeps what went in, and sums the errors of its output and, when asked, of its tokens."""

    def __init__(self, layer: LayerCache, sums: Sums):
        super().__init__(layer.k, layer.v)
        self.sums = sums
        self.exact = [Side(lambda full: 0, lambda x: x) for _ in range(2)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``LayerCache.attend``."""
        is_prompt = self.k.length == 0
        out = super().attend(q, k, v)
        for side, x in zip(self.exact, (k, v), strict=True):
            side.append(x)
        if not is_prompt:
            self.sums.add("output", out, attention(q, self.exact[0].tokens, self.exact[1].tokens))
        return out

    def finish(self) -> None:
        """Adds the errors of the quantized tokens."""
        for name, side, exact in zip("kv", (self.k, self.v), self.exact, strict=True):
            end = side.quantized
            self.sums.add(name, side.tokens[:, :end], exact.tokens[:, :end])


@torch.inference_mode()
def read(model: LlamaForCausalLM, choice: Choice, prompt: list[int], reply: list[int], sums: Sums) -> None:
    """Reads a right reply through the caches of ``choice``, and adds to ``sums``."""
    start = time.monotonic()
    layers = [Measured(choice.layer(), sums) for _ in range(model.config.num_layers)]
    batch = SimulatedBatch(list(layers), model.config.num_kv_heads)
    ids = torch.tensor(prompt + reply[:-1])
    edges = [0, len(prompt), *range((len(prompt) // WINDOW + 1) * WINDOW, len(ids), WINDOW), len(ids)]
    hidden = [model(ids[a:b], torch.arange(a, b), batch) for a, b in pairwise(edges)]
    logits = model.compute_logits(torch.cat(hidden)[len(prompt) - 1 :])
    target = torch.tensor(reply)
    for layer in layers:
        layer.finish()
    sums.right += bool((logits.argmax(-1) == target).all())
    sums.asked += 1
    sums.loss += float(F.cross_entropy(logits, target, reduction="sum"))
    sums.tokens += len(reply)
    sums.seconds += time.monotonic() - start


def row(name: str, tasks: Sequence[Sums]) -> dict[str, str]:
    """A line of the table."""

    def mean(of: Callable[[Sums], float]) -> float:
        return sum(of(sums) for sums in tasks) / len(tasks)

    low, high = wilson_interval(sum(sums.right for sums in tasks), sum(sums.asked for sums in tasks))
    return {
        "choice": name,
        "K error": f"{mean(lambda sums: sums.relative('k')):.4f}",
        "V error": f"{mean(lambda sums: sums.relative('v')):.4f}",
        "output error": f"{mean(lambda sums: sums.relative('output')):.5f}",
        "nats": f"{1000 * mean(lambda sums: sums.loss / sums.tokens):.3f}",
        **{f"task {i}": f"{100 * sums.right / sums.asked:.0f}" for i, sums in enumerate(tasks)},
        "mean": f"{100 * mean(lambda sums: sums.right / sums.asked):.1f}",
        "95 % interval": f"{100 * low:.1f} - {100 * high:.1f}",
        "seconds": f"{sum(sums.seconds for sums in tasks):.0f}",
    }


def run(args: argparse.Namespace, sums: dict[str, list[Sums]]) -> Iterator[int]:
    """Reads question after question of every task by every choice into ``sums``; yields after each question."""
    tasks = parse_tasks(args.tasks, samples=args.samples, seed=args.seed)
    torch.set_num_threads(1)
    model = load_model(str(DEMO), device=torch.device("cpu")).model
    assert isinstance(model, LlamaForCausalLM)
    with closing(Tokenizer.from_folder(DEMO)) as tokenizer:
        for i in range(args.samples):
            for j, task in enumerate(tasks):
                example = task.examples[i]
                prompt, reply = tokenizer.encode(example.chat), tokenizer.encode(example.reply)
                for name, choice in args.choices.items():
                    read(model, choice, prompt, reply, sums[name][j])
            yield i + 1


def as_table(sums: dict[str, list[Sums]], labels: Sequence[str], asked: int) -> Table:
    """The choices for people; errors are relative, nats a thousand reply tokens."""
    rows = [row(name, tasks) for name, tasks in sums.items()]
    heads = {f"task {i}": label for i, label in enumerate(labels)}
    columns = {heads.get(name, name): [each[name] for each in rows] for name in rows[0]}
    return from_columns(f"demo, {asked} samples a task, 2 bits, groups of {WINDOW}", columns, [])


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table; Ctrl-C prints that of the questions read by then."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", choices=GROUPS, default="keys")
    parser.add_argument("--only", default="", help="names of the group's choices, separated by ;")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    wanted = [name.strip() for name in args.only.split(";") if name.strip()]
    args.choices = {name: choice for name, choice in GROUPS[args.group].items() if not wanted or name in wanted}
    labels = args.tasks.split(",")
    sums = {name: [Sums() for _ in labels] for name in args.choices}
    asked = 0
    try:
        for asked in run(args, sums):
            print(f"\r{asked} of {args.samples}", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        pass
    if asked:
        print(as_markdown(as_table(sums, labels, asked)), end="")


if __name__ == "__main__":
    main()
