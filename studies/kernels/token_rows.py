"""Places of a step's tokens in dense pages: one small tensor a step, which all layers share.

The arena, seen as rows of D elements, holds a dense slot as ``[layers][K, V][H][tokens]`` rows; every slot starts at a
row. A sink's slot is a block's with fewer tokens. So two numbers place a token in a block or a sink: the row of its K
in head 0 of layer 0, and the rows from one head to the next. Side s (0: K, 1: V) of layer l and head h is at

    row + ((2 l + s) H + h) * rows between heads
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_rows(
    addresses: Tensor,
    requests: Tensor,
    positions: Tensor,
    *,
    sink_tokens: int,
    block_tokens: int,
    row_nbytes: int,
) -> Tensor:
    """Row and rows between heads of each token; row -1, where nothing is written, for a negative position (padding).

    Tensor arithmetic of fixed shapes: on a device there is no synchronisation, and a graph can capture it.

    Shapes:  addresses [B, P] int64, bytes, the slots of each request's dense blocks in token order, with
             ``sink_tokens`` > 0 its sink first;  requests [N] int64, row of ``addresses`` of each token;
             positions [N] int64, in the request;  returns [N, 2] int64
    ``row_nbytes`` are the bytes of D elements in the pages' dtype.
    """
    past_sink = positions - sink_tokens
    is_sink = past_sink < 0
    block = past_sink.div(block_tokens, rounding_mode="floor") + int(sink_tokens > 0)
    address = addresses[requests, block.clamp_(min=0)]
    offset = torch.where(is_sink, positions, past_sink % block_tokens)
    row = address.div(row_nbytes, rounding_mode="floor") + offset
    return torch.stack((torch.where(positions < 0, -1, row), torch.where(is_sink, sink_tokens, block_tokens)), 1)
