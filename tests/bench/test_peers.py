"""The comparison with other engines: exact ratios from made-up runs, and a small real one."""

import json
import sys

import pytest

from qkv_engine.bench import peers
from qkv_engine.bench.peers import Generation, Plan, compare, main, measure, peer_table
from qkv_engine.bench.timing import Timeline
from qkv_engine.errors import QKVError

PLAN = Plan(peer="hf", batches=(2,), input_len=3, output_len=5, repeats=3, warmup=1)


def generator(step: float, token: int = 7, calls: list[str] | None = None, name: str = "") -> peers.Generate:
    """Tokens in step, ``step`` seconds apart."""

    def generate(prompts: list[list[int]], output_len: int) -> Generation:
        if calls is not None:
            calls.append(name)
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


def prompts(batch: int, draw: str) -> list[list[int]]:
    return [[1, 2, 3]] * batch


def test_ratio_against_the_fastest_way_of_the_peer() -> None:
    ways = {"slow": generator(0.25), "fast": generator(0.125)}
    row = next(compare(PLAN, ways, {"bf16": generator(0.0625)}, prompts))
    assert (row.variant, row.kv, row.batch, row.repeats) == ("fast", "bf16", 2, 3)
    assert (row.peer_decode_tok_s, row.decode_tok_s, row.decode_ratio) == (16.0, 32.0, 2.0)
    assert row.decode_tok_s_min == row.decode_tok_s_max == 32.0
    assert row.differing == 0
    assert "transformers" in row.versions and row.machine


def test_runs_take_turns_after_a_warm_up_of_everything() -> None:
    calls: list[str] = []
    ways = {name: generator(step, calls=calls, name=name) for name, step in (("a", 0.5), ("b", 0.25))}
    ours = {kv: generator(0.125, calls=calls, name=kv) for kv in ("x", "y")}
    assert len(list(compare(PLAN, ways, ours, prompts))) == 2
    assert calls == ["x", "y", "a", "b"] + ["b", "x", "y"] * 3


def test_rows_that_differ_are_counted() -> None:
    row = next(compare(PLAN, {"only": generator(0.1, token=8)}, {"bf16": generator(0.1)}, prompts))
    assert row.differing == 2
    assert peer_table([row]).cells[0][-2:] == ["2", "only"]


def test_incomplete_runs_are_refused() -> None:
    with pytest.raises(QKVError, match="4 tokens"):
        measure(lambda some, length: generator(0.1)(some, 3), prompts(1, ""), 4)
    with pytest.raises(QKVError, match="output length"):
        measure(generator(0.1), prompts(1, ""), 1)


@pytest.mark.parametrize("words", [["--repeats", "0"], ["--output-len", "1"], ["--dtype", "int4"]])
def test_mistakes(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["hf", *words])
    assert ended.value.code == 2


def test_a_missing_peer_is_a_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["hf", "--batch", "1"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "pip install transformers" in err and len(err.splitlines()) == 1


def test_an_interrupt_prints_the_rows_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*ignored: object) -> object:
        yield from compare(PLAN, {"only": generator(0.1)}, {"bf16": generator(0.1)}, prompts)
        raise KeyboardInterrupt

    monkeypatch.setattr(peers, "compare", interrupted)
    monkeypatch.setitem(peers.PEERS, "hf", peers.Peer("transformers", lambda setup: {}))
    assert main(["hf", "--batch", "2", "-o", "json"]) == 130
    assert len(json.loads(capsys.readouterr().out)) == 1


def test_hugging_face_gives_the_same_greedy_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--kv", "fp32", "--batch", "1,3", "--input-len", "9", "--output-len", "12", "--repeats", "1"]
    assert main(["hf", *words, "--warmup", "1", "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["batch"], row["differing"]) for row in rows] == [(1, 0), (3, 0)]
    assert all(row["decode_ratio"] > 0 and row["output_ratio"] > 0 for row in rows)
