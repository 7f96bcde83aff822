"""Sensitivities against their definition, on the families' references and on a model's own gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from qkv_engine.layer_kv import LayerKV, kv_of_layers
from qkv_engine.planner import sensitivity
from qkv_engine.planner.gradients import Text, profile_text
from qkv_engine.planner.sensitivity import SINK, Candidates, pages, round_trip, side_sensitivities
from qkv_engine.planner.sequence import Heads, SequenceBatch, run

from ..models.test_families import FAMILY_CASES, case_id
from .test_gradients import FAMILIES, random_ids

# A soft cap with windows; layers that read the KV of others, and layers with unlike heads.
OTHERS = [each for each in FAMILY_CASES if each[0] in ("Gemma2", "Gemma4")]
FIRST_ORDER = [FAMILIES[0], FAMILIES[3], *OTHERS]


@pytest.fixture
def heads() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and gradients that fill one page and a part of another, behind the sink."""
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(SINK + 200, 2, 32, generator=generator) for _ in "xg")
    return x * torch.arange(1, 33), gradient


def test_it_is_the_error_times_the_gradient(heads: tuple[torch.Tensor, torch.Tensor]):
    x, gradient = heads
    sides = Candidates.of(2, 32, torch.float32).k
    found = dict(zip(sides, side_sensitivities(x, gradient, sides).tolist(), strict=True))
    wanted = torch.cat((x[SINK:], x[SINK : SINK + 56])).view(2, 128, 2, 32).transpose(1, 2).contiguous()
    weight = gradient[SINK:].abs()
    for name, side in sides.items():
        back = side.family.dequantize(side.family.quantize(wanted, side), side)
        error = (back - wanted).transpose(1, 2).flatten(0, 1)[:200].abs()
        assert found[name] == pytest.approx(float((error * weight).sum()), rel=1e-4), name
    bits = [found[f"int{b}-token-128"] for b in (1, 2, 4, 8)]
    assert bits == sorted(bits, reverse=True) and bits[0] > 10 * bits[2] > 0
    assert found["int2-channel-128"] > found["kitty-12.5"] > found["kitty-25"] > found["int4-channel-128"]


def test_the_sink_and_a_pages_filling_count_for_nothing(heads: tuple[torch.Tensor, torch.Tensor]):
    x, gradient = heads
    sides = Candidates.of(2, 32, torch.float32).v
    before = side_sensitivities(x, gradient, sides)
    x[:SINK] *= 100
    torch.testing.assert_close(side_sensitivities(x, gradient, sides), before)
    assert not side_sensitivities(x[:SINK], gradient[:SINK], sides).any()


def test_pieces_change_nothing(heads: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch):
    sides = Candidates.of(2, 32, torch.float32).k
    whole = side_sensitivities(*heads, sides)
    monkeypatch.setattr(sensitivity, "PIECE_PAGES", 1)
    torch.testing.assert_close(side_sensitivities(*heads, sides), whole)


@pytest.mark.parametrize("side", ["k", "v"])
def test_the_widest_come_first_whatever_the_order_of_families(side: str, monkeypatch: pytest.MonkeyPatch):
    sides = getattr(Candidates.of(2, 64, torch.float32), side)
    sizes = [found.nbytes for found in sides.values()]
    assert next(iter(sides)) == "dense16" and sizes == sorted(sizes, reverse=True)
    monkeypatch.setattr(sensitivity, "FAMILIES", sensitivity.FAMILIES[::-1])
    assert [found.nbytes for found in getattr(Candidates.of(2, 64, torch.float32), side).values()] == sizes


def test_formats_that_do_not_fit_are_left_out():
    wide, odd = Candidates.of(1, 512, torch.float32), Candidates.of(1, 33, torch.float32)
    assert "kitty-25" not in wide.k and "int2-channel-128" in wide.k
    assert "int1-token-128" not in odd.v and "int2-token-128" in odd.v


def test_layers_with_unlike_heads_have_the_same_candidates_each_with_bytes_of_its_own():
    small, large = LayerKV(2, 33), LayerKV(1, 128, 512)
    found = Candidates.of_layers([small, large, small], torch.float32)
    assert [list(each.k) for each in found] == [list(found[0].k)] * 3 and "int1-token-128" not in found[1].v
    assert [each.k["dense16"].nbytes for each in found] == [128 * 2 * 33 * 2, 128 * 128 * 2, 128 * 2 * 33 * 2]
    assert list(found[0].k) == [name for name in Candidates.of(2, 33, torch.float32).k if name in found[1].k]


@pytest.mark.parametrize(("family", "changes"), FIRST_ORDER, ids=case_id)
@pytest.mark.parametrize("side", ["k", "v"])
def test_a_small_error_in_a_layer_changes_the_loss_by_no_more(pair, side: str):
    """First order: with the gradients of all who read the layer's KV, and after q/k norm and rotation."""
    _, model = pair
    text = Text(random_ids(100))
    ids, name = torch.tensor(text.token_ids), "int8-token-128"
    candidates = Candidates.of_layers(kv_of_layers(model.config), torch.float32)
    found = profile_text(model, text, candidates)
    index = list(getattr(candidates[0], side)).index(name)
    for number in range(model.config.num_layers):
        change = loss_with(model, ids, number, side, getattr(candidates[number], side)[name]) - loss_with(model, ids)
        assert 0 < abs(change) <= 1.05 * getattr(found, side)[index][number]


class RoundingBatch(SequenceBatch):
    """Rounds one side, ``name``, of layer ``number``; the sink is left out."""

    def __init__(self, specs, number: int, name: str, side) -> None:
        super().__init__(specs)
        self.number, self.name, self.side = number, name, side

    def attend_heads(self, layer: int, heads: Heads, null_logits: torch.Tensor | None) -> torch.Tensor:
        if layer == self.number:
            kept = getattr(heads, self.name)
            rounded = round_trip(pages(kept[SINK:]), self.side).transpose(1, 2).flatten(0, 1)[: len(kept) - SINK]
            heads = heads._replace(**{self.name: torch.cat((kept[:SINK], rounded))})
        return super().attend_heads(layer, heads, null_logits)


@torch.no_grad()
def loss_with(model, ids: torch.Tensor, number: int = -1, name: str = "k", side=None) -> float:
    """The mean loss with a side of layer ``number`` rounded."""
    hidden = run(model, ids[:-1], RoundingBatch(model.config.attention, number, name, side))
    return float(F.cross_entropy(model.compute_logits(hidden), ids[1:]))
