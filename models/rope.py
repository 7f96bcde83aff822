"""Rotary position embedding: its configuration, its frequencies, and the rotation itself.

The rope types are those whose frequencies do not depend on the sequence: default, linear, llama3, yarn and longrope,
which has two sets of them, one for requests within the trained context and one for longer ones, and proportional.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv_engine.kernels.cos_sin import cos_sin

from .fields import Fields
from .layers import Layer

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Parameters of the rotation. Only the fields of ``rope_type`` are read; all others keep neutral values.

    ``original_max_position_embeddings``: the trained context in tokens. ``attention_factor`` scales cos and sin.
    ``partial`` is the share of a head's channels that rotate, the first ones of the checkpoint's; ``is_interleaved``:
    they rotate in pairs of neighbours there. ``factors`` divide longrope's frequencies, in requests that may be longer
    than the trained context ``long_factors`` do. Type proportional rotates the first channels of each half, at the
    frequencies that they have where all rotate.
    """

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    partial: float = 1.0
    is_interleaved: bool = False
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @classmethod
    def from_hf(cls, config: Fields, *, may_be_partial: bool = False, is_interleaved: bool = False) -> RopeConfig:
        """Read ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` (before).

        Raises ``ModelError`` for an unsupported rope type or a value out of range.
        """
        source = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        rope = Fields(config.get(source) or {}, source)
        home = config if rope.get("partial_rotary_factor") is None else rope
        partial = home.number("partial_rotary_factor", 0.0, 1.0, default=1.0)
        if partial != 1.0 and not may_be_partial and _rope_type(rope) != "proportional":
            raise home.error("partial_rotary_factor", "rotating only a part of each head is not supported here")
        for name, value in rope.values.items():
            if isinstance(value, dict):
                raise rope.error(name, "rope parameters that differ by layer are not supported here")
        return replace(cls._read(config, rope), partial=partial, is_interleaved=is_interleaved)

    @classmethod
    def _read(cls, config: Fields, rope: Fields) -> RopeConfig:
        theta_home = config if rope.get("rope_theta") is None else rope
        theta = theta_home.number("rope_theta", 2.0, 1e15, default=10_000.0)
        rope_type = _rope_type(rope)
        if rope_type == "default":
            return cls(theta=theta)
        if rope_type == "proportional":
            return cls(rope_type=rope_type, theta=theta, factor=rope.number("factor", 1.0, 1e6, default=1.0))
        if rope_type == "linear":
            return cls(rope_type=rope_type, theta=theta, factor=rope.number("factor", 1.0, 1e6))
        max_positions = config.integer("max_position_embeddings", 1, 2**31)
        home = config if config.get("original_max_position_embeddings") is not None else rope
        original = home.integer("original_max_position_embeddings", 1, 2**31, default=max_positions)
        if rope_type == "llama3":
            return cls._llama3(rope, theta, original)
        if rope_type == "longrope":
            return cls._longrope(rope, theta, original, max_positions)
        return cls._yarn(rope, theta, original, max_positions)

    @classmethod
    def _llama3(cls, rope: Fields, theta: float, original: int) -> RopeConfig:
        low = rope.number("low_freq_factor", 1e-3, 1e6)
        high = rope.number("high_freq_factor", 1e-3, 1e6)
        if high <= low:
            raise rope.error("high_freq_factor", f"must be larger than low_freq_factor ({low:g})")
        return cls(
            rope_type="llama3",
            theta=theta,
            factor=rope.number("factor", 1.0, 1e6),
            original_max_position_embeddings=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )

    @classmethod
    def _yarn(cls, rope: Fields, theta: float, original: int, max_positions: int) -> RopeConfig:
        factor = rope.number("factor", 1.0, 1e6, default=max(max_positions / original, 1.0))
        beta_fast = rope.number("beta_fast", 1e-3, 1e6, default=32.0)
        beta_slow = rope.number("beta_slow", 1e-3, 1e6, default=1.0)
        if beta_fast < beta_slow:
            raise rope.error("beta_fast", f"must not be smaller than beta_slow ({beta_slow:g})")
        return cls(
            rope_type="yarn",
            theta=theta,
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=beta_fast,
            beta_slow=beta_slow,
            truncate=rope.boolean("truncate", default=True),
            attention_factor=_yarn_attention_factor(rope, factor),
        )

    @classmethod
    def _longrope(cls, rope: Fields, theta: float, original: int, max_positions: int) -> RopeConfig:
        factor = rope.number("factor", 1e-3, 1e6, default=max_positions / original)
        attention_factor = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(max(original, 2)))
        return cls(
            rope_type="longrope",
            theta=theta,
            original_max_position_embeddings=original,
            attention_factor=rope.number("attention_factor", 1e-6, 1e3, default=attention_factor),
            factors=rope.numbers("short_factor", 1e-3, 1e6),
            long_factors=rope.numbers("long_factor", 1e-3, 1e6),
        )

    def check(self, config: Fields, head_dim: int) -> None:
        """Raises ``ModelError`` unless heads of ``head_dim`` channels can be rotated."""
        rotated = self.num_rotated(head_dim)
        if rotated % 2:
            raise config.error("partial_rotary_factor", f"must rotate an even number of {head_dim} channels")
        for factors in (self.factors, self.long_factors):
            if self.rope_type == "longrope" and len(factors) != rotated // 2:
                message = f"must have a short_factor and a long_factor for each of {rotated // 2} pairs of channels"
                raise config.error("rope_scaling" if config.get("rope_scaling") else "rope_parameters", message)

    def for_context(self, num_tokens: int) -> RopeConfig:
        """The rotation in requests of up to ``num_tokens``."""
        is_long = self.rope_type == "longrope" and num_tokens > self.original_max_position_embeddings
        return replace(self, factors=self.long_factors) if is_long else self

    def stretched(self, max_positions: int) -> int:
        """Tokens of the longest context, ``max_positions`` being what the config states."""
        if self.rope_type == "linear":  # its configs state the context before scaling
            return int(max_positions * self.factor)
        if self.rope_type == "yarn":
            return max(max_positions, int(self.original_max_position_embeddings * self.factor))
        return max_positions

    def num_rotated(self, head_dim: int) -> int:
        """Channels of a head that rotate."""
        rotated = int(head_dim * self.partial)
        return rotated // 2 * 2 if self.rope_type == "proportional" else rotated

    def channel_order(self, head_dim: int) -> list[int] | None:
        """A checkpoint's channels in the order in which i rotates with i + D / 2; ``None`` if they are in it."""
        size = self.num_rotated(head_dim)
        if size == 0 or self.rope_type == "proportional" or (size == head_dim and not self.is_interleaved):
            return None
        first, second = range(size // 2), range(size // 2, size)
        if self.is_interleaved:
            first, second = range(0, size, 2), range(1, size, 2)
        half = (size + head_dim) // 2
        return [*first, *range(size, half), *second, *range(half, head_dim)]

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Radians per token of each pair of channels, ``[head_dim / 2]`` float32, on the CPU; 0 for those at rest."""
        rotated = self.num_rotated(head_dim)
        frequencies = torch.zeros(head_dim // 2, dtype=torch.float32, device="cpu")
        is_proportional = self.rope_type == "proportional"
        own = self._frequencies(head_dim if is_proportional else rotated)
        frequencies[: rotated // 2] = own[: rotated // 2]
        return frequencies

    def _frequencies(self, head_dim: int) -> Tensor:
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        if self.rope_type == "longrope":
            return 1.0 / (torch.tensor(self.factors, device="cpu") * self.theta**exponent)
        frequencies = 1.0 / self.theta**exponent
        if self.rope_type in ("linear", "proportional"):
            return frequencies / self.factor
        if self.rope_type == "llama3":
            return self._llama3_frequencies(frequencies)
        if self.rope_type == "yarn":
            return self._yarn_frequencies(frequencies, head_dim)
        return frequencies

    def _llama3_frequencies(self, frequencies: Tensor) -> Tensor:
        """Long waves are stretched by ``factor``, short ones kept, those between interpolated (Llama 3.1)."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / self.factor)

    def _yarn_frequencies(self, frequencies: Tensor, head_dim: int) -> Tensor:
        """A ramp over the channels between ``beta_fast`` and ``beta_slow`` turns (YaRN, arXiv 2309.00071)."""
        low, high = self._yarn_channel(self.beta_fast, head_dim), self._yarn_channel(self.beta_slow, head_dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        span = high - low or 1e-3
        channels = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
        stretched = ((channels - low) / span).clamp(0.0, 1.0)
        return frequencies * (1.0 - stretched) + frequencies / self.factor * stretched

    def _yarn_channel(self, turns: float, head_dim: int) -> float:
        """The channel pair that makes ``turns`` turns in the trained context."""
        wavelength = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(self.theta))


class Rotation(NamedTuple):
    """Cosines and signed sines of a step's positions: both [N, 1, D] float32, the first half of the sines negated."""

    cos: Tensor
    signed_sin: Tensor


NO_ROTATION = RopeConfig(partial=0.0)


class RotaryEmbedding(Layer):
    """Cosines and sines of one step."""

    def __init__(self, rope: RopeConfig, head_dim: int):
        super().__init__()
        frequencies = rope.inverse_frequencies(head_dim)
        # Negated for the first half: its cosines stay, its sines change sign. Not a buffer: it stays float32 and real
        # when the model is built on the meta device or changes its dtype.
        self._frequencies = torch.cat((-frequencies, frequencies))
        self._scale: Tensor | None = None
        if rope.attention_factor != 1.0:  # of the channels that rotate
            self._scale = torch.where(self._frequencies == 0, 1.0, rope.attention_factor)

    def forward(self, positions: Tensor) -> Rotation:
        """positions ``[N]`` int -> the rotation of each."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
            self._scale = None if self._scale is None else self._scale.to(positions.device)
        return Rotation(*cos_sin(positions, self._frequencies, self._scale))


class LayerRotations(Layer):
    """Rotations of one step, one a layer, computed once for all layers that rotate alike."""

    def __init__(self, ropes: Sequence[RopeConfig], head_dims: Sequence[int]):
        super().__init__()
        layers = list(zip(ropes, head_dims, strict=True))
        kinds = list(dict.fromkeys(layers))
        self._embeddings = [RotaryEmbedding(*kind) for kind in kinds]
        self._kinds = [kinds.index(layer) for layer in layers]

    def forward(self, positions: Tensor) -> list[Rotation]:
        """positions ``[N]`` int -> the rotations in each layer."""
        rotations = [embedding(positions) for embedding in self._embeddings]
        return [rotations[kind] for kind in self._kinds]


def with_default_rope(config: Fields, parameters: dict[str, Any]) -> Fields:
    """``config`` with ``parameters`` where ``rope_parameters`` are left out or null."""
    stripped = config if config.get("rope_parameters") else config.without("rope_parameters")
    return stripped.given(rope_parameters=parameters)


def read_ropes(config: Fields, thetas: Mapping[str, Any]) -> dict[str, RopeConfig]:
    """The rotation of each kind of layer in ``thetas``, which has the base where ``rope_parameters`` has none.

    ``rope_scaling``, of configs before transformers 5, is that of the first kind. Raises as ``RopeConfig.from_hf``.
    """
    nested = config.get("rope_parameters") or {}
    if not isinstance(nested, dict) or any(not isinstance(each, dict | None) for each in nested.values()):
        raise config.error("rope_parameters", f"must have rope parameters for each of {', '.join(thetas)}")
    scaling, ropes = config.get("rope_scaling"), {}
    for kind, theta in thetas.items():
        own = {"rope_theta": theta, "rope_parameters": nested.get(kind), "rope_scaling": scaling}
        ropes[kind] = RopeConfig.from_hf(Fields({**config.values, **own}))
        scaling = None
    return ropes


def _rope_type(rope: Fields) -> str:
    name = "type" if rope.get("rope_type") is None else "rope_type"
    rope_type = rope.string(name, default="default")
    if rope_type not in ROPE_TYPES:
        raise rope.error(name, "this rope type is not supported", f"Supported: {', '.join(ROPE_TYPES)}")
    return rope_type


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor", 1e-6, 1e3)
    log_factor = math.log(factor)
    mscale = rope.number("mscale", 0.0, 1e3, default=0.0)
    mscale_all_dim = rope.number("mscale_all_dim", 0.0, 1e3, default=0.0)
    if mscale and mscale_all_dim:
        return (0.1 * mscale * log_factor + 1.0) / (0.1 * mscale_all_dim * log_factor + 1.0)
    return 0.1 * log_factor + 1.0
