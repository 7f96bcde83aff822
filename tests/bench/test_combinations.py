"""Every pair of the options of ``bench`` that choose what is measured works, or is refused with both names."""

import json
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pytest

from qkv_engine.bench.runs import greedy
from qkv_engine.bench.sampled import Samples
from qkv_engine.cli import bench
from qkv_engine.cli.bench import arrivals as bench_arrivals
from qkv_engine.cli.main import main
from qkv_engine.request import RequestOutput, SamplingParams

from .answering import demo_tokenizer
from .fake import FakeEngine
from .test_arrivals import StreamingFake

OPTIONS = {
    "--preset": "kitty",
    "--sampled": None,
    "--eval": "addition:2",
    "--samples": "2",
    "--pareto": None,
    "--arrivals": "inf",
    "--requests": "2",
    "--trace": "x.jsonl",
    "--goodput": "ttft:1000",
    "--memory": "512MiB",
    "--kv-memory": "4x",
    "--task": "addition:2",
    "--tasks": "addition:2",
    "--batch-sweep": "2",
    "--input-len": "600",
    "--output-len": "40",
    "--repeats": "1",
    "--warmup": "0",
    "--threshold": "5%",
    "--fail-on-regression": None,
}
OF_ARRIVALS = {"--requests", "--trace", "--goodput"}
OF_COMPARISON = {"--threshold", "--fail-on-regression"}
REFUSED = {
    "--arrivals": {"--preset", "--sampled", "--eval", "--samples", "--pareto", "--batch-sweep", "--repeats"},
    "--trace": {"--task", "--tasks", "--input-len", "--output-len"},
    "--memory": {"--kv-memory"},
    "--pareto": {"--preset"},
    "--task": {"--tasks", "--input-len", "--output-len", "--preset", "--sampled", "--eval", "--pareto"},
    "--tasks": {"--input-len", "--output-len", "--preset", "--sampled", "--eval", "--pareto"},
    "--sampled": {"--repeats", "--warmup"},
}
PAIRS = list(combinations(OPTIONS, 2))


def words_of(*options: str) -> list[str]:
    return [word for option in options for word in (option, OPTIONS[option]) if word is not None]


def expected(one: str, other: str) -> str | None:
    """What the message about a pair says, None for a pair that runs."""
    if other in REFUSED.get(one, ()) or one in REFUSED.get(other, ()):
        return "cannot be combined with"
    pair = {one, other}
    if pair & OF_COMPARISON:
        return "needs --compare"
    if pair & OF_ARRIVALS and "--arrivals" not in pair:
        return "needs --arrivals"
    if "--samples" in pair and not pair & {"--eval", "--pareto"}:
        return "needs --eval or --pareto"
    return None


@dataclass
class WordlessEngine(FakeEngine):
    """Answers questions, too, in four tokens without a text."""

    tokenizer: Any = field(default_factory=demo_tokenizer)
    vocab_size: int = 400

    def generate(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[RequestOutput]:
        return super().generate(prompts, params if isinstance(params, SamplingParams) else greedy(4))


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_a_pair_runs_or_is_refused(
    one: str, other: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setattr(bench, "_open_engine", lambda args, plan, kv: WordlessEngine())
    monkeypatch.setattr(Samples, "measure", lambda self, engine, kv, batch: {"max_running": batch, "output_tok_s": 9.0})
    monkeypatch.setattr(bench_arrivals, "_open_engine", lambda args, plan, kv: StreamingFake())
    (tmp_path / "x.jsonl").write_text('{"input_length": 8, "output_length": 4}\n')
    monkeypatch.chdir(tmp_path)
    message = expected(one, other)
    code = main(["bench", *words_of(one, other), "--kv", "bf16", "-o", "json"])
    out, err = capsys.readouterr()
    if message is None:
        assert code == 0 and json.loads(out)
    else:
        assert code == 2 and out == "" and message in err and len(err.splitlines()) == 1
    if message == "cannot be combined with":
        assert {one, other} <= {word.partition("=")[0].rstrip(".:") for word in err.split()}


@pytest.mark.parametrize("option", sorted(set(OPTIONS) - OF_COMPARISON))
def test_a_comparison_measures_nothing(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--compare", "a", "b", *words_of(option)]) == 2
    assert f"error: {option}" in (err := capsys.readouterr().err) and "cannot be combined with --compare" in err


@pytest.mark.parametrize("words", [["--arrivals", "4", "--repeats", "0"], ["--sampled", "--warmup", "0"]])
def test_zero_is_given_too(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert f"{words[-2]}=0: cannot be combined with {words[0]}" in capsys.readouterr().err


def test_the_largest_batch_of_questions_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--task", "addition", "--batch-sweep", "1,max"]) == 2
    assert "--batch-sweep='1,max': max cannot be combined with --task" in capsys.readouterr().err
