"""Uniform pages: integer codes of 8, 4, 3, 2 or 1 bits with a minimum and a range per group."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from qkv_engine.kernels.layout import Axis, SideName, UniformSide

from ...errors import ConfigError
from . import PageShape

BITS = (8, 4, 3, 2, 1)
GROUPS = (32, 64, 128)
AXES: tuple[Axis, ...] = ("channel", "token")
META_NBYTES = 4  # one (min, range) pair in fp16
HEAD_ALIGN = 16  # bytes: the widest load of one thread
SIDE_ALIGN = 128  # bytes: a cache line, so that no row of codes straddles two


@dataclass(frozen=True)
class Uniform:
    """x ~ min + code * range / (2^bits - 1) over groups of ``group`` elements along one axis.

    ``axis`` "channel": a group is ``group`` tokens of one channel (KIVI's K). "token": ``group`` channels of
    one token (V, and PM-KVQ's K); the last group of a head is smaller if ``group`` does not divide the head
    dim, and a group larger than the head is the whole head. Raises ``ConfigError`` for other bits, axes or
    groups.
    Source: KIVI (arXiv 2402.02750); (min, range) for (scale, zero), so that a demotion changes codes only.
    """

    bits: int
    axis: Axis
    group: int

    def __post_init__(self) -> None:
        for field, value, choices in (
            ("bits", self.bits, BITS),
            ("axis", self.axis, AXES),
            ("group", self.group, GROUPS),
        ):
            if value not in choices:
                raise ConfigError("not supported", field=field, value=value, remedy=f"Choose from {choices}")

    @property
    def name(self) -> str:
        return f"int{self.bits}-{self.axis}-{self.group}"

    def codes_nbytes(self, shape: PageShape) -> int:
        return shape.num_kv_heads * self._head_codes_nbytes(shape)

    def meta_nbytes(self, shape: PageShape) -> int:
        """All bytes of a side but its codes: (min, range) pairs, the largest range of each head, padding."""
        tops = 2 * shape.num_kv_heads
        codes = self.codes_nbytes(shape)
        return _align(codes + shape.num_kv_heads * self._head_meta_nbytes(shape) + tops, SIDE_ALIGN) - codes

    def layout(self, shape: PageShape, side: SideName) -> UniformSide:
        """Where the bytes of one side lie."""
        codes, meta = self._head_codes_nbytes(shape), self._head_meta_nbytes(shape)
        group, num_groups = self._groups(shape)
        return UniformSide(
            side=side,
            bits=self.bits,
            axis=self.axis,
            group=group,
            num_groups=num_groups,
            num_kv_heads=shape.num_kv_heads,
            num_tokens=shape.num_tokens,
            head_dim=shape.head_dim,
            head_codes_nbytes=codes,
            head_meta_nbytes=meta,
            meta_offset=shape.num_kv_heads * codes,
            top_offset=shape.num_kv_heads * (codes + meta),
            nbytes=self.codes_nbytes(shape) + self.meta_nbytes(shape),
        )

    def _groups(self, shape: PageShape) -> tuple[int, int]:
        """Elements of a group, and groups along the axis."""
        extent = shape.num_tokens if self.axis == "channel" else shape.head_dim
        group = min(self.group, extent)
        return group, -(-extent // group)

    def _head_codes_nbytes(self, shape: PageShape) -> int:
        return shape.num_tokens * self.bits // 8 * shape.head_dim

    def _head_meta_nbytes(self, shape: PageShape) -> int:
        across = shape.head_dim if self.axis == "channel" else shape.num_tokens
        return _align(META_NBYTES * self._groups(shape)[1] * across, HEAD_ALIGN)


def uniform_formats() -> dict[str, Uniform]:
    """Every uniform format by its name."""
    formats = (Uniform(*choice) for choice in product(BITS, AXES, GROUPS))
    return {fmt.name: fmt for fmt in formats}


def _align(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
