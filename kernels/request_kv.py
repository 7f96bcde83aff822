"""K and V of one request as plain tensors, on whatever rungs its blocks stand: the input of attention references."""

from __future__ import annotations

import torch
from torch import Tensor

from .dequant import dequant_reference
from .request_pages import LayerPages, RequestPages


def request_tokens(pages: LayerPages, request: RequestPages) -> tuple[Tensor, Tensor]:
    """K and V [H, n, D] float32 of a request's tokens; in the order sink, open, full, sealed, which softmax ignores."""
    pieces = []
    banks = None if request.bank is None else torch.tensor([request.bank])
    if request.sink is not None and pages.sinks is not None:
        slot, valid = request.sink
        pieces.append(pages.sinks[slot, :, :, :valid].float())
    if request.open is not None:
        slot, valid = request.open
        pieces.append(pages.blocks[slot, :, :, :valid].float())
    pieces += [pages.blocks[slot].float() for slot in request.full]
    for rung, addresses in request.sealed.items():
        page = pages.layouts[rung].pages[pages.layer]
        for address in addresses:
            k, v = dequant_reference(pages.memory, torch.tensor([address]), page, banks)
            pieces.append(torch.cat((k, v)))
    k, v = torch.cat(pieces, dim=2)
    return k, v


def token_positions(request: RequestPages, block_tokens: int) -> Tensor:
    """Positions [n] of the tokens that ``request_tokens`` gives."""
    pieces = []
    if request.sink is not None:
        pieces.append(torch.arange(request.sink[1]))
    if request.open is not None:
        pieces.append(torch.arange(request.length - request.open[1], request.length))
    for rung in (*([0] if request.full else []), *request.sealed):
        pieces += [torch.arange(first, first + block_tokens) for first in request.positions[rung]]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)
