"""Layers of all supported models. Each layer names its checkpoint tensors; the loader fills them in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv_engine.kernels.linear import linear, pack_weight
from qkv_engine.kernels.rms_norm import add_rms_norm, rms_norm, scaled_rms_norm


class Layer(nn.Module):
    """A module without hooks: a call is ``forward`` alone, a microsecond less in each of a step's hundred calls."""

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            self.__dict__[name] = value  # a direct attribute; torch looks children up in three dictionaries, in Python

    def pack(self) -> None:
        """Called once after loading: weights may change to their operators' fastest layout."""


class CheckpointRows(NamedTuple):
    """The target of one checkpoint tensor: rows ``[start, stop)`` of a module's parameter."""

    name: str  # in the checkpoint, below the path of the module's parent
    shape: tuple[int, ...]  # in the checkpoint; broadcast over the rows where it has fewer dimensions
    parameter: nn.Parameter
    start: int
    stop: int


class Linear(Layer):
    """One matrix made of one or several checkpoint projections stacked by rows: ``x @ weight.T + bias``.

    ``shards`` maps each projection's name to its rows. ``pack`` ends loading; after it the weight is opaque.
    """

    def __init__(self, in_features: int, shards: dict[str, int], *, bias: bool):
        super().__init__()
        out_features = sum(shards.values())
        self.in_features, self.shards = in_features, shards
        self.weight: Any = _empty(out_features, in_features)  # a ``PackedWeight`` once it is packed
        self.bias = _empty(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [M, I] -> [M, O]."""
        return linear(x, self.weight, self.bias)

    def checkpoint_rows(self) -> Iterator[CheckpointRows]:
        start = 0
        for name, rows in self.shards.items():
            stop = start + rows
            assert isinstance(self.weight, nn.Parameter), "asked for before packing"
            yield CheckpointRows(f"{name}.weight", (rows, self.in_features), self.weight, start, stop)
            if self.bias is not None:
                yield CheckpointRows(f"{name}.bias", (rows,), self.bias, start, stop)
            start = stop

    def pack(self) -> None:
        """Replaces the weight by the fastest product's layout and frees the original."""
        packed = pack_weight(self.weight)
        if packed is not self.weight:
            del self.weight
            self.weight = packed


class RMSNorm(Layer):
    """``x / rms(x) * weight`` over the last dimension: float32 inside, cast before the weight, like Hugging Face."""

    def __init__(self, name: str, size: int, eps: float):
        super().__init__()
        self.name, self.size, self.eps = name, size, eps
        self.weight = _empty(size)
        self._scaled_weight: Tensor | None = None  # weight * sqrt(size), for the CPU's shorter computation

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and that sum, which overwrites the residual; all [N, E]."""
        if self._scaled_weight is not None:
            summed = x if residual is None else residual.add_(x)
            return scaled_rms_norm(summed, self._scaled_weight, self.eps), summed
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps), residual

    def pack(self) -> None:
        """In float32 on the CPU, folds the square root of ``size`` into the weight."""
        if self.weight.is_cpu and self.weight.dtype is torch.float32:
            self._scaled_weight = self.weight * math.sqrt(self.size)

    def checkpoint_rows(self) -> Iterator[CheckpointRows]:
        yield CheckpointRows(f"{self.name}.weight", (self.size,), self.weight, 0, self.size)


class HeadNorm(RMSNorm):
    """RMSNorm over each head of a tensor ``[N, heads, D]``, with ``shards``: numbers of heads by the norm they use."""

    def __init__(self, size: int, eps: float, shards: dict[str, int]):
        super().__init__("", size, eps)
        self.shards = shards
        self.weight = _empty(sum(shards.values()), size)

    def __call__(self, x: Tensor) -> Tensor:
        """x and result [N, heads, D], on the CPU. On a GPU the attention kernel reads ``weight`` and ``eps`` itself."""
        return self.forward(x, None)[0]

    def checkpoint_rows(self) -> Iterator[CheckpointRows]:
        start = 0
        for name, heads in self.shards.items():
            yield CheckpointRows(f"{name}.weight", (self.size,), self.weight, start, start + heads)
            start += heads


class Embedding(Layer):
    """Token embedding table ``[V, E]``."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int):
        super().__init__()
        self.name = name
        self.weight = _empty(vocab_size, hidden_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [N] int64 -> [N, E]."""
        return F.embedding(input_ids, self.weight)

    def checkpoint_rows(self) -> Iterator[CheckpointRows]:
        yield CheckpointRows(f"{self.name}.weight", tuple(self.weight.shape), self.weight, 0, self.weight.shape[0])


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)
