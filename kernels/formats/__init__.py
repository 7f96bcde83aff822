"""Page formats, each the storage of one side (K or V) of a page. One folder a family, one line in ``FAMILIES``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qkv_engine.errors import ConfigError

from .dense import DENSE
from .family import Family, Format, PageShape, Side, SideBytes
from .graded import GRADED
from .kitty import KITTY
from .page import BlockLayout, PageLayout, Place
from .pattern import PATTERN
from .uniform import UNIFORM

if TYPE_CHECKING:
    import torch

FAMILIES: list[Family] = [DENSE, UNIFORM, KITTY, PATTERN, GRADED]


def make_format(name: str, dtype: torch.dtype) -> Format:
    """The format called ``name`` in a model that computes in ``dtype``. Raises ``ConfigError`` for an unknown name."""
    formats = {name: fmt for family in FAMILIES for name, fmt in family.formats(dtype).items()}
    found = formats.get(name) or next(filter(None, (family.parse(name) for family in FAMILIES)), None)
    if found is None:
        raise ConfigError("unknown KV format", field="format", value=name, remedy=f"Choose from {', '.join(formats)}")
    return found


def narrower_formats(old: Side) -> list[Format]:
    """The formats that a side can step down to."""
    import torch

    found = []
    for family in FAMILIES:
        for fmt in family.formats(old.dense_dtype or torch.float32).values():
            try:
                new = fmt.layout(old.shape, old.name)
                check_step(old, new)
            except ValueError:  # a ConfigError, too
                continue
            if new.nbytes < old.nbytes:
                found.append(fmt)
    return found


def check_step(old: Side, new: Side) -> None:
    """Raises ``ValueError`` unless a side can be rewritten from ``old`` to ``new`` by a copy, a seal or a demotion."""
    is_sealed = old.dense_dtype is not None and new.dense_dtype is None
    if not is_sealed and old != new:
        new.family.check_step(old, new)


__all__ = [
    "FAMILIES",
    "BlockLayout",
    "Family",
    "Format",
    "PageLayout",
    "PageShape",
    "Place",
    "Side",
    "SideBytes",
    "check_step",
    "make_format",
    "narrower_formats",
]
