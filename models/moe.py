"""Mixture of experts: a layer's router and the experts that it chooses for each token, in place of an MLP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qkv_engine.kernels.linear import Weight, linear, pack_weight
from qkv_engine.kernels.moe import CodedExperts, Experts, SoftmaxOver, SwiGLU, experts_mlp, route

from .config import ModelConfig, read_num_layers
from .fields import Fields
from .layers import CheckpointRows, Matrix, Projection, QuantizableLayer, empty_weight
from .ranks import ALONE, Part, Ranks
from .weights.plain import PLAIN

PLAIN_SWIGLU = SwiGLU()
_MAX_EXPERTS = 2**15  # in all layers: the tensors of an index are that many


@dataclass(frozen=True, kw_only=True)
class MoeConfig(ModelConfig):
    """Each token has ``top_k`` of ``num_experts`` experts, whose inner features are ``expert_size``.

    ``softmax_over`` are the logits that give their weights. ``expert_bias``: the router and the experts have biases.
    """

    num_experts: int
    top_k: int
    expert_size: int
    softmax_over: SoftmaxOver = SoftmaxOver.CHOSEN
    expert_activation: SwiGLU = PLAIN_SWIGLU
    expert_bias: bool = False

    @property
    def inner_sizes(self) -> tuple[int, ...]:
        """See ``ModelConfig.inner_sizes``."""
        return (self.intermediate_size, self.expert_size)


def read_moe(fields: Fields, size_field: str = "intermediate_size") -> dict[str, Any]:
    """Number and size of the experts, as options of ``MoeConfig.read``.

    ``num_local_experts`` stands before ``num_experts``, under which a family gives its default.
    """
    name = "num_experts" if fields.get("num_local_experts") is None else "num_local_experts"
    num_experts = fields.integer(name, 1, _MAX_EXPERTS // read_num_layers(fields))
    fields.choice("hidden_act", {"silu": None}, "silu", "experts do not support this activation")
    return {
        "num_experts": num_experts,
        "top_k": fields.integer("num_experts_per_tok", 1, num_experts),
        "expert_size": fields.integer(size_field, 1, 2**20),
    }


def read_softmax_over(fields: Fields) -> SoftmaxOver:
    """The option to renormalise the weights of the chosen experts, off where it is left out."""
    return SoftmaxOver.CHOSEN if fields.boolean("norm_topk_prob", default=False) else SoftmaxOver.ALL


class MoE(QuantizableLayer):
    """A router and its experts. Each of ``ranks`` has its part of every expert's inner features.

    The names of checkpoint tensors begin below the decoder layer; those of an expert have its number in place of {}.
    Experts that are not plain are ``CodedExperts``; the router is plain.
    """

    router_name = "mlp.gate"
    gate_name, up_name, down_name = (f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down"))

    def __init__(self, config: MoeConfig, ranks: Ranks = ALONE):
        super().__init__()
        number, self.hidden, self.inner = config.num_experts, config.hidden_size, ranks.part(config.expert_size)
        self.num_experts, self.top_k, self.softmax_over = number, config.top_k, config.softmax_over
        self.activation, self.ranks = config.expert_activation, ranks
        has_bias, inner = config.expert_bias, self.inner.size
        self.router = empty_weight(number, self.hidden)
        self.gate_up: Any = empty_weight(number, 2 * inner, self.hidden)
        self.down: Any = empty_weight(number, self.hidden, inner)
        self.router_bias = empty_weight(number) if has_bias else None
        self.gate_up_bias = empty_weight(number, 2 * inner) if has_bias else None
        self.down_bias = empty_weight(number, self.hidden) if has_bias else None

    def expert_nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of the experts, all but the router's, for activations of ``dtype``."""
        routers = (each for each in (self.router, self.router_bias) if each is not None)
        return self.weight_nbytes(dtype) - sum(each.numel() for each in routers) * dtype.itemsize

    def forward(self, x: Tensor) -> Tensor:
        """x and result [N, E]."""
        routing = route(linear(x, self.router, self.router_bias), self.top_k, self.softmax_over)
        down_bias = self.down_bias if self.ranks.rank == 0 else None  # once in the sum over the ranks
        experts = Experts(self.gate_up, self.down, self.gate_up_bias, down_bias, self.activation)
        out = experts_mlp(x, routing, experts)
        return out if self.ranks.size == 1 else self.ranks.sum(out)

    def hold(self, attribute: str, weight: Any) -> None:
        """See ``QuantizableLayer.hold``; ``weight`` has the rows of all experts."""
        super().hold(attribute, CodedExperts(weight, self.num_experts))

    def pack(self, pack_weight: Callable[[Weight], Weight] = pack_weight) -> None:
        """See ``Layer.pack``; plain experts have no other layout."""
        if isinstance(self.gate_up, CodedExperts):
            self.gate_up, self.down = self.gate_up.pack(), self.down.pack()

    def matrices(self) -> Iterator[Matrix]:
        """See ``QuantizableLayer.matrices``; here each expert has tensors of its own."""
        gate_up, down, hidden = list[Projection](), list[Projection](), Part.all(self.hidden)
        for expert in range(self.num_experts):
            for half, name in enumerate((self.gate_name, self.up_name)):
                start = (2 * expert + half) * self.inner.size
                gate_up.append(Projection(name.format(expert), self.inner, hidden, start))
            down.append(Projection(self.down_name.format(expert), hidden, self.inner, expert * self.hidden))
        yield Matrix("gate_up", gate_up)
        yield Matrix("down", down)

    def stacked_matrices(self, gate_up: str, down: str) -> Iterator[Matrix]:
        """Those of a checkpoint that has all experts in two tensors, gate's rows then up's of each."""
        (size, first, whole), hidden = self.inner, Part.all(self.hidden)
        ups, downs = list[Projection](), list[Projection]()
        for number in range(self.num_experts):
            expert = Part(1, number, self.num_experts)
            for half in range(2):
                rows = Part(size, half * whole + first, 2 * whole)
                ups.append(Projection(gate_up, rows, hidden, (2 * number + half) * size, expert))
            downs.append(Projection(down, hidden, self.inner, number * self.hidden, expert))
        yield Matrix("gate_up", ups)
        yield Matrix("down", downs)

    def checkpoint_rows(self) -> Iterator[CheckpointRows]:
        shape = (self.num_experts, self.hidden)
        yield CheckpointRows(f"{self.router_name}.weight", shape, self.router, 0, self.num_experts)
        if self.router_bias is not None:
            yield CheckpointRows(f"{self.router_name}.bias", shape[:1], self.router_bias, 0, self.num_experts)
        yield from self.bias_rows()
        if self.format is PLAIN:
            for matrix in self.matrices():
                yield from self.plain_rows(matrix)

    def bias_rows(self) -> Iterator[CheckpointRows]:
        """Those of the experts' biases."""
        return iter(())

    def plain_rows(self, matrix: Matrix) -> Iterator[CheckpointRows]:
        """The tensors of a plain checkpoint that fill a matrix of the experts."""
        parameter = getattr(self, matrix.attribute)
        for projection in matrix.projections:
            _, rows, columns, start, expert = projection
            shape: tuple[int, ...] = (rows.whole, columns.whole)
            first = rows.first
            if expert is not None:
                shape, first = (expert.whole, *shape), expert.first * rows.whole + first
            name, stop = self.plain_name(projection), start + rows.size
            yield CheckpointRows(name, shape, parameter, start, stop, first, columns.first)

    def plain_name(self, projection: Projection) -> str:
        """What a plain checkpoint calls the tensor of ``projection``."""
        return f"{projection.name}.weight"
