"""The study of Kitty's equation 1: a channel's sensitivity is what attention loses when it alone is quantized."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qkv_engine.kernels.formats import PageShape
from qkv_engine.kernels.formats.uniform import Uniform
from qkv_engine.kernels.formats.uniform import reference as uniform
from studies.captured import WINDOW, Attended
from studies.kitty_sensitivity import RULES, as_table, sensitivities


def attention(q: Tensor, k: Tensor) -> Tensor:
    """Attention [G, WINDOW, T] of one head's newest tokens, plainly."""
    rows = []
    for i in range(WINDOW):
        seen = len(k) - WINDOW + i + 1
        scores = q[:, i] @ k[:seen].T * k.shape[1] ** -0.5
        rows.append(torch.cat((scores.softmax(-1), torch.zeros(len(q), len(k) - seen)), 1))
    return torch.stack(rows, 1)


def test_a_sensitivity_is_the_error_of_attention_with_one_channel_quantized() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(4, WINDOW, 32, generator=generator), torch.randn(2, 300, 32, generator=generator)
    k[1, :, 5] *= 9
    layer = Attended(q, k, k)
    found = sensitivities(layer)
    old = layer.old(k)
    side = Uniform(2, "channel", 128).layout(PageShape(2, 128, 32), "k")
    rough = layer.with_old(k, uniform.dequantize(uniform.quantize(old, side), side))
    for head, channel in ((0, 0), (0, 31), (1, 5)):
        changed = k[head].clone()
        changed[:, channel] = rough[head, :, channel]
        queries = q[2 * head : 2 * head + 2]
        expected = (attention(queries, changed) - attention(queries, k[head])).square().mean()
        torch.testing.assert_close(found[head, channel], expected, rtol=1e-3, atol=1e-12)
    assert found[1].argmax() == 5 == RULES["magnitude"](k[1]).argmax() == RULES["range"](k[1]).argmax()


def test_the_table_has_a_line_a_layer_and_the_mean() -> None:
    shares = {(name, share): [0.5, 0.7] for name in ("best", *RULES) for share in (0.125, 0.25)}
    table = as_table([shares, {key: [0.1] for key in shares}])
    assert [row[:2] for row in table.cells] == [["0", "60"], ["1", "10"], ["mean", "35.0"]]
    assert table.headers[1] == "best, 12.5 %" and len(table.headers) == 11


@pytest.mark.parametrize("name", RULES)
def test_rules_rank_every_channel(name: str) -> None:
    assert RULES[name](torch.randn(50, 16)).shape == (16,)
