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

from .accuracy import TASKS
from .papers import kitty, patternkv, quantizers
from .papers.cache import LayerCache, Quantize, Side, Simulate, attention, by_channel, by_token, full_precision
from .papers.decode import SimulatedBatch
from .papers.demo import HEAD_DIM, demo_model
from .papers.patternkv import WINDOW, Assign, Mine, PatternSide, flattest, gate_limit, gated, nearest

META_BITS = 32  # of a group: minimum and range in fp16
INDEX_BITS = 8  # of a token and head that may have a pattern

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


def if_shrinks(assign: Assign) -> Assign:
    """``assign`` in pages whose sum of channel ranges it makes smaller; no pattern in the others."""

    def assigned(x: Tensor, patterns: Tensor) -> Tensor:
        found = pages(assign(x, patterns))
        before, after = (channel_ranges(each).sum(-1) for each in (pages(x), pages(x) - found))
        return torch.where((after < before)[..., None, None], found, 0).flatten(1, 2)

    return assigned


def around_middle(x: Tensor, patterns: Tensor) -> Tensor:
    """The nearest pattern of each token, then three times the nearest to the token less its page's residual middle.

    The middle of a channel's residuals is subtracted by the quantizer anyway.
    """
    found = nearest(x, patterns)
    for _ in range(3):
        left = pages(x - found)
        middle = ((left.amin(2, keepdim=True) + left.amax(2, keepdim=True)) / 2).expand_as(left).flatten(1, 2)
        found = nearest(x - middle, patterns)
    return found


def one_after_another(x: Tensor, patterns: Tensor) -> Tensor:
    """The nearest pattern, then token by token the pattern that leaves its page the least sum of squared ranges."""
    original = pages(x)
    left = original - pages(nearest(x, patterns))  # [H, pages, 128, D]
    for t in range(WINDOW):
        others = torch.cat((left[:, :, :t], left[:, :, t + 1 :]), 2)
        low, high = others.amin(2)[:, :, None], others.amax(2)[:, :, None]
        choice = original[:, :, t, None] - patterns[:, None]  # [H, pages, M, D]
        cost = (torch.maximum(high, choice) - torch.minimum(low, choice)).square().sum(-1)
        best = cost.argmin(-1, keepdim=True)[..., None].expand(-1, -1, -1, x.shape[2])
        left[:, :, t] = choice.gather(2, best)[:, :, 0]
    return (original - left).flatten(1, 2)


# ---- patterns


Start = Callable[[Tensor, int], Tensor]  # tokens [H, n, D], their number -> the first patterns [H, M, D]


def mined(x: Tensor, patterns: int, iterations: int, tokens: int, start: Start) -> Tensor:
    """k-means of at most ``tokens`` of the tokens [H, n, D]; empty clusters keep their pattern."""
    x = evenly(x, min(tokens, x.shape[1]))
    found = start(x, min(patterns, x.shape[1]))
    for _ in range(iterations):
        label = torch.cdist(x, found).argmin(-1)
        of = F.one_hot(label, found.shape[1]).float().transpose(1, 2)  # [H, M, n]
        size = of.sum(-1, keepdim=True)
        found = torch.where(size > 0, of @ x / size.clamp(min=1), found)
    return found.half().float()


def evenly(x: Tensor, count: int) -> Tensor:
    """``count`` evenly spaced tokens."""
    return x[:, torch.arange(count) * x.shape[1] // count]


def at_random(x: Tensor, count: int) -> Tensor:
    """``count`` tokens by a fixed seed, the same of every head."""
    return x[:, torch.rand(x.shape[1], generator=torch.Generator().manual_seed(0)).topk(count).indices]


def farthest_first(x: Tensor, count: int) -> Tensor:
    """The first token, then always the one farthest from those taken."""
    taken = [x[:, :1]]
    least = torch.cdist(x, taken[0])[..., 0]
    while len(taken) < count:
        index = least.argmax(-1)[:, None, None].expand(-1, 1, x.shape[2])
        taken.append(x.gather(1, index))
        least = least.minimum(torch.cdist(x, taken[-1])[..., 0])
    return torch.cat(taken, 1)


def farthest_of_few(x: Tensor, count: int) -> Tensor:
    """``farthest_first`` among 256 of the tokens."""
    return farthest_first(evenly(x, min(256, x.shape[1])), count)


class Late(PatternSide):
    """A side that mines a prompt shorter than a window together with the tokens that fill it."""

    def settle(self) -> None:
        if self.length >= WINDOW:
            super().settle()


class LateWithoutCentres(Late):
    """``Late`` whose windows add no pattern."""

    def _decoded(self, x: Tensor) -> Tensor:
        return self._coded(x, self.window)


class Coder(NamedTuple):
    """Coded keys or values of windows, dequantized, and the bits an element of the code, metadata included."""

    simulate: Simulate
    bits: float


def uniform(along: Callable[[Quantize, int], Simulate], group: int) -> Coder:
    """Plain 2-bit codes."""
    return Coder(along(lambda groups: quantizers.kivi(groups, 2).values(), group), 2 + META_BITS / group)


def boosted(channels: int) -> Coder:
    """Kitty's keys: ``channels`` of a page and head have 4 bits, and each channel a byte that says which."""

    def simulate(x: Tensor) -> Tensor:
        return kitty.page_codes(pages(x).transpose(2, 3), channels).values().transpose(2, 3).flatten(1, 2)

    return Coder(simulate, 2 + META_BITS / WINDOW + 2 * channels / HEAD_DIM + 8 / WINDOW)


KEYS, VALUES = uniform(by_channel, WINDOW), uniform(by_token, WINDOW)


class Choice(NamedTuple):
    """A form of the scheme. ``keys`` and ``values``: their assignment, None for full precision."""

    keys: Assign | None = None
    values: Assign | None = None
    patterns: int = 32
    iterations: int = 5
    tokens: int = 1024
    start: Start = farthest_first
    kind: type[PatternSide] = Late
    mine: Mine | None = None  # replaces all mining options above
    key_coder: Coder = KEYS
    value_coder: Coder = VALUES
    whole: Callable[[], LayerCache] | None = None  # replaces all options above

    def layer(self) -> LayerCache:
        """A layer's cache."""
        if self.whole is not None:
            return self.whole()
        return LayerCache(self._side(self.keys, self.key_coder), self._side(self.values, self.value_coder))

    def _side(self, assign: Assign | None, coder: Coder) -> Side:
        if assign is None:
            return full_precision()
        if assign is unassigned:
            return Side(lambda full: full // WINDOW * WINDOW, coder.simulate)
        mine = self.mine or partial(
            mined, patterns=self.patterns, iterations=self.iterations, tokens=self.tokens, start=self.start
        )
        return self.kind(mine, assign, assign, coder.simulate)


GATE = gate_limit(HEAD_DIM)
BEST = Choice(if_shrinks(nearest), gated(flattest, GATE))
PLAIN = Choice(unassigned, unassigned)

GROUPS: dict[str, dict[str, Choice]] = {
    "keys": {
        "no patterns": Choice(unassigned),
        "range of the token": Choice(flattest),
        "L2": Choice(nearest),
        "L2, if the page shrinks": Choice(BEST.keys),
        "L2 around the page's middle": Choice(if_shrinks(around_middle)),
        "one token after another": Choice(if_shrinks(one_after_another)),
    },
    "values": {
        "no patterns": Choice(None, unassigned),
        "range": Choice(None, flattest),
        "range, if it shrinks": Choice(None, gated(flattest, 1)),
        "range, gate": Choice(None, BEST.values),
        "L2": Choice(None, nearest),
        "L2, gate": Choice(None, gated(nearest, GATE)),
    },
    "bank": {
        **{f"{m} patterns": BEST._replace(patterns=m) for m in (8, 16, 32, 64)},
        **{f"{n} iterations": BEST._replace(iterations=n) for n in (0, 1, 2, 10, 30)},
        **{f"{n} tokens": BEST._replace(tokens=n) for n in (256, 512)},
        "from the farthest of 256": BEST._replace(start=farthest_of_few),
        "from random tokens": BEST._replace(start=at_random),
        "from evenly spaced tokens": BEST._replace(start=evenly),
        "from evenly spaced tokens, 30 iterations": BEST._replace(start=evenly, iterations=30),
        "mined as released": BEST._replace(mine=patternkv.mine, kind=PatternSide),
        "prompt alone": BEST._replace(kind=PatternSide),
        "no centres": BEST._replace(kind=LateWithoutCentres),
        "L2 for V too": BEST._replace(values=gated(nearest, GATE)),
    },
    "contenders": {
        "kivi, groups of 128": PLAIN,
        "kivi, groups of 64": PLAIN._replace(key_coder=uniform(by_channel, 64), value_coder=uniform(by_token, 64)),
        "kivi, groups of 32": PLAIN._replace(key_coder=uniform(by_channel, 32), value_coder=uniform(by_token, 32)),
        "kitty": PLAIN._replace(key_coder=boosted(16)),
        "kitty-pro": PLAIN._replace(key_coder=boosted(32)),
        "patternkv, as released": Choice(whole=lambda: patternkv.layer(HEAD_DIM)),
        "patternkv, 16": BEST._replace(patterns=16),
        "patternkv, 32": BEST,
        "patternkv, 64": BEST._replace(patterns=64),
        "kitty's K, patternkv's V": Choice(unassigned, BEST.values, key_coder=boosted(16)),
    },
}

# ---- measures


@dataclass
class Sums:
    """Sums over questions and layers of a choice, of one task."""

    error: dict[str, float] = field(default_factory=dict)  # squared error, by its source
    power: dict[str, float] = field(default_factory=dict)
    right: int = 0
    asked: int = 0
    loss: float = 0.0  # nats
    tokens: int = 0
    seconds: float = 0.0
    bits: float = 0.0  # of all windows, patterns included
    elements: int = 0

    def add(self, name: str, found: Tensor, exact: Tensor) -> None:
        self.error[name] = self.error.get(name, 0.0) + float((found - exact).square().sum())
        self.power[name] = self.power.get(name, 0.0) + float(exact.square().sum())

    def relative(self, name: str) -> float:
        return self.error.get(name, 0.0) / max(self.power.get(name, 0.0), 1e-30)


class Measured(LayerCache):
    """A layer's cache that keeps its input, and sums the errors of its output and of its tokens."""

    def __init__(self, choice: Choice, sums: Sums):
        layer = choice.layer()
        super().__init__(layer.k, layer.v)
        self.choice, self.sums = choice, sums
        self.exact = [full_precision(), full_precision()]

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
        """Adds the errors of the quantized tokens, and the bits that they take."""
        coders = self.choice.key_coder, self.choice.value_coder
        for name, side, exact, coder in zip("kv", (self.k, self.v), self.exact, coders, strict=True):
            end = side.quantized
            self.sums.add(name, side.tokens[:, :end], exact.tokens[:, :end])
            num_elements = side.tokens[:, :end].numel()
            self.sums.elements += num_elements
            self.sums.bits += num_elements * coder.bits
            if isinstance(side, PatternSide) and side.patterns is not None:
                self.sums.bits += num_elements * INDEX_BITS / HEAD_DIM + 16 * side.patterns.numel()


@torch.inference_mode()
def read(model: LlamaForCausalLM, choice: Choice, prompt: list[int], reply: list[int], sums: Sums) -> None:
    """Reads a right reply through the caches of ``choice``, and adds to ``sums``."""
    start = time.monotonic()
    layers = [Measured(choice, sums) for _ in range(model.config.num_layers)]
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
        "bits": f"{sum(sums.bits for sums in tasks) / max(1, sum(sums.elements for sums in tasks)):.2f}",
        "nats": f"{1000 * mean(lambda sums: sums.loss / sums.tokens):.3f}",
        **{f"task {i}": f"{100 * sums.right / sums.asked:.0f}" for i, sums in enumerate(tasks)},
        "mean": f"{100 * mean(lambda sums: sums.right / sums.asked):.1f}",
        "95 % interval": f"{100 * low:.1f} - {100 * high:.1f}",
        "seconds": f"{sum(sums.seconds for sums in tasks):.0f}",
    }


def run(args: argparse.Namespace, sums: dict[str, list[Sums]]) -> Iterator[int]:
    """Reads question after question of every task by every choice into ``sums``; yields after each question."""
    tasks = parse_tasks(args.tasks, samples=args.samples, seed=args.seed)
    with demo_model() as (model, tokenizer):
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
    group = GROUPS[args.group]
    unknown = [name for name in wanted if name not in group]
    if unknown:
        parser.error(f"argument --only: no choice {unknown[0]!r} (choose from {'; '.join(group)})")
    args.choices = {name: choice for name, choice in group.items() if not wanted or name in wanted}
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
