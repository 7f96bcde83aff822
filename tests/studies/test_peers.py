"""The comparison with other engines: exact ratios from made-up runs, and a small real one."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest

from qkv_engine.bench.timing import Timeline
from qkv_engine.errors import QKVError
from studies import peers
from studies.contender import Contender, Generate, Generation, Loaded, Run, measure
from studies.peers import Plan, compare, main, peer_table

PLAN = Plan(peer="hf", device="cpu", batches=(2,), input_len=3, output_len=5, repeats=3, warmup=1, seed=0)


def generator(step: float, token: int = 7) -> Generate:
    """Tokens in step, ``step`` seconds apart."""

    def generate(prompts: list[list[int]], output_len: int) -> Generation:
        times = [step * i for i in range(1, output_len + 1)]
        line = Timeline(
            sent=0,
            scheduled=0,
            first_token=times[0],
            last_token=times[-1],
            num_tokens=output_len,
            token_times=times,
        )
        return Generation([[token] * output_len for _ in prompts], [line] * len(prompts))

    return generate


class Here:
    """A contender in this process that writes down its turns."""

    def __init__(self, ways: dict[str, Generate], calls: list | None = None, vocabulary: range = range(9)):
        self._ways, self._calls = ways, [] if calls is None else calls
        self.ways, self.vocabulary = list(ways), list(vocabulary)

    def measure(self, way: str, prompts: list[list[int]], output_len: int) -> Run:
        self._calls.append((way, prompts))
        return measure(self._ways[way], prompts, output_len)


def load_here(seconds: float) -> Loaded:
    return Loaded({"a": generator(seconds)}, [1, 2])


def load_badly(error: Exception) -> Loaded:
    raise error


def load_and_die() -> Loaded:
    import os

    os._exit(7)


def test_ratio_against_the_fastest_way_of_the_peer() -> None:
    peer = Here({"slow": generator(0.25), "fast": generator(0.125)})
    row = next(compare(PLAN, peer, {"bf16": Here({"": generator(0.0625)})}))
    assert (row.variant, row.kv, row.batch, row.repeats) == ("fast", "bf16", 2, 3)
    assert (row.peer_decode_tok_s, row.decode_tok_s, row.decode_ratio) == (16.0, 32.0, 2.0)
    assert row.decode_tok_s_min == row.decode_tok_s_max == 32.0
    assert row.differing == 0
    assert "transformers" in row.versions and "threads" in row.machine


def test_runs_take_turns_on_the_same_prompts_after_a_warm_up_of_everything() -> None:
    calls: list[tuple[str, list[list[int]]]] = []
    peer = Here({"a": generator(0.5), "b": generator(0.25)}, calls, range(5, 9))
    ours = {kv: Here({kv: generator(0.125)}, calls) for kv in ("x", "y")}
    assert len(list(compare(PLAN, peer, ours))) == 2
    assert [way for way, _ in calls] == ["a", "b", "x", "y"] + ["b", "x", "y"] * 3
    rounds = [[prompts for _, prompts in calls[i : i + 3]] for i in (4, 7, 10)]
    assert all(first == second == third for first, second, third in rounds)
    assert rounds[0][0] != rounds[1][0] != rounds[2][0]
    assert {token for _, prompts in calls for prompt in prompts for token in prompt} <= set(range(5, 9))


def test_rows_that_differ_are_counted() -> None:
    row = next(compare(PLAN, Here({"only": generator(0.1, token=8)}), {"bf16": Here({"": generator(0.1)})}))
    assert row.differing == 2
    assert peer_table([row]).cells[0][-2:] == ["2", "only"]


def test_incomplete_runs_are_refused() -> None:
    with pytest.raises(QKVError, match="4 tokens"):
        measure(lambda some, length: generator(0.1)(some, 3), [[1]], 4)
    with pytest.raises(QKVError, match="output length"):
        measure(generator(0.1), [[1]], 1)


def test_a_contender_runs_in_a_process_of_its_own() -> None:
    with Contender(partial(load_here, 0.5)) as contender:
        assert (contender.ways, contender.vocabulary) == (["a"], [1, 2])
        assert contender.measure("a", [[1], [2]], 3).tokens == [[7] * 3] * 2
        with pytest.raises(QKVError, match="output length"):
            contender.measure("a", [[1]], 1)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (partial(load_badly, QKVError("no such model")), "no such model"),
        (partial(load_badly, ValueError("odd")), "ValueError: odd"),
        (load_and_die, "ended with code 7"),
    ],
)
def test_what_fails_there_is_raised_here(load, message: str) -> None:
    with pytest.raises(QKVError, match=message):
        Contender(load)


@pytest.mark.parametrize("words", [["--repeats", "0"], ["--output-len", "1"], ["--dtype", "int4"]])
def test_mistakes(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["hf", *words])
    assert ended.value.code == 2


def test_a_missing_peer_is_a_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('No module named transformers')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["hf", "--batch", "1"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "pip install transformers" in err and len(err.splitlines()) == 1


def test_an_interrupt_prints_the_rows_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*ignored: object) -> object:
        yield from compare(PLAN, Here({"only": generator(0.1)}), {"bf16": Here({"": generator(0.1)})})
        raise KeyboardInterrupt

    monkeypatch.setattr(peers, "run", interrupted)
    assert main(["hf", "--batch", "2", "-o", "json"]) == 130
    assert len(json.loads(capsys.readouterr().out)) == 1


@pytest.mark.slow
def test_hugging_face_gives_the_same_greedy_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--kv", "fp32", "--batch", "1,3", "--input-len", "9", "--output-len", "12", "--repeats", "1"]
    assert main(["hf", *words, "--warmup", "1", "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["batch"], row["differing"]) for row in rows] == [(1, 0), (3, 0)]
    assert all(row["decode_ratio"] > 0 and row["output_ratio"] > 0 for row in rows)


def test_a_shape_is_random_weights_in_their_library_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from qkv_engine.models.shapes import SHAPES

    tiny = SHAPES["demo"] | {"num_hidden_layers": 1, "vocab_size": 64}
    monkeypatch.setitem(SHAPES, "tiny", tiny)
    model = peers._hf_model(peers.Setup("tiny", "float32", "cpu"), "sdpa")
    assert (model.config.num_hidden_layers, model.config.head_dim, model.config.vocab_size) == (1, 128, 64)
    generation = peers._hf_generate(model, {}, [[1, 2, 3]] * 2, 5)
    assert [len(tokens) for tokens in generation.tokens] == [5, 5]
    assert generation.timelines[0].num_tokens == 5


def test_the_quantized_cache_needs_its_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optimum.quanto", None)
    with pytest.raises(ImportError):
        peers.load_hf_quanto(peers.Setup(None, "float32", "cpu"))
