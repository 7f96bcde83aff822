"""Granite-MoE: Granite with a mixture of experts in every layer, and a dense MLP beside it in some models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from .config import ModelConfig
from .fields import Fields
from .granite import GraniteConfig, GraniteLayer, read_granite_options
from .layers import Matrix
from .llama import MLP, LlamaForCausalLM
from .moe import MoE, MoeConfig, read_moe
from .ranks import ALONE, Ranks


@dataclass(frozen=True, kw_only=True)
class GraniteMoeConfig(GraniteConfig, MoeConfig):
    """``shared_size``: inner features of the MLP that all tokens share, 0 for none."""

    shared_size: int

    @property
    def inner_sizes(self) -> tuple[int, ...]:
        """See ``ModelConfig.inner_sizes``."""
        return (self.expert_size, self.shared_size)


def read_granite_moe(fields: Fields) -> ModelConfig:
    """Granite-MoE."""
    fields = fields.given(num_experts=8, num_experts_per_tok=2)
    shared_size = fields.integer("shared_intermediate_size", 0, 2**20, default=0)
    return GraniteMoeConfig.read(fields, **read_granite_options(fields), **read_moe(fields), shared_size=shared_size)


class GraniteMoE(MoE):
    """All experts of a layer are one tensor, gate's rows then up's of each."""

    router_name = "block_sparse_moe.router.layer"

    def matrices(self) -> Iterator[Matrix]:
        """See ``MoE.matrices``."""
        return self.stacked_matrices("block_sparse_moe.input_linear", "block_sparse_moe.output_linear")


class SharedMLP(MLP):
    """The MLP beside the experts."""

    fused_name, down_name = "input_linear", "output_linear"


class GraniteMoeLayer(GraniteLayer):
    """Granite's layer with experts, and with what all tokens share."""

    mlp_class = GraniteMoE

    def __init__(self, config: GraniteMoeConfig, layer: int, ranks: Ranks = ALONE):
        super().__init__(config, layer, ranks)
        shared = replace(config, intermediate_size=config.shared_size, fused_gate_up=True)
        self.shared_mlp = SharedMLP(shared, ranks) if config.shared_size else None

    def feed_forward(self, x: Tensor) -> Tensor:
        """See ``GraniteLayer.feed_forward``."""
        added = super().feed_forward(x)
        return added if self.shared_mlp is None else added + self.shared_mlp(x)


class GraniteMoeForCausalLM(LlamaForCausalLM):
    """Granite-MoE, with or without a shared MLP."""

    layer_class = GraniteMoeLayer
