"""Layers of all supported models. Each layer names its checkpoint tensors; the loader fills them in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv_engine.kernels.linear import (
    Addend,
    LateProduct,
    SplitSums,
    Weight,
    linear,
    linear_addend,
    pack_weight,
    reads_rows,
)
from qkv_engine.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_rows, scaled_rms_norm

from .ranks import Part, Ranks
from .weights.format import WeightFormat, format_nbytes
from .weights.plain import PLAIN


class Layer(nn.Module):
    """A module without hooks: a call is ``forward`` alone, a microsecond less in each of a step's hundred calls.

    ``float32_parameters``: names of those that are kept in float32, whatever the model's dtype.
    """

    float32_parameters: frozenset[str] = frozenset()

    @property
    def reader(self) -> Weight | None:
        """The weight whose product alone reads the layer's input, and takes it as rows of 8-bit floats, too."""
        return None

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

    def sums(self, *args: Any) -> Addend:
        """``forward``, whose result nothing but an ``RMSNorm`` with a residual reads: it may finish a product.

        A layer overrides it where ``forward`` ends in a ``RowParallelLinear``.
        """
        out: Tensor = self.forward(*args)
        return out

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            self.__dict__[name] = value  # a direct attribute; torch looks children up in three dictionaries, in Python

    def checkpoint_rows(self) -> Iterator[CheckpointRows]:
        """The checkpoint tensors that fill the module's own parameters."""
        return iter(())

    def convert(self) -> None:
        """Called once a checkpoint has filled the parameters: they become what ``forward`` computes with."""

    def pack(self, pack_weight: Callable[[Weight], Weight] = pack_weight) -> None:
        """Called once after loading: weights may change to their operators' fastest layout, by ``pack_weight``."""

    def weight_nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of the module's own weights, for activations of ``dtype``; asked before they are packed."""
        return sum(parameter.numel() for parameter in self.parameters(recurse=False)) * dtype.itemsize


class CheckpointRows(NamedTuple):
    """The target of one checkpoint tensor: rows ``[start, stop)`` of a module's parameter.

    They are rows of the tensor from ``first_row`` on, and columns from ``first_column`` on. Of more than two
    dimensions all before the last one count rows.
    """

    name: str  # in the checkpoint, below the path of the module's parent
    shape: tuple[int, ...]  # in the checkpoint; broadcast over the rows where it has fewer dimensions
    parameter: nn.Parameter
    start: int
    stop: int
    first_row: int = 0
    first_column: int = 0
    is_transposed: bool = False  # rows of the tensor are columns of the parameter

    @property
    def target(self) -> Tensor:
        """The rows of the parameter."""
        return self.parameter.view(-1, *self.parameter.shape[1:][-1:])[self.start : self.stop]

    @property
    def is_broadcast(self) -> bool:
        """Whether the whole tensor fills every row, as the one of a head norm does."""
        return len(self.shape) == 1 < self.parameter.dim()

    @property
    def num_rows(self) -> int:
        """Rows of the tensor that are read."""
        if self.is_transposed:
            return self.parameter.shape[-1]
        return self.shape[0] if self.is_broadcast else self.stop - self.start

    def fill(self, start: int, stop: int, rows: Tensor) -> None:
        """Copies rows ``[start, stop)`` of those that are read."""
        target = self.target
        if rows.dim() == 2:
            num_columns = self.stop - self.start if self.is_transposed else target.shape[1]
            rows = rows[:, self.first_column :][:, :num_columns]
        if self.is_transposed:
            target[:, start:stop].copy_(rows.to(target.device).T)
        else:
            (target if self.is_broadcast else target[start:stop]).copy_(rows)


class Projection(NamedTuple):
    """Rows ``[start, start + rows.size)`` of a weight, a part of what a checkpoint calls ``name``."""

    name: str  # below the path of the module's parent
    rows: Part
    columns: Part
    start: int
    expert: Part | None = None  # one of those whose matrices are one tensor


class Matrix(NamedTuple):
    """A weight of a layer, made of ``projections`` in order."""

    attribute: str  # of the layer
    projections: list[Projection]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns, those of all experts in one."""
        last = self.projections[-1]
        return last.start + last.rows.size, last.columns.size

    @property
    def is_stacked(self) -> bool:
        """Whether the checkpoint has the matrices of all experts in one tensor."""
        return self.projections[0].expert is not None


class QuantizableLayer(Layer):
    """A layer whose matrices may have another format than plain; they are parameters until ``hold``."""

    format: WeightFormat = PLAIN

    def matrices(self) -> Iterator[Matrix]:
        """The weights in ``format``."""
        raise NotImplementedError

    def names(self) -> Iterator[str]:
        """What a checkpoint calls the projections, below the path of the module's parent."""
        return (projection.name for matrix in self.matrices() for projection in matrix.projections)

    def hold(self, attribute: str, weight: Any) -> None:
        """Replaces the matrix of that name, which is freed, by another ``Weight``."""
        delattr(self, attribute)
        setattr(self, attribute, weight)

    def weight_nbytes(self, dtype: torch.dtype) -> int:
        """See ``Layer.weight_nbytes``."""
        matrices = {matrix.attribute: matrix.shape for matrix in self.matrices()}
        others = sum(each.numel() for name, each in self.named_parameters(recurse=False) if name not in matrices)
        return others * dtype.itemsize + sum(format_nbytes(self.format, *shape, dtype) for shape in matrices.values())


class Linear(QuantizableLayer):
    """One matrix made of one or several checkpoint projections stacked by rows: ``x @ weight.T + bias``.

    ``shards`` maps each projection's name to its rows, of which the rank may hold a part: a column-parallel layer.
    With ``fused_name`` the checkpoint has them as one tensor. ``pack`` ends loading; after it the weight is opaque.
    """

    def __init__(
        self, in_features: int | Part, shards: Mapping[str, int | Part], *, bias: bool, fused_name: str | None = None
    ):
        super().__init__()
        self.fused_name = fused_name
        self.columns = _part(in_features)
        self.shards = {name: _part(rows) for name, rows in shards.items()}
        out_features = sum(rows.size for rows in self.shards.values())
        self.weight: Any = empty_weight(out_features, self.columns.size)  # a ``PackedWeight`` once it is packed
        self.bias = empty_weight(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [M, I] -> [M, O]."""
        return linear(x, self.weight, self.bias)

    def forward_partly(self, x: Tensor, rows: Tensor | None, number: int) -> Tensor:
        """``forward``, whose first ``number`` features are computed for ``rows`` [R] of x alone; None: for all.

        Those of other rows are undefined, or computed where that is no slower.
        """
        weight, is_plain = self.weight, isinstance(self.weight, Tensor) and self.bias is None
        if rows is None or not is_plain or 2 * len(rows) > len(x) or torch.is_grad_enabled():
            return self.forward(x)
        out = x.new_empty(len(x), len(weight))
        torch.mm(x, weight[number:].T, out=out[:, number:])
        out[rows, :number] = linear(x[rows], weight[:number])
        return out

    def checkpoint_rows(self) -> Iterator[CheckpointRows]:
        for name, rows, columns, start, _ in self.projections():
            stop, shape = start + rows.size, (rows.whole, columns.whole)
            if self.format is PLAIN:
                assert isinstance(self.weight, nn.Parameter), "asked for before packing"
                yield CheckpointRows(f"{name}.weight", shape, self.weight, start, stop, rows.first, columns.first)
            if self.bias is not None:
                yield CheckpointRows(f"{name}.bias", shape[:1], self.bias, start, stop, rows.first)

    def projections(self) -> Iterator[Projection]:
        """What the weight is made of, in order."""
        start = before = 0
        fused_rows = sum(rows.whole for rows in self.shards.values())
        for name, rows in self.shards.items():
            found = rows
            if self.fused_name is not None:
                name, found = self.fused_name, Part(rows.size, before + rows.first, fused_rows)
            yield Projection(name, found, self.columns, start)
            start, before = start + rows.size, before + rows.whole

    def matrices(self) -> Iterator[Matrix]:
        """See ``QuantizableLayer.matrices``."""
        yield Matrix("weight", list(self.projections()))

    def pack(self, pack_weight: Callable[[Weight], Weight] = pack_weight) -> None:
        """Replaces the weight by the layout that ``pack_weight`` gives it, and frees the original."""
        packed = pack_weight(self.weight)
        if packed is not self.weight:
            self.hold("weight", packed)


class RowParallelLinear(Linear):
    """A linear layer of which each of ``ranks`` has a part of the input; its output is the sum over them."""

    def __init__(self, in_features: Part, shards: Mapping[str, int], ranks: Ranks, *, bias: bool):
        super().__init__(in_features, shards, bias=bias)
        self.ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        """x [M, I] -> [M, O], the same bits on all ranks."""
        if self.ranks.size == 1:
            return linear(x, self.weight, self.bias)
        out = self.ranks.sum(linear(x, self.weight))
        return out if self.bias is None else out.add_(self.bias)

    def sums(self, x: Tensor) -> Addend:
        """See ``Layer.sums``; x [M, I] -> [M, O]. Several ranks add up whole products."""
        return linear_addend(x, self.weight, self.bias) if self.ranks.size == 1 else self.forward(x)


class Norm(Layer):
    """A norm over the last dimension with a weight, of which the checkpoint has what exceeds ``offset``."""

    is_wide = False  # whether the weight has more precision than what is normed

    def __init__(self, name: str, size: int, eps: float, offset: float = 0.0):
        super().__init__()
        self.name, self.size, self.eps, self.offset = name, size, eps, offset
        self.weight = empty_weight(size)

    def checkpoint_rows(self) -> Iterator[CheckpointRows]:
        yield CheckpointRows(f"{self.name}.weight", (self.size,), self.weight, 0, self.size)

    def convert(self) -> None:
        """Adds the offset; in float32, which the sum then stays in."""
        if self.offset:
            self.is_wide = self.weight.dtype is not torch.float32
            self.weight = nn.Parameter(self.weight.float() + self.offset, requires_grad=False)


class RMSNorm(Norm):
    """``x / rms(x) * weight`` over the last dimension: float32 inside, cast before the weight, like Hugging Face."""

    def __init__(self, name: str, size: int, eps: float, offset: float = 0.0):
        super().__init__(name, size, eps, offset)
        self._scaled_weight: Tensor | None = None  # weight * sqrt(size), for the CPU's shorter computation

    def forward(self, x: Addend, residual: Tensor | None, reader: Weight | None = None) -> tuple[Any, Tensor]:
        """The norm of x + residual, and that sum, which overwrites the residual; all [N, E].

        The norm is of ``Float8Rows`` where the product with ``reader``, which alone reads it, would make such rows.
        """
        if isinstance(x, SplitSums):
            assert residual is not None
            return self._add_sums(x, residual, reader)
        if isinstance(x, LateProduct):
            assert residual is not None
            x, residual = x.added_to(residual), None
        if self._scaled_weight is not None:
            summed = x if residual is None else residual.add_(x)
            return scaled_rms_norm(summed, self._scaled_weight, self.eps), summed
        if reads_rows(x, reader) and not x.requires_grad:
            return rms_norm_rows(x, residual, self.weight, self.eps), x if residual is None else residual
        if residual is not None and x.requires_grad:
            x, residual = add(residual, x), None
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps), residual

    def _add_sums(self, x: SplitSums, residual: Tensor, reader: Weight | None) -> tuple[Any, Tensor]:
        norm = rms_norm_rows if reads_rows(residual, reader) else add_rms_norm
        return norm(x, residual, self.weight, self.eps), residual

    def pack(self, pack_weight: Callable[[Weight], Weight] = pack_weight) -> None:
        """In float32 on the CPU, folds the square root of ``size`` into the weight."""
        if self.weight.is_cpu and self.weight.dtype is torch.float32 and not self.is_wide:
            self._scaled_weight = self.weight * math.sqrt(self.size)


def add(residual: Tensor, x: Tensor) -> Tensor:
    """residual + x, which overwrites ``residual`` unless gradients pass through the sum."""
    return residual + x if x.requires_grad else residual.add_(x)


def kept(x: Tensor) -> Tensor:
    """``x``, which may then be overwritten: a copy where gradients pass through it."""
    return x.clone() if x.requires_grad else x


def taken(x: Tensor, rows: Tensor | None) -> Tensor:
    """``rows`` [M] int64 of x [N, E], or x itself for ``None``."""
    return x if rows is None else x[rows]


class LayerNorm(Norm):
    """``(x - mean(x)) / std(x) * weight`` over the last dimension."""

    def forward(self, x: Tensor, residual: Tensor | None, reader: Weight | None = None) -> tuple[Any, Tensor]:
        """The norm of x + residual, and that sum, which overwrites the residual; all [N, E]."""
        summed = x if residual is None else add(residual, x)
        return F.layer_norm(summed, (self.size,), self.weight, None, self.eps), summed


class HeadNorm(RMSNorm):
    """RMSNorm over each head of a tensor ``[N, heads, D]``, with ``shards``: numbers of heads by the norm they use."""

    def __init__(self, size: int, eps: float, shards: dict[str, int], offset: float = 0.0):
        super().__init__("", size, eps, offset)
        self.shards = shards
        self.weight = empty_weight(sum(shards.values()), size)

    def __call__(self, x: Tensor) -> Tensor:
        """x and result [N, heads, D], on the CPU. On a GPU the attention kernel reads ``weight`` and ``eps`` itself."""
        out: Tensor = self.forward(x, None)[0]
        return out

    def checkpoint_rows(self) -> Iterator[CheckpointRows]:
        start = 0
        for name, heads in self.shards.items():
            yield CheckpointRows(f"{name}.weight", (self.size,), self.weight, start, start + heads)
            start += heads


class Embedding(Layer):
    """Token embedding table ``[V, E]``, whose rows are looked up times ``multiplier``."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, multiplier: float = 1.0):
        super().__init__()
        self.name, self.multiplier = name, multiplier
        self.weight = empty_weight(vocab_size, hidden_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [N] int64 -> [N, E]."""
        # torch's lookup on a GPU takes up to 16 ids one after another: 13 us for those of 16 requests, this 2.
        rows = self.weight[input_ids] if self.weight.is_cuda else F.embedding(input_ids, self.weight)
        return rows if self.multiplier == 1.0 else rows.mul_(_rounded(self.multiplier, rows.dtype))

    def checkpoint_rows(self) -> Iterator[CheckpointRows]:
        yield CheckpointRows(f"{self.name}.weight", tuple(self.weight.shape), self.weight, 0, self.weight.shape[0])


@cache
def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype, device="cpu"))


def _part(features: int | Part) -> Part:
    return features if isinstance(features, Part) else Part.all(features)


def empty_weight(*shape: int) -> nn.Parameter:
    """A parameter without values, which the loader fills."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)
