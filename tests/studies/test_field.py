"""KVarN, OSCAR and the Hadamard rotation in plain torch, and the study that sets them beside the papers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qkv_engine.bench.divergence import Mean
from studies import spectral_field
from studies.field_plot import FieldPoint, draw
from studies.field_schemes import ENGINE, NAMES, SPECTRAL, Field, of_codec, old_blocks
from studies.papers import hadamard, kivi, kvarn, oscar
from studies.papers.cache import LayerCache
from studies.papers.decode import generate, generate_all, read
from studies.papers.demo import demo_model
from studies.spectral_field import kept_rows, main


def side(heads: int, num_tokens: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(heads, num_tokens, dim, generator=torch.Generator().manual_seed(seed))


def error(simulate, x: Tensor) -> float:
    """The mean squared error, of the mean square."""
    return float((simulate(x) - x).square().mean() / x.square().mean())


# ---- Hadamard


@pytest.mark.parametrize("size", [1, 16, 64, 80, 96, 128, 192, 256])
def test_hadamard_is_orthonormal_and_mixes_all_channels(size: int):
    found = hadamard.hadamard(size)
    torch.testing.assert_close(found @ found.T, torch.eye(size))
    torch.testing.assert_close(found.abs(), torch.full((size, size), size**-0.5))


def test_no_hadamard_of_odd_sizes():
    with pytest.raises(ValueError, match="no Hadamard matrix of 112 channels"):
        hadamard.hadamard(112)


def test_hadamard_of_two():
    torch.testing.assert_close(hadamard.hadamard(2), torch.tensor([[1.0, 1.0], [1.0, -1.0]]) / 2**0.5)


@pytest.mark.parametrize("dim", [64, 80, 128])
def test_a_rotation_spreads_one_large_channel(dim: int):
    x = side(2, 128, dim)
    x[..., 3] *= 50
    assert error(hadamard.simulate(2), x) < error(lambda x: hadamard.by_token(_two_bits, dim)(x), x)


def _two_bits(groups: Tensor) -> Tensor:
    return hadamard.quantizers.kitty(groups, 2).values()


# ---- KVarN


def test_balanced_tiles_have_deviations_alike():
    tiles = side(1, 128, 64)[0] * torch.linspace(1, 40, 64) * torch.linspace(2, 9, 128)[:, None]
    scales = kvarn.balance(tiles)
    assert kvarn.imbalance(tiles) > 40
    assert kvarn.imbalance(tiles / scales.columns / scales.rows) < 3  # 2 but for the bound of small scales
    assert scales.columns.shape == (1, 64) and scales.rows.shape == (128, 1)


def test_the_best_round_is_taken():
    tiles = side(3, 128, 64).square()
    found = [float(kvarn.imbalance(_balanced(tiles, rounds))[0]) for rounds in range(6)]
    assert found == sorted(found, reverse=True)
    assert torch.equal(_balanced(tiles[:1], 5), _balanced(tiles, 5)[:1])  # each tile has a best round of its own


def _balanced(tiles: Tensor, rounds: int) -> Tensor:
    scales = kvarn.balance(tiles, rounds=rounds)
    return tiles / scales.columns / scales.rows


def test_small_tiles_are_balanced_without_the_bound_alone():
    tiles = side(1, 128, 64) * 0.01 * torch.linspace(1, 9, 64)
    bounded, free = kvarn.balance(tiles), kvarn.balance(tiles, kvarn.UNBOUNDED)
    assert float(torch.cat([x.flatten() for x in bounded]).min()) >= 0.74
    assert kvarn.imbalance(tiles / bounded.columns / bounded.rows) == pytest.approx(float(kvarn.imbalance(tiles)))
    assert kvarn.imbalance(tiles / free.columns / free.rows) < 2.1


@pytest.mark.parametrize("simulate", [hadamard.simulate(2), kvarn.keys(2), kvarn.keys(4), kvarn.values(2)])
@pytest.mark.parametrize("constant", [0.0, -1.75, 300.0])
def test_constant_blocks_are_exact_to_fp16(simulate, constant: float):
    x = torch.full((2, 256, 128), constant)
    torch.testing.assert_close(simulate(x), x, rtol=0.06, atol=1e-6)  # the large channel's rounding comes back in one


def test_scales_of_tokens_cost_nothing():
    """A token as large as a hundred others leaves them alone: rows and columns have scales of their own."""
    x = side(1, 128, 128)
    wide = x.clone()
    wide[:, 7] *= 100
    rest = [i for i in range(128) if i != 7]
    for simulate in (kvarn.keys(2), kvarn.values(2)):
        assert float((simulate(wide) - wide)[:, rest].square().mean()) < 1.1 * error(simulate, x)
    by_channel = kivi.layer(2, 2, 128).k.simulate
    assert float((by_channel(wide) - wide)[:, rest].square().mean()) > 0.5


def test_tiles_are_coded_by_themselves():
    x = side(2, 256, 64)
    for simulate in (kvarn.keys(4), kvarn.values(2)):
        torch.testing.assert_close(simulate(x)[:, 128:], simulate(x[:, 128:]))


def test_more_bits_err_less():
    x = side(2, 128, 128)
    assert error(kvarn.keys(2), x) == pytest.approx(0.24, abs=0.03)
    assert error(kvarn.keys(4), x) == pytest.approx(0.0095, abs=0.002)


def test_clipped_rows_resolve_the_rest_better():
    x = side(1, 128, 128)
    x[0, 5] *= 3  # rare large values in every channel
    left = [(kvarn.code(x, 2, kvarn.Variant(quantile=q)) - x).abs().median() for q in (0.0, 0.05)]
    assert left[1] < left[0]
    ends = kvarn.code(torch.arange(128.0).expand(1, 128, 128), 2, kvarn.Variant(quantile=0.25))
    assert len(ends.unique()) == 4


# ---- OSCAR


def test_clipped_at_a_rank_of_each_token():
    x = torch.arange(-64.0, 64.0)[None]
    found = oscar.clip(x, 0.96)  # magnitudes in order: 0, 1, 1, 2, 2 ... 63, 63, 64; the one of rank 122 is 61
    assert found.max() == 61 and found.min() == -61
    assert torch.equal(oscar.clip(x, 1.0), x)


def test_moments():
    q, k, v = side(4, 300, 16), side(2, 300, 16, 1), side(2, 300, 16, 2)
    asked = oscar.key_moment(q, 2)
    expected = torch.einsum("gtd,gte->de", q[2:].double(), q[2:].double()) / 600
    torch.testing.assert_close(asked[1], expected)
    plain = oscar.value_moment(torch.eye(16, dtype=torch.float64).expand(2, -1, -1), torch.ones_like(k), v)
    torch.testing.assert_close(plain[0], v[0].double().T @ v[0].double() / 300)
    first = torch.zeros_like(k)
    first[:, 5] = 1  # only one token is asked for
    one = oscar.value_moment(asked, first, v)
    torch.testing.assert_close(one[0], torch.outer(v[0, 5], v[0, 5]).double())


@pytest.mark.parametrize("by_head", [False, True])
def test_rotations_spread_what_is_asked(by_head: bool):
    q = side(4, 500, 64) * torch.linspace(0.1, 5, 64)
    moments = oscar.key_moment(q, 2)
    found = oscar.rotation(moments, by_head=by_head)
    assert found.shape == ((2, 64, 64) if by_head else (64, 64))
    torch.testing.assert_close(found @ found.mT, torch.eye(64).expand_as(found), atol=1e-5, rtol=0)
    spread = found.double().mT @ (moments if by_head else moments.mean(0)) @ found.double()
    asked = spread.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(asked, asked.mean(-1, keepdim=True).expand_as(asked), rtol=1e-4, atol=1e-6)


def test_oscar_of_zeros_and_by_heads_alike():
    matrix = oscar.rotation(oscar.key_moment(side(2, 300, 64), 2))
    x = side(2, 128, 64)
    assert not oscar.simulate(matrix, 0.96)(torch.zeros_like(x)).any()
    each = oscar.simulate(torch.stack([matrix, matrix]), 0.96)
    torch.testing.assert_close(each(x), oscar.simulate(matrix, 0.96)(x))


# ---- bits and windows


def test_bits_with_all_metadata():
    assert hadamard.element_bits(2, 128) == oscar.element_bits(2, 128) == 2.25
    assert hadamard.element_bits(2, 64) == 2.5
    assert kvarn.element_bits(4, 2, 128) == 3.375 and kvarn.element_bits(2, 2, 128) == 2.375
    nbytes = 64 * 128 * 6 / 8 + 2 * (2 * 64 + 128) + 2 * (64 + 2 * 128)  # of a tile: codes, vectors of K and of V
    assert kvarn.element_bits(4, 2, 64) == 8 * nbytes / (2 * 64 * 128)


@pytest.mark.parametrize(
    ("layer", "counts"),
    [
        (partial(kvarn.layer, 4, 2), (256, 0)),
        (partial(hadamard.layer, 2), (400, 1)),
        (partial(oscar.layer, hadamard.hadamard(64), hadamard.hadamard(64)), (80, 1)),
    ],
)
def test_windows(layer, counts: tuple[int, int]):
    cache, x = layer(), side(1, 401, 64)
    for piece in (x[:, :400], x[:, 400:]):
        before = cache.k.quantized
        cache.attend(piece, piece, piece)
    assert (before, cache.k.quantized - before) == counts
    assert cache.k.quantized == cache.v.quantized


def test_a_codec_gets_whole_blocks_behind_the_windows():
    class Nothing:
        name, bits = "nothing", 0.0

        def __call__(self, layer: int, side: int, x: Tensor) -> Tensor:
            return torch.full_like(x, 10 * layer + side)

    scheme = of_codec(Nothing(), SPECTRAL, 2)
    cache = scheme.layers()[1]
    x = side(1, 600, 64).half().float()
    cache.attend(x, x, x)
    assert (cache.k.quantized, cache.v.quantized) == (384, 384) == (old_blocks(568),) * 2
    expected = x.clone()
    expected[:, 32:416] = 11
    assert torch.equal(cache.v.tokens, expected)
    assert scheme.layers()[0].k.length == 0  # every sequence has its own
    with demo_model() as (model, _):
        field = Field(model, [], [], own=False)
        field.codecs["nothing"] = Nothing()
        assert field.scheme("nothing").kind == SPECTRAL and field.scheme("int4").kind == ENGINE


# ---- the study


def test_lanes_answer_as_one_sequence_does():
    with demo_model() as (model, tokenizer):
        prompts = [tokenizer.encode(text) for text in ("12 + 34 = ", "sort 5 3 9 1", "a")]
        layers = [[LayerCache(*(kivi.layer(4, 4).k for _ in range(2))) for _ in range(8)] for _ in range(6)]
        one = [generate(model, layers[i], prompts[i], 6 + i, {tokenizer.eos_token_id}) for i in range(3)]
        read_ones = [read(model, prompt) for prompt in prompts]
        assert generate_all(model, layers[3:], read_ones, [6, 7, 8], {tokenizer.eos_token_id}) == one


def test_a_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    path, measured = tmp_path / "rows.jsonl", list[str]()
    measure = spectral_field.measure
    monkeypatch.setattr(
        spectral_field,
        "measure",
        lambda exam, scheme, *rest: measured.append(scheme.name) or measure(exam, scheme, *rest),
    )
    words = ["--output", str(path), "--tasks", "lookup:30", "--texts", "1", "--samples", "1"]
    assert main([*words, "--schemes", "fp16"]) == 0
    assert main([*words, "--schemes", "fp16,int4,oscar-2"]) == 0
    assert measured == ["fp16", "int4", "oscar-2"]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["kv"] for row in rows] == measured
    assert rows[0]["kl"] == {"lookup 30": [0.0]} and rows[2]["kl"]["lookup 30"][0] > rows[1]["kl"]["lookup 30"][0] > 0
    assert rows[1]["kind"] == ENGINE and rows[2]["bits"] == 2.25
    assert "| oscar-2" in capsys.readouterr().out
    assert kept_rows(path, settings="others", names=measured) == {}


def test_plot(tmp_path: Path):
    points = [
        FieldPoint(name, kind, bits, Mean(0.001 * bits, 0.0, 0.002 * bits), Mean(0.9, 0.8, 0.95))
        for name, kind, bits in (
            ("kivi-2", "seeds", 2.28),
            ("a", SPECTRAL, 1.5),
            ("b", SPECTRAL, 2.0),
            ("x", "seeds", 16),
        )
    ]
    draw(points, tmp_path / "a.png", "demo")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_every_name_has_a_scheme():
    assert all(hasattr(Field, "_" + name.replace("-", "_")) for name in NAMES)
