"""Gated delta-net, the layer that keeps a state of fixed size of a request in place of K and V."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from qkv_engine.kernels.delta_net import DeltaWeights, StateSpec
from qkv_engine.kernels.linear import Addend

from .attention import AttentionBatch
from .config import FULL, ModelConfig, read_num_layers
from .fields import Fields
from .layers import CheckpointRows, Layer, Linear, Norm, Projection, RowParallelLinear, empty_weight, taken
from .ranks import ALONE, Part, Ranks
from .weights.scheme import UNQUANTIZED

LINEAR = "linear_attention"  # the kind of layers with states, by its name in ``layer_types``
_MAX_HEADS = 1024


class StateBatch(AttentionBatch, Protocol):
    """The view of one step for models whose layers have KV or a state: each layer calls ``attend`` or ``delta_net``."""

    def delta_net(self, layer: int, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights) -> Tensor:
        """Passes the step's tokens through the states of their requests in the state layer ``layer``.

        Convolution, gates and delta rule, and the norm of each value head times SiLU of its gate ``z``; a request's
        state begins with zeros at its first token.
        Shapes: qkv [N, C], z [N, HV, DV], b and a [N, HV], rows contiguous; result [N, HV, DV]. All in the model's
        dtype.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class HybridConfig(ModelConfig):
    """``kv_layers``: for each layer the entry of ``attention`` that is its own, None for a layer with a state.

    ``attention`` and ``states`` have the layers of their kind alone, ``ropes`` has all.
    """

    kv_layers: tuple[int | None, ...]

    @property
    def last_attention(self) -> int | None:
        """See ``ModelConfig.last_attention``; None where the last layer has a state."""
        return self.kv_layers[-1]

    @property
    def head_dims(self) -> tuple[int, ...]:
        """See ``ModelConfig.head_dims``."""
        return (self.head_dim,) * len(self.kv_layers)


def read_states(fields: Fields) -> dict[str, Any]:
    """The kind of each layer and the shape of the states, as options of ``HybridConfig.read``."""
    kinds = _read_kinds(fields)
    if fields.get("hidden_act") not in (None, "silu"):
        raise fields.error("hidden_act", "this activation is not supported", "Supported: silu")
    k_heads = fields.integer("linear_num_key_heads", 1, _MAX_HEADS, default=16)
    v_heads = fields.integer("linear_num_value_heads", 1, _MAX_HEADS, default=32)
    if v_heads % k_heads:
        raise fields.error("linear_num_value_heads", f"must be a multiple of linear_num_key_heads ({k_heads})")
    spec = StateSpec(
        k_heads,
        v_heads,
        fields.integer("linear_key_head_dim", 1, 512, default=128),
        fields.integer("linear_value_head_dim", 1, 512, default=128),
        fields.integer("linear_conv_kernel_dim", 2, 16, default=4),
    )
    numbers = iter(range(len(kinds)))
    kv_layers = tuple(next(numbers) if kind == FULL else None for kind in kinds)
    return {"kv_layers": kv_layers, "states": (spec,) * kinds.count(LINEAR)}


def _read_kinds(fields: Fields) -> list[str]:
    num_layers, kinds = read_num_layers(fields), fields.get("layer_types")
    if kinds is None:
        interval = fields.integer("full_attention_interval", 1, 2**20, default=4)
        kinds = [LINEAR if (layer + 1) % interval else FULL for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in (FULL, LINEAR) for kind in kinds):
        message = f"must be a list of {num_layers} supported layer types"
        raise fields.error("layer_types", message, f"Supported: {FULL}, {LINEAR}")
    if FULL not in kinds:
        raise fields.error("layer_types", "leaves no layer with attention")
    return kinds


class PiecewiseLinear(Linear):
    """A linear layer made of ``pieces``: rows of checkpoint projections, several of which may be of one.

    Those of one projection follow one another.
    """

    def __init__(self, in_features: int, pieces: Sequence[tuple[str, Part]], *, bias: bool = False):
        sizes = Counter[str]()
        for name, rows in pieces:
            sizes[name] += rows.size
        super().__init__(in_features, sizes, bias=bias)
        self.pieces = pieces

    def projections(self) -> Iterator[Projection]:
        """See ``Linear.projections``."""
        start = 0
        for name, rows in self.pieces:
            yield Projection(name, rows, self.columns, start)
            start += rows.size


class DeltaNet(Layer):
    """Gated delta-net of one layer, with index ``layer`` among those with a state.

    Each of ``ranks`` has its part of the key heads and the value heads that share them.
    """

    float32_parameters = frozenset({"A_log", "dt_bias"})  # exponents: they decide how long a state lasts

    def __init__(self, config: ModelConfig, layer: int, ranks: Ranks = ALONE):
        super().__init__()
        spec = config.states[layer]
        self.layer, self.whole, self.spec = layer, spec, spec.share(ranks.size)
        self.k_heads, self.v_heads = ranks.part(spec.num_k_heads), ranks.part(spec.num_v_heads)
        pieces, gates = self.input_pieces(), self.gate_pieces()
        self.gates: PiecewiseLinear | None = None
        if config.weights == UNQUANTIZED:  # else the gates may have another format
            pieces += gates
        else:
            self.gates = PiecewiseLinear(config.hidden_size, gates)
        self.in_proj = PiecewiseLinear(config.hidden_size, pieces)
        self.conv = empty_weight(self.spec.num_channels, spec.conv_width)
        self.A_log, self.dt_bias = empty_weight(self.v_heads.size), empty_weight(self.v_heads.size)
        self.norm = Norm("norm", spec.v_dim, config.norm_eps)
        values = self.v_heads.times(spec.v_dim)
        self.out_proj = RowParallelLinear(values, {"out_proj": config.hidden_size}, ranks, bias=False)

    def channels(self) -> Iterator[Part]:
        """The rank's channels of q, of k and of v among those of the checkpoint's convolution."""
        spec, keys = self.whole, self.whole.num_k_heads * self.whole.k_dim
        parts = self.k_heads.times(spec.k_dim), self.k_heads.times(spec.k_dim), self.v_heads.times(spec.v_dim)
        for first, part in zip((0, keys, 2 * keys), parts, strict=True):
            yield Part(part.size, first + part.first, spec.num_channels)

    def input_pieces(self) -> list[tuple[str, Part]]:
        """Checkpoint rows of q, k, v and the gate of the output, in this order."""
        gate = self.v_heads.times(self.whole.v_dim)
        return [*(("in_proj_qkv", part) for part in self.channels()), ("in_proj_z", gate)]

    def gate_pieces(self) -> list[tuple[str, Part]]:
        """Checkpoint rows of b and a, in this order."""
        return [("in_proj_b", self.v_heads), ("in_proj_a", self.v_heads)]

    @cached_property
    def weights(self) -> DeltaWeights:
        """What the batch computes with, once the parameters are filled."""
        decay, dt_bias = self.A_log.detach().float().exp(), self.dt_bias.detach().float()
        return DeltaWeights(self.spec, self.conv.detach(), decay, dt_bias, self.norm.weight.detach(), self.norm.eps)

    def forward(self, x: Tensor, batch: StateBatch, rows: Tensor | None = None) -> Tensor:
        """x [N, E] -> [M, E], of the tokens ``rows`` [M]; ``None``: all. The state passes through every token."""
        out: Tensor = self.out_proj(self.mix(x, batch, rows))
        return out

    def sums(self, x: Tensor, batch: StateBatch, rows: Tensor | None = None) -> Addend:
        """See ``Layer.sums``."""
        return self.out_proj.sums(self.mix(x, batch, rows))

    def mix(self, x: Tensor, batch: StateBatch, rows: Tensor | None = None) -> Tensor:
        """What the output projection reads: x [N, E] -> [M, HV * DV]."""
        channels, values = self.spec.num_channels, self.spec.num_v_heads * self.spec.v_dim
        if self.gates is not None:
            projected, gates = self.in_proj(x), self.gates(x)
        else:
            projected, gates = self.in_proj(x).tensor_split((channels + values,), dim=-1)
        qkv, z = projected.split((channels, values), dim=-1)
        b, a = gates.chunk(2, dim=-1)
        z = z.unflatten(-1, (self.spec.num_v_heads, self.spec.v_dim))
        return taken(batch.delta_net(self.layer, qkv, z, b, a, self.weights).flatten(1), rows)

    def checkpoint_rows(self) -> Iterator[CheckpointRows]:
        start, shape = 0, (self.whole.num_channels, 1, self.whole.conv_width)
        for part in self.channels():
            stop = start + part.size
            yield CheckpointRows("linear_attn.conv1d.weight", shape, self.conv, start, stop, part.first)
            start = stop
        for name, parameter in (("A_log", self.A_log), ("dt_bias", self.dt_bias)):
            heads = self.v_heads
            yield CheckpointRows(f"linear_attn.{name}", (heads.whole,), parameter, 0, heads.size, heads.first)
