"""K and V of one request as plain tensors, on whatever rungs its blocks stand: the input of attention references."""

from __future__ import annotations

import torch
from torch import Tensor

from .dequant import dequant_reference
from .request_pages import LayerPages, RequestPages


def request_tokens(pages: LayerPages, request: RequestPages) -> tuple[Tensor, Tensor]:
    """K and V [H, n, D] float32 of a request's tokens; in the order sink, sealed, full, open, which softmax ignores."""
    pieces = []
    banks = None if request.bank is None else torch.tensor([request.bank])
    if request.sink is not None and pages.sinks is not None:
        slot, valid = request.sink
        pieces.append(pages.sinks[slot, :, :, :valid].float())
    for rung, addresses in request.sealed.items():
        page = pages.layouts[rung].pages[pages.layer]
        for address in addresses:
            k, v = dequant_reference(pages.memory, torch.tensor([address]), page, banks)
            pieces.append(torch.cat((k, v)))
    pieces += [pages.blocks[slot].float() for slot in request.full]
    if request.open is not None:
        slot, valid = request.open
        pieces.append(pages.blocks[slot, :, :, :valid].float())
    k, v = torch.cat(pieces, dim=2)
    return k, v
