"""Page formats: how one side (K or V) of a page is stored. One file a format, one line in ``make_format``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from qkv_engine.kernels.layout import Side, SideName


@dataclass(frozen=True)
class PageShape:
    """Extent of one side of a page: KV heads, tokens, elements a head."""

    num_kv_heads: int
    num_tokens: int
    head_dim: int


class Format(Protocol):
    """How one side of a page is stored; the only owner of its byte formula."""

    @property
    def name(self) -> str: ...

    @property
    def bits(self) -> float:
        """Code bits per element, metadata not counted."""
        ...

    def codes_nbytes(self, shape: PageShape) -> int: ...

    def meta_nbytes(self, shape: PageShape) -> int: ...

    def layout(self, shape: PageShape, side: SideName) -> Side:
        """Where the bytes of one side of a page lie, for the kernels."""
        ...


def make_format(name: str, dtype: torch.dtype) -> Format:
    """The format called ``name`` in a model that computes in ``dtype``.

    Raises ``ConfigError`` for an unknown name.
    """
    import torch

    from ...errors import ConfigError
    from .dense import Dense
    from .uniform import uniform_formats

    formats: dict[str, Format] = {
        # An fp16 model keeps fp16 pages; bf16 would lose three bits of its mantissa.
        "dense16": Dense("dense16", torch.float16 if dtype == torch.float16 else torch.bfloat16),
        "dense32": Dense("dense32", torch.float32),
        **uniform_formats(),
    }
    if name not in formats:
        raise ConfigError("unknown KV format", field="format", value=name, remedy=f"Choose from {', '.join(formats)}")
    return formats[name]
