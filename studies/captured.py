"""Queries, keys and values of the demo model while it reads conversations of the demo tasks, for studies of formats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from qkv_engine.bench.questions import parse_tasks
from qkv_engine.config import BLOCK_TOKENS

from .papers.cache import LayerCache, attention, full_precision
from .papers.decode import SimulatedBatch
from .papers.demo import demo_model

WINDOW = 128  # newest tokens, which stay in full precision; only their queries are measured


class Attended(NamedTuple):
    """One layer's attention over a conversation: q ``[HQ, WINDOW, D]`` of its newest tokens, k and v ``[H, T, D]``."""

    q: Tensor
    k: Tensor
    v: Tensor

    def old(self, x: Tensor) -> Tensor:
        """The blocks ``[n, H, 128, D]`` of k or v that are older than the window."""
        number = (x.shape[1] - WINDOW) // BLOCK_TOKENS
        return torch.unflatten(x[:, : number * BLOCK_TOKENS], 1, (number, BLOCK_TOKENS)).transpose(0, 1)

    def with_old(self, x: Tensor, blocks: Tensor) -> Tensor:
        """k or v with ``blocks`` in place of ``old(x)``."""
        old = blocks.transpose(0, 1).flatten(1, 2)
        return torch.cat((old, x[:, old.shape[1] :]), 1)

    def output(self, k: Tensor, v: Tensor) -> Tensor:
        """Attention ``[HQ, WINDOW, D]`` of the window's queries to other keys and values."""
        return attention(self.q, k, v)

    def old_share(self, k: Tensor) -> float:
        """The mean share of the window's attention on tokens older than it, for keys ``k``."""
        n, length = self.q.shape[1], k.shape[1]
        keys = k.repeat_interleave(len(self.q) // len(k), 0)
        scores = (self.q @ keys.mT) * self.q.shape[2] ** -0.5
        hidden = torch.ones(n, length, dtype=torch.bool).triu(length - n + 1)
        number = len(self.old(k)) * BLOCK_TOKENS
        return float(scores.masked_fill(hidden, -torch.inf).softmax(-1)[..., :number].sum(-1).mean())


class _Recorder(LayerCache):
    """A layer in full precision that keeps the queries of the last call."""

    def __init__(self) -> None:
        super().__init__(full_precision(), full_precision())
        self.q = torch.empty(0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.q = q[:, -WINDOW:]
        return super().attend(q, k, v)


@torch.inference_mode()
def conversations(tasks: str, samples: int, seed: int = 0) -> Iterator[list[Attended]]:
    """The layers of each conversation, ``samples`` of each of ``tasks``: question and right reply, read at once."""
    with demo_model() as (model, tokenizer):
        for task in parse_tasks(tasks, samples=samples, seed=seed):
            for example in task.examples:
                ids = torch.tensor(tokenizer.encode(example.chat + example.reply))
                layers = [_Recorder() for _ in range(model.config.num_layers)]
                model(ids, torch.arange(len(ids)), SimulatedBatch(list[LayerCache](layers), model.config.num_kv_heads))
                yield [Attended(layer.q, layer.k.tokens, layer.v.tokens) for layer in layers]
