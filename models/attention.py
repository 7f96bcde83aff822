"""Self-attention: projections here; q/k norm, rotation, KV write and attention by the batch."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from qkv_engine.errors import ModelError
from qkv_engine.kernels.linear import Addend, Weight
from qkv_engine.kernels.linear.codes import BLOCK, Float8Weight
from qkv_engine.kernels.rope_kv_write import KeyBasis

from .config import ModelConfig
from .layers import HeadNorm, Layer, Linear, RowParallelLinear, taken
from .ranks import ALONE, Ranks
from .rope import Rotation
from .weights.codes import row_tensors


class AttentionBatch(Protocol):
    """The KV cache's view of one step. The runner makes it; every layer calls it once."""

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        rotation: Rotation,
        norm: HeadNorm | None,
        null_logits: Tensor | None = None,
        key_basis: KeyBasis | None = None,
    ) -> Tensor:
        """Normalises and rotates q and k, writes k and v of the step's tokens, attends to all that each token may see.

        With a ``key_basis`` rotated q and k are multiplied by its matrices first.

        Scale, window and soft cap are those of the layer's ``AttentionSpec``.
        Shapes: qkv [N, HQ + 2 H, D], each token's contiguous, which may be overwritten; ``norm`` takes [N, HQ + H, D];
        null_logits [HQ]; key_basis [H, D, D]; result [N, HQ, D]. All in the model's dtype.
        """
        ...


class Attention(Layer):
    """Grouped-query attention of one layer, with the biases and the q/k norm that ``config`` asks for.

    Each of ``ranks`` has its part of the query heads and the KV heads that they share. ``key_basis`` is that in which
    keys are cached, None for the model's own channels (``models/basis.py``). ``variances``: those of such
    channels of K and of V within blocks, as calibrated, [H, D] float32.
    """

    key_basis: KeyBasis | None = None
    variances: tuple[Tensor, Tensor] | None = None
    first_head = 0  # of the queries among the heads of ``qkv_proj``

    def __init__(self, config: ModelConfig, layer: int, ranks: Ranks = ALONE):
        super().__init__()
        spec = config.attention[layer]
        heads, kv_heads, head_dim = ranks.part(spec.num_heads), ranks.part(spec.num_kv_heads), spec.head_dim
        self.layer, self.head_dim, self.kv_heads = layer, head_dim, kv_heads
        self.num_heads, self.num_kv_heads = heads.size, kv_heads.size
        queries, keys = heads.times(head_dim), kv_heads.times(head_dim)
        shards = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        fused_name = "qkv_proj" if config.fused_qkv else None
        self.qkv_proj = Linear(config.hidden_size, shards, bias=config.attention_bias, fused_name=fused_name)
        out = {"o_proj": config.hidden_size}
        self.o_proj = RowParallelLinear(queries, out, ranks, bias=config.attention_output_bias)
        norm_shards = {"q_norm": heads.size, "k_norm": kv_heads.size}
        self.qk_norm = HeadNorm(head_dim, config.norm_eps, norm_shards, config.norm_offset) if config.qk_norm else None
        self._channel_order = config.ropes[layer].channel_order(head_dim)

    @property
    def reader(self) -> Weight | None:
        """See ``Layer.reader``."""
        weight: Weight = self.qkv_proj.weight
        return weight

    def forward(self, x: Tensor, rotation: Rotation, batch: AttentionBatch, rows: Tensor | None = None) -> Tensor:
        """x [N, E] -> [M, E], of the tokens ``rows`` [M]; ``None``: all. Every token writes its K and V."""
        out: Tensor = self.o_proj(self.mix(x, rotation, batch, rows))
        return out

    def sums(self, x: Tensor, rotation: Rotation, batch: AttentionBatch, rows: Tensor | None = None) -> Addend:
        """See ``Layer.sums``."""
        return self.o_proj.sums(self.mix(x, rotation, batch, rows))

    def mix(self, x: Tensor, rotation: Rotation, batch: AttentionBatch, rows: Tensor | None = None) -> Tensor:
        """What the output projection reads: x [N, E] -> [M, HQ * D]."""
        return taken(self.attend(self.project(x, rows), rotation, batch).flatten(1), rows)

    def project(self, x: Tensor, rows: Tensor | None) -> Tensor:
        """Heads of ``qkv_proj``: x [N, E] -> [N, heads, D]; those of queries may be undefined for all but ``rows``."""
        queries = (self.first_head + self.num_heads) * self.head_dim
        heads = self.qkv_proj.forward_partly(x, rows, queries)
        return heads.view(len(heads), -1, self.head_dim)

    def attend(self, qkv: Tensor, rotation: Rotation, batch: AttentionBatch) -> Tensor:
        """qkv [N, HQ + 2 H, D] -> [N, HQ, D]."""
        return batch.attend(self.layer, qkv, rotation, self.qk_norm, key_basis=self.key_basis)

    def convert(self) -> None:
        """Puts the channels of q and k in the order in which ``Rotation`` pairs them."""
        if self._channel_order is None:
            return
        weight, bias = self.qkv_proj.weight, self.qkv_proj.bias
        if isinstance(weight, Float8Weight) and weight.is_blockwise and BLOCK % self.head_dim:
            message = f"blocks of {BLOCK} rows have parts of heads of {self.head_dim}, whose order changes"
            raise ModelError(message, field="quantization_config")
        for rows in (*row_tensors(weight), bias):
            if rows is not None:
                heads = rows.view(-1, self.head_dim, *rows.shape[1:])[self.first_head :]
                heads = heads[: self.num_heads + self.num_kv_heads]
                heads.copy_(heads[:, self._channel_order])
