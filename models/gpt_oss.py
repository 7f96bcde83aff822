"""gpt-oss: experts with biases and a clamped activation, a null logit of each head, windows in every other layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from qkv_engine.kernels.moe import CodedExperts, SwiGLU

from .attention import Attention, AttentionBatch
from .config import ModelConfig, read_full_every
from .fields import Fields
from .layers import CheckpointRows, Matrix, Projection, empty_weight
from .llama import DecoderLayer, LlamaForCausalLM
from .moe import MoE, MoeConfig, read_moe
from .ranks import ALONE, Part, Ranks
from .rope import Rotation, with_default_rope
from .weights.codes import row_tensors

_DEFAULTS = {
    "num_experts": 128,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
}
_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def read_gpt_oss(fields: Fields) -> ModelConfig:
    """gpt-oss."""
    fields = with_default_rope(fields.given(**_DEFAULTS), _ROPE)
    bias = fields.boolean("attention_bias", default=True)
    alpha = fields.number("swiglu_alpha", 1e-3, 1e3, default=1.702)
    limit = fields.number("swiglu_limit", 1e-3, 1e6, default=7.0)
    config = MoeConfig.read(
        fields,
        layer_types=read_full_every(fields, 2),
        attention_bias=bias,
        attention_output_bias=bias,
        **read_moe(fields),
        expert_activation=SwiGLU(alpha, limit, shift=1.0),
        expert_bias=True,
    )
    return replace(config, attention=tuple(spec._replace(has_null_logit=True) for spec in config.attention))


class GptOssAttention(Attention):
    """Attention with a learned null logit of each head, which the checkpoint calls a sink."""

    def __init__(self, config: ModelConfig, layer: int, ranks: Ranks = ALONE):
        super().__init__(config, layer, ranks)
        self.heads = ranks.part(config.num_heads)
        self.null_logits = empty_weight(self.heads.size)

    def attend(self, qkv: Tensor, rotation: Rotation, batch: AttentionBatch) -> Tensor:
        """See ``Attention.attend``."""
        return batch.attend(self.layer, qkv, rotation, None, self.null_logits, self.key_basis)

    def checkpoint_rows(self) -> Iterator[CheckpointRows]:
        size, first, whole = self.heads
        yield CheckpointRows("self_attn.sinks", (whole,), self.null_logits, 0, size, first)


class GptOssMoE(MoE):
    """All experts of a layer are one tensor, transposed, whose columns are gate's and up's by turns.

    Packed matrices are not transposed.
    """

    router_name = "mlp.router"

    def matrices(self) -> Iterator[Matrix]:
        """See ``MoE.matrices``."""
        hidden, gate_up, down = Part.all(self.hidden), list[Projection](), list[Projection]()
        for number in range(self.num_experts):
            expert, rows = Part(1, number, self.num_experts), self.inner.times(2)
            gate_up.append(Projection("mlp.experts.gate_up_proj", rows, hidden, number * rows.size, expert))
            down.append(Projection("mlp.experts.down_proj", hidden, self.inner, number * self.hidden, expert))
        yield Matrix("gate_up", gate_up)
        yield Matrix("down", down)

    def bias_rows(self) -> Iterator[CheckpointRows]:
        """See ``MoE.bias_rows``."""
        assert self.gate_up_bias is not None and self.down_bias is not None
        number, (_, first, whole) = self.num_experts, self.inner
        gate_up, down = (f"mlp.experts.{name}_proj_bias" for name in ("gate_up", "down"))
        yield CheckpointRows(gate_up, (number, 2 * whole), self.gate_up_bias, 0, number, 0, 2 * first)
        yield CheckpointRows(down, (number, self.hidden), self.down_bias, 0, number)

    def plain_rows(self, matrix: Matrix) -> Iterator[CheckpointRows]:
        """See ``MoE.plain_rows``."""
        parameter = getattr(self, matrix.attribute)
        for name, rows, columns, start, expert in matrix.projections:
            assert expert is not None
            shape, first = (expert.whole, columns.whole, rows.whole), expert.first * columns.whole + columns.first
            stop = start + rows.size
            yield CheckpointRows(name, shape, parameter, start, stop, first, rows.first, is_transposed=True)

    def convert(self) -> None:
        """Puts gate's rows before up's."""
        assert self.gate_up_bias is not None
        matrices = row_tensors(self.gate_up.weight) if isinstance(self.gate_up, CodedExperts) else [self.gate_up]
        for tensor in (*matrices, self.gate_up_bias):
            for rows in tensor.view(self.num_experts, 2 * self.inner.size, -1):
                rows.copy_(torch.cat((rows[::2], rows[1::2])))


class GptOssLayer(DecoderLayer):
    """Llama's layer with null logits and experts."""

    attention_class = GptOssAttention
    mlp_class = GptOssMoE


class GptOssForCausalLM(LlamaForCausalLM):
    """gpt-oss."""

    layer_class = GptOssLayer
