"""Pages of one layer in the arena, and of one request, as attention in torch reads them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from .formats import BlockLayout


@dataclass(frozen=True)
class LayerPages:
    """One layer of the arena. Dense blocks and sinks are one strided tensor each, indexed by slot number.

    Shapes:  memory [M] uint8;  blocks [S, 2, H, T, D];  sinks [S', 2, H, TS, D], ``None`` without sinks
    ``layouts``: the page layout on every rung; sealed blocks are found in ``memory`` by their address.
    """

    layer: int
    memory: Tensor
    blocks: Tensor
    sinks: Tensor | None
    layouts: tuple[BlockLayout, ...]


@dataclass
class RequestPages:
    """The first ``length`` tokens of one request: (slot, valid tokens) of its sink and open block, the slots of its
    full dense blocks, the byte addresses of its sealed blocks by rung, and that of its bank of patterns.

    For a window, blocks that no query sees are left out, and ``positions`` has the first token of each full block by
    rung: of ``full`` under 0, of ``sealed`` under the others.
    """

    length: int
    sink: tuple[int, int] | None = None
    full: list[int] = field(default_factory=list)
    open: tuple[int, int] | None = None
    sealed: dict[int, list[int]] = field(default_factory=dict)
    bank: int | None = None
    positions: dict[int, list[int]] = field(default_factory=dict)
