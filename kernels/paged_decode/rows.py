"""Blocks of requests as decode attention on the CPU groups them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..request_pages import LayerPages


class RequestRow(NamedTuple):
    """Dense slots of one request that are attended side by side.

    ``num_sink``: tokens of the first slot if it is a sink, else 0; ``num_valid``: those of the last slot if it may be
    partly written, else ``None``; ``num_hidden``: the first tokens of the first slot that lie before a window;
    ``place``: that of the row's part among those of its request.
    """

    request: int
    slots: list[int]
    num_sink: int
    num_valid: int | None
    num_hidden: int
    place: int


class SealedBlock(NamedTuple):
    """A sealed block of a request, by its byte address; its first ``num_hidden`` tokens lie before a window.

    ``place``: that of its part among those of its request.
    """

    address: int
    request: int
    num_hidden: int
    place: int


class SlotColumn(NamedTuple):
    """A slot of each row of a group, cut to its first ``num_tokens`` tokens."""

    is_sink: bool
    slots: slice | Tensor
    num_tokens: int

    def pages(self, pages: LayerPages) -> Tensor:
        """All slots of the kind, [S, 2, H, num_tokens, D]."""
        kv = pages.sinks if self.is_sink else pages.blocks
        assert kv is not None
        return kv[:, :, :, : self.num_tokens]
