"""Perplexity: how a text is cut, what its figures are, and that the quantized cache is read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from qkv_engine import ConfigError, Engine, SamplingParams
from qkv_engine.bench.grading import sample_examples
from qkv_engine.bench.perplexity import (
    PerplexityPlan,
    PerplexityRow,
    PerplexityText,
    cut,
    measure_perplexity,
    perplexity_table,
)
from qkv_engine.cli.main import main

EXAMPLES = sample_examples("ledger", 16, 2, seed=1)
TEXT = PerplexityText("ledger.txt", "".join(example.chat + example.reply for example in EXAMPLES))


class BosTokenizer:
    """A token a byte, and a BOS token where texts begin."""

    bos_token_id = 300

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [300] * add_special_tokens + list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode()


def rows_of(*kvs: str, **options: Any) -> list[PerplexityRow]:
    plan = PerplexityPlan(**{"model": "demo", "kvs": kvs, "text": TEXT, "context": 400} | options)
    return list(measure_perplexity(plan, lambda kv: Engine(kv=kv, kv_memory="48MiB", prefix_caching=False)))


def test_every_token_behind_the_first_ones_is_scored_once(demo_engine: Engine):
    tokenizer = demo_engine.tokenizer
    ids = tokenizer.encode(TEXT.text)
    pairs, num_bytes = cut(tokenizer, TEXT, context=400, stride=150)
    assert [token for pair in pairs for token in pair.continuation] == ids[250:]
    assert {len(pair.context) for pair in pairs} == {250}
    assert [len(pair.continuation) for pair in pairs[:-1]] == [150] * (len(pairs) - 1)
    assert [pair.ids for pair in pairs] == [ids[start : start + 400] for start in range(0, len(ids) - 250, 150)]
    assert num_bytes == len(tokenizer.decode(ids[250:], False).encode())


def test_windows_begin_with_the_bos_token_of_texts():
    pairs, num_bytes = cut(BosTokenizer(), PerplexityText("t", "abcdefghij"), context=5, stride=2)
    assert [(pair.context[0], bytes(pair.context[1:]), bytes(pair.continuation)) for pair in pairs] == [
        *((300, b"ab", b"cd"), (300, b"cd", b"ef"), (300, b"ef", b"gh"), (300, b"gh", b"ij"))
    ]
    assert num_bytes == 8


def test_figures_are_those_of_the_formula(demo_engine: Engine):
    (row,) = rows_of("fp32")
    pairs, num_bytes = cut(demo_engine.tokenizer, TEXT, context=400, stride=200)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outputs = demo_engine.generate([pair.ids for pair in pairs], params)
    nll = -sum(
        entry[token].logprob
        for pair, output in zip(pairs, outputs, strict=True)
        for token, entry in zip(pair.continuation, output.prompt_logprobs[200:], strict=True)
    )
    tokens = sum(len(pair.continuation) for pair in pairs)
    assert (row.tokens, row.windows, row.context, row.stride, row.status) == (tokens, len(pairs), 400, 200, "ok")
    assert row.nll == pytest.approx(nll / tokens, rel=1e-4)
    assert row.perplexity == pytest.approx(math.exp(row.nll)) and row.perplexity < 100
    assert row.bits_per_byte == pytest.approx(nll / num_bytes / math.log(2), rel=1e-4)
    assert (row.ratio, row.lowest_bits, row.effective_bits, row.demotions) == (1.0, 32, 32, 0)


def test_the_quantized_cache_is_read_and_what_does_not_fit_is_a_row():
    limits = {"bf16": 1024, "kivi-2": 1024, "int4": 300}
    plan = PerplexityPlan(model="demo", kvs=tuple(limits), text=TEXT, context=400)
    wide, narrow, large = measure_perplexity(
        plan, lambda kv: Engine(kv=kv, kv_memory="48MiB", max_model_len=limits[kv], prefix_caching=False)
    )
    assert wide.tokens == narrow.tokens and wide.stride == 200
    assert narrow.lowest_bits == 2 and narrow.demotions and narrow.effective_bits < 16
    assert narrow.ratio == narrow.perplexity / wide.perplexity and abs(narrow.ratio - 1) > 1e-5
    assert (large.status, large.perplexity) == ("does not fit", None) and "smaller context" in large.detail
    table = perplexity_table([wide, narrow, large])
    assert table.headers[:6] == ["kv", "tokens", "nll", "perplexity", "bits/byte", "vs bf16"]
    assert table.title.endswith("windows of 400 tokens, the last 200 scored")
    assert table.notes == [f"int4 does not fit: {large.detail}"]


@pytest.mark.parametrize(
    ("options", "field"),
    [({"stride": 400}, "stride"), ({"stride": 0}, "stride"), ({"context": 1}, "context")],
)
def test_windows_that_cannot_be(options: dict[str, int], field: str):
    with pytest.raises(ConfigError) as caught:
        rows_of("bf16", **options)
    assert caught.value.field == field


def test_the_command_takes_what_the_model_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file, rows = tmp_path / "text.txt", tmp_path / "rows.csv"
    file.write_text(TEXT.text)
    words = ["--perplexity", str(file), "--max-model-len", "301", "--kv", "int4", "--kv-memory", "48MiB"]
    assert main(["eval", *words, "-o", "json", "--output", str(rows)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["kv"], row["text"], row["status"], row["lowest_bits"]) == ("int4", "text.txt", "ok", 4)
    assert (row["context"], row["stride"]) == (300, 150)
    assert len(rows.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (None, [], "cannot be read"),
        (b"", [], "has 0 tokens"),
        (b"too short", ["--context", "400"], "and the first 200 are not scored"),
        (b"caf\xe9", [], "is not UTF-8 at byte 3"),
        (b"x", ["--tasks", "ledger"], "cannot be combined with --perplexity"),
        (b"x", ["--log-samples", "x.jsonl"], "cannot be combined with --perplexity"),
        (b"x", ["--samples", "4"], "--samples=4: cannot be combined with --perplexity"),
        (b"x", ["--lm-eval", "x"], "cannot be combined with --perplexity"),
        (b"x", ["--limit", "3"], "needs --lm-eval"),
    ],
)
def test_mistakes(
    content: bytes | None, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    assert main(["eval", "--perplexity", str(file), "--kv-memory", "48MiB", *words]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_is_no_text_and_windows_need_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["eval", "--perplexity", str(tmp_path)]) == 2
    assert "--perplexity" in (error := capsys.readouterr().err) and "not a regular file" in error
    assert main(["eval", "--context", "400"]) == 2
    assert "--context=400: needs --perplexity" in capsys.readouterr().err
