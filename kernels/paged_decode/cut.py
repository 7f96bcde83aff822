"""How short attention of a part on the CPU may be cut, so that hidden tokens behind it would change no bit.

A kernel treats the tokens behind the last whole vector otherwise, so that a sum depends on how many there are. Whether
whole vectors agree with a whole slot is found by trying.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..attention_parts import partial_attention

UNIT = 32  # tokens: twice the widest vector
SEEDS = 3  # operands for each number of tokens

Shape = tuple[int, int, torch.dtype]  # query heads of a KV head, head_dim, dtype


@cache
def agreeing_unit(shape: Shape, num_sink: int, block_tokens: int) -> int:
    """Tokens whose multiples of a block agree with the block in attention, alone and behind ``num_sink`` of a sink."""
    agrees = all(
        _agree(shape, before + block_tokens, before + cut, hidden)
        for before in {0, num_sink}
        for cut in range(UNIT, block_tokens, UNIT)
        for hidden in (0, 1, UNIT - 1)
    )
    return UNIT if agrees else block_tokens


def _agree(shape: Shape, whole: int, cut: int, hidden: int) -> bool:
    """Whether attention over ``cut`` tokens, the last of them ``hidden``, equals that over the ``whole`` slot."""
    for seed in range(SEEDS):
        q, k, v = telling_operands(shape, whole, cut - hidden, seed)
        mask = torch.zeros(1, 1, 1, whole).masked_fill_(torch.arange(whole) >= cut - hidden, float("-inf"))
        long = partial_attention(q, k, v, scale=0.1, mask=mask)
        short = partial_attention(q, k[:, :, :cut], v[:, :, :cut], scale=0.1, mask=mask[..., :cut])
        if not all(map(torch.equal, long, short)):
            return False
    return True


def telling_operands(shape: Shape, num_tokens: int, num_seen: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V [1, 2, ., D] whose outputs are 0 but for rounding errors, which another order changes entirely.

    Each of the ``num_seen`` tokens has the key and the negative value of another one.
    """
    group, head_dim, dtype = shape
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, n, head_dim, generator=generator) for n in (group, num_tokens, num_tokens))
    one, other = torch.randperm(num_seen, generator=generator)[: num_seen // 2 * 2].chunk(2)
    k[:, :, other], v[:, :, other] = k[:, :, one], -v[:, :, one]
    return q.to(dtype), k.to(dtype), v.to(dtype)
