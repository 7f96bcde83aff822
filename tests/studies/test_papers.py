"""The papers' own rules: traces of windows, what is quantized to what, the pages of the schemes, the study's command.

Counts of tokens in full precision are as the releases' code leaves them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qkv_engine import Engine, KVConfig, SamplingParams
from qkv_engine.device.layouts import Rung, build_ladder
from qkv_engine.loading import demo_folder
from qkv_engine.models.registry import config_from_hf
from qkv_engine.models.shapes import SHAPES
from qkv_engine.presets import PRESETS
from studies.papers import kitty, kivi, kvmix, patternkv, quantizers, xquant
from studies.papers.__main__ import SCHEMES, main
from studies.papers.cache import LayerCache, Side, attention, by_channel, by_token, full_precision
from studies.papers.decode import generate
from studies.papers.demo import demo_model
from studies.papers.three_bits import table


def side(heads: int, num_tokens: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(heads, num_tokens, dim, generator=torch.Generator().manual_seed(seed))


def counting(rule: Callable[[int], int]) -> Side:
    """A side that counts and changes nothing."""
    return Side(rule, lambda x: x)


# ---- windows (golden checks 12 to 14)


def fed(layer: LayerCache, num_tokens: int, *, heads: int = 1, dim: int = 128, seed: int = 0) -> LayerCache:
    """``layer`` with that many more tokens, a prompt if they are its first, one by one if not."""
    x = side(heads, num_tokens, dim, seed)
    pieces = [x] if layer.k.length == 0 else x.split(1, dim=1)
    for piece in pieces:
        layer.attend(piece, piece, piece + 1)
    return layer


def counts(layer: LayerCache) -> tuple[int, int, int, int]:
    """K in full precision, V in full precision, K quantized, V quantized."""
    return layer.k.full, layer.v.full, layer.k.quantized, layer.v.quantized


def test_kivi_trace():
    layer = fed(kivi.layer(2, 2), 300)
    assert counts(layer) == (44, 128, 256, 172)
    attended = []
    layer.k.simulate = lambda x: attended.append(x.shape[1]) or x
    fed(layer, 83)
    assert counts(layer) == (127, 128, 256, 255) and not attended
    fed(layer, 1)
    assert counts(layer) == (0, 128, 384, 256) and attended == [128]


@pytest.mark.parametrize(("length", "k", "v"), [(5, 5, 5), (127, 127, 127), (128, 0, 128), (129, 1, 128)])
def test_kivi_prompts(length: int, k: int, v: int):
    assert counts(fed(kivi.layer(2, 2), length))[:2] == (k, v)


def test_kivi_attends_a_full_residual_before_it_is_quantized():
    """The token that completes R tokens still sees all of them as they were."""
    layer = fed(kivi.layer(2, 2), 127)
    x = side(1, 1, 128, seed=9)
    expected = attention(x.half().float(), torch.cat((layer.k.tokens, x.half()), 1), torch.cat((layer.v.tokens, x), 1))
    torch.testing.assert_close(layer.attend(x.half().float(), x, x.half().float()), expected, atol=1e-3, rtol=1e-3)
    assert layer.k.full == 0


def test_kitty_trace():
    """Sink 32, three pages and 84 tokens of K; two pages, 84 tokens that wait and a window of 128 of V."""
    layer = fed(kitty.layer(16), 500)
    assert counts(layer) == (32 + 84, 32 + 84 + 128, 3 * 128, 2 * 128)
    fed(layer, 43)
    assert counts(layer) == (32 + 127, 32 + 127 + 128, 384, 256)
    fed(layer, 1)
    assert counts(layer) == (32, 32 + 128, 512, 384)


def test_kitty_sink_grows_while_a_short_prompt_is_continued():
    layer = fed(fed(kitty.layer(16), 10), 149)
    assert counts(layer) == (159, 159, 0, 0)
    first = layer.k.tokens[:, :32].clone()
    fed(layer, 200)
    assert counts(layer) == (32 + 71, 32 + 71 + 128, 256, 128)
    assert torch.equal(layer.k.tokens[:, :32], first)


def test_kitty_simulator_trace():
    """No prompt up to 160 tokens is quantized; then a page with the 129th token after it, and V token by token."""
    make = partial(kitty.layer, 12, simulator=True)
    assert counts(fed(make(), 160)) == (160, 160, 0, 0)
    assert counts(fed(make(), 161)) == (32 + 1, 32 + 128, 128, 1)
    assert counts(fed(make(), 288)) == (32, 32 + 128, 256, 128)
    layer = fed(fed(make(), 160), 1)
    assert counts(layer) == (32 + 1, 32 + 128, 128, 1)
    assert counts(fed(layer, 127)) == (32 + 128, 32 + 128, 128, 128)
    assert counts(fed(layer, 1)) == (32 + 1, 32 + 128, 256, 129)


def window_trace(ratio: float, length: int, steps: int, group: int = 32) -> list[int]:
    """Tokens in full precision after a prompt and each of ``steps`` further tokens."""
    window = counting(kvmix.keep_share(ratio, group))
    found = []
    for num_tokens in (length, *(1,) * steps):
        window.append(torch.zeros(1, num_tokens, 1))
        window.settle()
        found.append(window.full)
    return found


@pytest.mark.parametrize(
    ("ratio", "length", "expected"),
    [(0.1, 1000, [104, 41, 10, 11]), (0.1, 688, [80, 17, 18, 19]), (0.2, 688, [144, 49, 18, 19])],
)
def test_kvmix_trace(ratio: float, length: int, expected: list[int]):
    assert window_trace(ratio, length, len(expected) - 1) == expected


@pytest.mark.parametrize(
    ("ratio", "token_group", "least", "most", "mean"),
    [
        (0.1, 32, 3, 34, 18.5),
        (0.2, 32, 7, 38, 22.5),
        (0.3, 32, 13, 44, 28.5),
        (0.2, 11, 2, 12, 7.0),
        (0, 32, 0, 31, 15.5),
    ],
)
def test_kvmix_windows_settle_in_a_small_range(ratio: float, token_group: int, least: int, most: int, mean: float):
    steady = window_trace(ratio, 1000, 40 + 10 * token_group, token_group)[41:]
    assert (min(steady), max(steady)) == (least, most)
    assert sum(steady) / len(steady) == pytest.approx(mean, abs=0.01)


def test_kvmix_quantizes_before_it_attends_and_a_prompt_after():
    layer = fed(kvmix.layer(2, 2), 96, dim=32)
    assert layer.k.quantized == 64  # all but 9 tokens, in groups of 32
    x = side(1, 1, 32, seed=9).half().float()
    seen = layer.attend(x, x, x)
    assert torch.equal(seen, attention(x, layer.k.tokens, layer.v.tokens))
    prompt, fresh = side(1, 64, 32).half().float(), kvmix.layer(2, 2)
    assert torch.equal(fresh.attend(prompt, prompt, prompt), attention(prompt, prompt, prompt))


# ---- what is quantized, and to what (golden checks 19, 20 and 22)


def test_kvmix_without_a_window_has_the_codes_of_kivi():
    """Values of eighths with a range of 3; they differ at halves that are even, and nowhere else."""
    x = torch.randint(0, 25, (2, 64, 32), generator=torch.Generator().manual_seed(0)) / 8
    x[:, ::32], x[:, 1::32] = 0, 3
    ours = Side(kvmix.keep_share(0.0, 32), by_channel(lambda g: quantizers.kvmix(g, 2).codes.float(), 32))
    theirs = Side(lambda full: full // 32 * 32, by_channel(lambda g: quantizers.kivi(g, 2).codes.float(), 32))
    for one in (ours, theirs):
        one.append(x)
        one.settle()
        assert one.full == 0
    is_half = (x == 0.5) | (x == 2.5)
    assert is_half.any() and torch.equal(ours.tokens == theirs.tokens, ~is_half)


def test_kvmix_average_bits():
    scores = list(range(32))
    for share, k_mean, v_mean in ((0.2, 2.1875, 2.375), (0.3, 2.28125, 2.5625)):
        bits = kvmix.layer_bits(kvmix.top_layers(scores, scores[::-1], share), 32)
        assert sum(k for k, _ in bits) / 32 == k_mean and sum(v for _, v in bits) / 32 == v_mean
        assert bits[-1] == (3, 2) and bits[0] == (2, 4)  # K and V are ranked apart


@pytest.mark.slow  # imports transformers
def test_kvmix_scores_are_means_of_gradient_norms():
    texts = ["<|im_start|>user\nWhat is 5+4?<|im_end|>\n", "<|im_start|>user\nSort: 3, 1, 2<|im_end|>\n"]
    first, second, both = (kvmix.gradient_scores(demo_folder(), part) for part in (texts[:1], texts[1:], texts))
    for one, other, mean in zip(first, second, both, strict=True):
        assert len(mean) == 8 and min(mean) > 0 and len(set(mean)) == 8
        assert mean == pytest.approx([(x + y) / 2 for x, y in zip(one, other, strict=True)])


@pytest.mark.parametrize("faithful", [True, False])
def test_kvmix_keys_of_three_bits(faithful: bool):
    layer = fed(kvmix.layer(3, 4, faithful=faithful), 100, dim=32)
    assert layer.k.quantized == (77 if faithful else 66)  # 20 tokens stay, and what fills no word, or no three
    x = side(1, 100, 32).half().float()
    error = (layer.k.tokens - x)[:, : layer.k.quantized].square().mean((0, 2))
    eleventh = torch.arange(layer.k.quantized) % 11 == 10
    assert error[eleventh].mean() > (20 if faithful else 4) * error[~eleventh].mean()


def test_kitty_without_or_with_all_channels_boosted():
    pages = side(3, 16, 128)
    for num_boosted, bits in ((0, 2), (16, 4)):
        assert torch.equal(kitty.page_codes(pages, num_boosted).codes, quantizers.kitty(pages, bits).codes)


def test_kitty_boosts_the_strongest_channels_and_the_first_of_equals():
    pages = torch.ones(1, 8, 128) * torch.tensor([1.0, 3, 2, 3, 2, 0, 2, -4])[None, :, None]
    assert kitty.boosted_channels(pages, 4)[0].nonzero().flatten().tolist() == [1, 2, 3, 7]
    order = torch.tensor([7, 2, 0, 5, 1, 3, 4, 6])
    distinct = pages + torch.arange(8)[None, :, None] / 16
    assert torch.equal(
        kitty.boosted_channels(distinct[:, order], 3), kitty.boosted_channels(distinct, 3)[:, order]
    )  # moved with the channels


def test_kitty_boost_lowers_the_error_of_every_page():
    pages = side(8, 64, 128) * torch.rand(8, 64, 1, generator=torch.Generator().manual_seed(1)) * 4
    errors = [(kitty.page_codes(pages, n).values() - pages).square().mean((1, 2)) for n in (0, 8, 16)]
    assert (errors[1] < errors[0]).all() and (errors[2] < errors[1]).all()


LAYERS: dict[str, Callable[[], LayerCache]] = {
    "kivi": lambda: kivi.layer(2, 2),
    "kitty": lambda: kitty.layer(16),
    "kitty simulator": lambda: kitty.layer(12, simulator=True),
    "kvmix": lambda: kvmix.layer(2, 2),
    "kvmix 3": lambda: kvmix.layer(3, 4),
    "xquant": lambda: xquant.scheme(xquant.Setting(0, 2, 9, 9), None).layer(0),
    "patternkv": lambda: patternkv.layer(128),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_a_head_is_quantized_alone_as_among_others(make: Callable[[], LayerCache]):
    together = fed(make(), 400, heads=3)
    x = side(3, 400, 128)
    for head in range(3):
        alone = make()
        alone.attend(x[head, None], x[head, None], x[head, None] + 1)
        for ours, theirs in ((alone.k, together.k), (alone.v, together.v)):
            assert ours.quantized and torch.equal(ours.tokens[0], theirs.tokens[head])


@pytest.mark.parametrize("name", ["kivi", "kitty", "xquant"])
def test_what_is_quantized_depends_on_the_length_alone(name: str):
    """A prompt at once, and the same tokens one by one: not so in KVmix, whose window remembers."""
    x, at_once, stepwise = side(2, 420, 128), LAYERS[name](), LAYERS[name]()
    at_once.attend(x, x, x)
    for piece in (x[:, :50], *x[:, 50:].split(1, dim=1)):
        stepwise.attend(piece, piece, piece)
    assert counts(at_once) == counts(stepwise)
    assert torch.equal(at_once.k.tokens, stepwise.k.tokens) and torch.equal(at_once.v.tokens, stepwise.v.tokens)


def test_groups_lie_along_tokens_or_channels():
    x = torch.arange(2 * 4 * 6.0).view(2, 4, 6)

    def means(groups: Tensor) -> Tensor:
        return groups.mean(-1, keepdim=True).expand_as(groups)

    assert by_channel(means, 2)(x)[0, :, 0].tolist() == [3, 3, 15, 15]
    assert by_token(means, 3)(x)[0, 0].tolist() == [1, 1, 1, 4, 4, 4]


# ---- the pages


def narrow_rung(preset: KVConfig, shape: str) -> Rung:
    """The rung of ``preset`` that blocks step down to, in a model of this shape."""
    config = config_from_hf(SHAPES[shape])
    sizes = {"num_layers": config.num_layers, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    return build_ladder(preset, **sizes, dtype=torch.bfloat16).narrowest


def page_rows(page: str) -> list[list[str]]:
    lines = (Path(__file__).parents[2] / f"docs/schemes/{page}.md").read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_page_of_kivi_states_the_bytes_of_the_ladder():
    rows = [row for row in page_rows("kivi") if row[0].startswith("`kivi-") and "+" in row[1]]
    assert len(rows) == 8
    for name, sides, *cells in rows:
        bits = [int(digit) for digit in re.findall(r"[24]", name.replace("-g32", ""))]
        preset = kivi.scheme(bits[0], bits[-1], 32 if "-g32" in name else 128).preset
        demo, large = narrow_rung(preset, "demo"), narrow_rung(preset, "qwen3-8b")
        assert sides == " + ".join(f"{side.nbytes:,}" for side in demo.layout.sides[:2])
        found = [f"{demo.token_nbytes:,.0f}", f"{demo.effective_bits:.2f}"]
        assert cells[:4] == [*found, f"{large.token_nbytes:,.0f}", f"{large.effective_bits:.3f}"]


def test_page_of_kvmix_states_the_bytes_of_the_ladder():
    rows = [row for row in page_rows("kvmix") if row[0].split(",")[0] in SHAPES]
    assert len(rows) == 3
    for described, num_high, nbytes, bits in rows:
        shape, num_layers = described.split(",")[0], int(re.search(r"(\d+) layers", described)[1])
        high = kvmix.top_layers(range(num_layers), range(num_layers))
        rung = narrow_rung(kvmix.scheme(high, num_layers).preset, shape)
        assert num_high == str(len(high.k)) == str(len(high.v))
        assert [nbytes, bits] == [f"{rung.token_nbytes:,.0f}", f"{rung.effective_bits:.3f}"]


def test_page_of_xquant_states_the_bytes_of_the_ladder():
    rows = [row for row in page_rows("xquant") if len(row) == 7 and row[0].startswith("`xquant")]
    assert len(rows) == 6
    for name, *cells in rows:
        for shape, found in (("demo", cells[:3]), ("mistral-7b", cells[3:])):
            rung = narrow_rung(PRESETS[name.strip("`")], shape)
            code_bits = f"{8 * rung.codes_nbytes / rung.num_elements:.7g}"
            assert found == [code_bits, f"{rung.effective_bits:.3f}", f"{rung.token_nbytes:,.0f}"]


def test_page_of_kvmix_has_the_table_of_three_bits():
    """Its bits; the errors are those of more values."""
    found = {(row[0], row[1]): row[2:4] for row in page_rows("kvmix") if row[0].startswith(("11 in", "plain"))}
    assert found == {(cells[0], cells[1]): cells[2:4] for cells in table(2**12).cells}


# ---- the command


def test_the_simulated_sequence_is_the_engines_in_full_precision(demo_engine: Engine):
    prompt = demo_engine.tokenizer.encode("<|im_start|>user\nWhat is 512+49?<|im_end|>\n<|im_start|>assistant\n")
    params = SamplingParams(temperature=0.0, max_tokens=80)
    expected = demo_engine.generate([prompt], params)[0].outputs[0].token_ids
    layers = [LayerCache(full_precision(), full_precision()) for _ in range(8)]
    with demo_model() as (model, tokenizer):
        found = generate(model, layers, prompt, 80, {tokenizer.eos_token_id})
    assert found == [token for token in expected if token != demo_engine.tokenizer.eos_token_id]
    assert 40 < len(found) < 80


def test_schemes_are_asked_side_by_side_with_their_blocks(capsys: pytest.CaptureFixture[str]):
    words = ["--scheme", "fp16,kivi-2", "--task", "ledger:2", "--samples", "1", "-o", "json"]
    assert main(words) == 0
    captured = capsys.readouterr()
    rows = json.loads(captured.out)
    assert [row["scheme"] for row in rows] == ["fp16", "kivi-2"]
    assert rows[0]["right"] == rows[0]["preset_right"] == 1
    assert rows[1]["preset"] == "k2v2-g32" and rows[0]["full_k"] > 60
    assert "ledger 2: 1 of 1" in captured.err


def test_unknown_schemes_and_tasks_are_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as leaving:
        main(["--scheme", "kivi-3"])
    said = capsys.readouterr().err
    assert leaving.value.code == 2 and all(name in said for name in SCHEMES)
    assert main(["--scheme", "fp16", "--task", "juggling"]) == 2
    assert "not a task" in capsys.readouterr().err
