"""Rotary position embedding: its configuration, its frequencies, and the rotation itself.

The rope types are those whose frequencies do not depend on the sequence: default, linear, llama3 and yarn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .fields import Fields
from .layers import Layer

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Parameters of the rotation. Only the fields of ``rope_type`` are read; all others keep neutral values.

    ``original_max_position_embeddings``: the trained context in tokens. ``attention_factor`` scales cos and sin.
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

    @classmethod
    def from_hf(cls, config: Fields) -> RopeConfig:
        """Read ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` (before).

        Raises ``ModelError`` for an unsupported rope type or a value out of range.
        """
        source = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        rope = Fields(config.get(source) or {}, source)
        _refuse_unsupported(config, rope)
        theta_home = config if rope.get("rope_theta") is None else rope
        theta = theta_home.number("rope_theta", 2.0, 1e15, default=10_000.0)
        rope_type = _rope_type(rope)
        if rope_type == "default":
            return cls(theta=theta)
        if rope_type == "linear":
            return cls(rope_type=rope_type, theta=theta, factor=rope.number("factor", 1.0, 1e6))
        max_positions = config.integer("max_position_embeddings", 1, 2**31)
        home = config if config.get("original_max_position_embeddings") is not None else rope
        original = home.integer("original_max_position_embeddings", 1, 2**31, default=max_positions)
        if rope_type == "llama3":
            return cls._llama3(rope, theta, original)
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

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Radians per token of each pair of channels, ``[head_dim / 2]`` float32, on the CPU."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        frequencies = 1.0 / self.theta**exponent
        if self.rope_type == "linear":
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


class RotaryEmbedding(Layer):
    """Cosines and sines of one step, computed once and shared by all layers."""

    def __init__(self, rope: RopeConfig, head_dim: int):
        super().__init__()
        frequencies = rope.inverse_frequencies(head_dim)
        # Negated for the first half: its cosines stay, its sines change sign. Not a buffer: it stays float32 and real
        # when the model is built on the meta device or changes its dtype.
        self._frequencies = torch.cat((-frequencies, frequencies))
        self._scale = rope.attention_factor

    def forward(self, positions: Tensor) -> Rotation:
        """positions ``[N]`` int -> the rotation of each."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = positions.view(-1, 1, 1) * self._frequencies
        cos, signed_sin = angles.cos(), angles.sin()
        if self._scale != 1.0:
            cos, signed_sin = cos * self._scale, signed_sin * self._scale
        return Rotation(cos, signed_sin)


def _rope_type(rope: Fields) -> str:
    name = "type" if rope.get("rope_type") is None else "rope_type"
    rope_type = rope.string(name, default="default")
    if rope_type not in ROPE_TYPES:
        raise rope.error(name, "this rope type is not supported", f"Supported: {', '.join(ROPE_TYPES)}")
    return rope_type


def _refuse_unsupported(config: Fields, rope: Fields) -> None:
    for fields in (config, rope):
        if fields.number("partial_rotary_factor", 0.0, 1.0, default=1.0) != 1.0:
            raise fields.error("partial_rotary_factor", "rotating only a part of each head is not supported")
    for name, value in rope.values.items():
        if isinstance(value, dict):
            raise rope.error(name, "rope parameters that differ by layer are not supported")


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor", 1e-6, 1e3)
    log_factor = math.log(factor)
    mscale = rope.number("mscale", 0.0, 1e3, default=0.0)
    mscale_all_dim = rope.number("mscale_all_dim", 0.0, 1e3, default=0.0)
    if mscale and mscale_all_dim:
        return (0.1 * mscale * log_factor + 1.0) / (0.1 * mscale_all_dim * log_factor + 1.0)
    return 0.1 * log_factor + 1.0
