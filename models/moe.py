"""Mixture of experts: a layer's router and the experts that it chooses for each token, in place of an MLP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from qkv_engine.kernels.linear import linear
from qkv_engine.kernels.moe import Experts, SoftmaxOver, SwiGLU, experts_mlp, route

from .config import ModelConfig, read_num_layers
from .fields import Fields
from .layers import CheckpointRows, Layer, empty_weight
from .ranks import ALONE, Part, Ranks
from .weights.format import WeightFormat
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


class ExpertMatrices(NamedTuple):
    """One matrix of each expert, in the order of its checkpoint: parts of rows and columns that fill a parameter."""

    name: str  # in the checkpoint, below the path of the module's parent
    rows: Part
    columns: Part
    parameter: nn.Parameter  # [X, rows, columns]


class MoE(Layer):
    """A router and its experts. Each of ``ranks`` has its part of every expert's inner features.

    The names of checkpoint tensors begin below the decoder layer; those of an expert have its number in place of {}.
    """

    format: WeightFormat = PLAIN  # of the experts
    first_expert = "experts.0.gate_proj"  # below the module's path, as formats are given to names
    router_name = "mlp.gate"
    gate_name, up_name, down_name = (f"mlp.experts.{{}}.{name}_proj.weight" for name in ("gate", "up", "down"))

    def __init__(self, config: MoeConfig, ranks: Ranks = ALONE):
        super().__init__()
        number, self.hidden, self.inner = config.num_experts, config.hidden_size, ranks.part(config.expert_size)
        self.num_experts, self.top_k, self.softmax_over = number, config.top_k, config.softmax_over
        self.activation, self.ranks = config.expert_activation, ranks
        has_bias, inner = config.expert_bias, self.inner.size
        self.router = empty_weight(number, self.hidden)
        self.gate_up = empty_weight(number, 2 * inner, self.hidden)
        self.down = empty_weight(number, self.hidden, inner)
        self.router_bias = empty_weight(number) if has_bias else None
        self.gate_up_bias = empty_weight(number, 2 * inner) if has_bias else None
        self.down_bias = empty_weight(number, self.hidden) if has_bias else None

    def expert_parameters(self) -> list[nn.Parameter]:
        """The parameters of the experts, all but the router's."""
        parts = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return [part for part in parts if part is not None]

    def forward(self, x: Tensor) -> Tensor:
        """x and result [N, E]."""
        routing = route(linear(x, self.router, self.router_bias), self.top_k, self.softmax_over)
        down_bias = self.down_bias if self.ranks.rank == 0 else None  # once in the sum over the ranks
        experts = Experts(self.gate_up, self.down, self.gate_up_bias, down_bias, self.activation)
        out = experts_mlp(x, routing, experts)
        return out if self.ranks.size == 1 else self.ranks.sum(out)

    def checkpoint_rows(self) -> Iterator[CheckpointRows]:
        shape = (self.num_experts, self.hidden)
        yield CheckpointRows(f"{self.router_name}.weight", shape, self.router, 0, self.num_experts)
        if self.router_bias is not None:
            yield CheckpointRows(f"{self.router_name}.bias", shape[:1], self.router_bias, 0, self.num_experts)
        yield from self.expert_rows()

    def packed_experts(self) -> Iterator[ExpertMatrices]:
        """What a checkpoint has of the experts in ``format``; nothing here, where experts are plain."""
        return iter(())

    def expert_rows(self) -> Iterator[CheckpointRows]:
        """Those of the experts; here each has tensors of its own."""
        size, first, whole = self.inner
        for expert in range(self.num_experts):
            for half, name in enumerate((self.gate_name, self.up_name)):
                start, shape = (2 * expert + half) * size, (whole, self.hidden)
                yield CheckpointRows(name.format(expert), shape, self.gate_up, start, start + size, first)
            start, shape = expert * self.hidden, (self.hidden, whole)
            yield CheckpointRows(self.down_name.format(expert), shape, self.down, start, start + self.hidden, 0, first)
