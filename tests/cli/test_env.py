"""``env``: versions, and capacities that agree with what the engine allocates."""

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qkv_engine import Engine, __version__
from qkv_engine.bench.provenance import cpu_name
from qkv_engine.cli import env, main
from qkv_engine.device import memory


def facts(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main.main(["env", *words, "-o", "json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_capacity_is_what_the_engine_says(capsys: pytest.CaptureFixture[str], demo_engine: Engine):
    found = facts(capsys, "--kv", "fp32", "--kv-memory", "256MiB")
    stats = demo_engine.stats()
    assert found["kv"]["memory_bytes"] == stats.kv_bytes_total
    assert found["kv"]["rungs"][0]["capacity_tokens"] == stats.kv_tokens_capacity
    assert found["kv"]["rungs"][0]["effective_bits"] == stats.effective_bits
    assert (found["model"]["name"], found["model"]["dtype"]) == (stats.model, stats.dtype)
    assert found["model"]["context_tokens"] == stats.max_model_len


@pytest.mark.parametrize("kv", ["auto", "kivi-2"])
def test_the_ladder_is_the_engines(kv: str, capsys: pytest.CaptureFixture[str]):
    found = facts(capsys, "--kv", kv, "--kv-memory", "40MiB")["kv"]
    with Engine(kv=kv, kv_memory="40MiB") as engine:
        stats = engine.stats()
    assert found["reserve_bytes"] == stats.kv_bytes_reserve > 0
    first, last = found["rungs"][0], found["rungs"][-1]
    assert (first["capacity_tokens"], last["capacity_tokens"]) == (stats.kv_tokens_capacity, stats.kv_tokens_floor)
    assert (first["rung"], first["k"], first["bytes_per_token"], first["effective_bits"]) == (
        *("dense16", "layers 0-7: dense16"),
        *(8192, 16),
    )
    bits = {"auto": 4, "kivi-2": 2}[kv]
    assert (last["k"], last["v"]) == (f"layers 0-7: int{bits}-channel-128", f"layers 0-7: int{bits}-token-128")
    assert last["effective_bits"] == bits + 0.25 + 8 * 256 / (4 * 128 * 128)  # tops of K and V padded to 128 bytes each
    assert last["bytes_per_token"] == last["block_bytes"] / 128 == last["effective_bits"] * 8192 / 16
    policy, sink, recent = {"auto": ("pressure", 32, 0), "kivi-2": ("eager", 0, 128)}[kv]
    assert (found["policy"].split(":")[0], found["sink_tokens"], found["recent_tokens"]) == (policy, sink, recent)
    assert found["recent_ratio"] == 0


def test_layers_alike_are_named_together():
    assert env.by_layers(["a"] * 3 + ["b"] + ["a"] * 2) == "layers 0-2, 4-5: a, layer 3: b"
    assert env.by_layers([*"aababab", "c"]) == "layers 0-1: a, layers 2-6: b, a by turns, layer 7: c"
    assert env.by_layers(["a"]) == "layer 0: a" and env.by_layers([*"ab"]) == "layer 0: a, layer 1: b"


def test_code_bits_and_all_bits(capsys: pytest.CaptureFixture[str]):
    """Codes that two layers share count once; a token is 2 sides x 8 layers x 2 heads x 128."""
    found = facts(capsys, "--kv", "xquant")["kv"]["rungs"]
    assert [rung["code_bits"] for rung in found] == [16, 1.375]
    assert found[1]["effective_bits"] == 8 * found[1]["bytes_per_token"] / 4096 == 1.65625
    assert found[1]["v"].endswith("layers 5-7: int1-token-128-eta0.2-subordinate, int1-token-128-eta0.2 by turns")


def test_versions(capsys: pytest.CaptureFixture[str]):
    versions = facts(capsys)["versions"]
    assert versions["qkv-engine"] == __version__ and versions["python"] == sys.version.split()[0]
    assert versions["torch"][0].isdigit()


def with_free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: nbytes)


def test_a_shape_needs_no_weights(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    with_free(monkeypatch, 2**36)
    words = ("--kv", "bf16", "--kv-memory", "20GiB", "--dtype", "bfloat16", "--device", "cpu")
    found = facts(capsys, "llama-3.1-8b", *words)
    assert found["model"]["parameters"] == 8_030_261_248
    assert found["kv"]["rungs"][0]["bytes_per_token"] == 131072
    assert found["kv"]["rungs"][0]["capacity_tokens"] == 163840
    assert found["model"]["does_not_fit"] is None


def test_windows_are_counted_in_groups_and_requests(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Gemma 3 12B at 16 bits: 8 layers that see all, and 40 with a window of 1,024 tokens, which are 9 blocks."""
    with_free(monkeypatch, 2**37)
    words = (
        "--kv",
        "bf16",
        "--kv-memory",
        "40GiB",
        "--max-model-len",
        "32768",
        "--device",
        "cpu",
        "--dtype",
        "bfloat16",
    )
    found = facts(capsys, "gemma-3-12b", *words)["kv"]
    assert [(group["window"], group["most_blocks"]) for group in found["groups"]] == [(1024, 9), ("all", "any")]
    window, full = (group["block_bytes"] for group in found["groups"])
    assert (window, full) == (40 * 2**20, 8 * 2**20) and found["rungs"][0]["block_bytes"] == 48 * 2**20
    one = 256 * full + 9 * window
    assert 40 * 2**30 // one - 1 <= found["rungs"][0]["capacity_requests"] <= 40 * 2**30 // one


def test_states_of_a_hybrid_are_counted(capsys, monkeypatch):
    with_free(monkeypatch, 2**37)
    words = (
        "--kv",
        "bf16",
        "--kv-memory",
        "40GiB",
        "--max-model-len",
        "32768",
        "--device",
        "cpu",
        "--dtype",
        "bfloat16",
    )
    whole, half = (facts(capsys, "qwen3.5-27b", *words, "--tp", size)["kv"] for size in ("1", "2"))
    assert whole["request_state_bytes"] == 153_944_064 == 2 * half["request_state_bytes"]
    one = whole["request_state_bytes"] + 256 * whole["rungs"][0]["block_bytes"]
    assert whole["rungs"][0]["capacity_requests"] == 40 * 2**30 // one
    assert half["rungs"][0]["capacity_requests"] == 2 * 40 * 2**30 // one
    no_state = 40 * 2**30 // whole["rungs"][0]["block_bytes"] * 128
    assert whole["rungs"][0]["capacity_tokens"] < no_state - 128


@pytest.mark.parametrize(
    ("free", "reason"),
    [
        (8 * 2**30, "weights need 15.0 GiB, 8.0 GiB are free"),
        (20 * 2**30, "KV memory of 20.0 GiB, 5.0 GiB are free beside the weights"),
    ],
)
def test_what_does_not_fit_is_said_and_is_the_exit_code(
    free: int, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    with_free(monkeypatch, free)
    words = ["--kv", "bf16", "--kv-memory", "20GiB", "--dtype", "bfloat16", "--device", "cpu"]
    assert main.main(["env", "llama-3.1-8b", *words]) == 3
    out, err = capsys.readouterr()
    assert re.search(rf"does not fit +{reason}\n", out) and "163,840" in out
    assert err == f"qkv-engine: llama-3.1-8b does not fit here: {reason}\n"


def test_memory_without_room_for_a_block_holds_nothing(capsys: pytest.CaptureFixture[str]):
    assert main.main(["env", "--kv-memory", "1000", "-o", "json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert "--kv-memory='1000 B': no room for one block" in found["model"]["does_not_fit"]
    assert [rung["capacity_tokens"] for rung in found["kv"]["rungs"]] == [0, 0, 0]


def test_a_share_of_what_weights_leave_nothing_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    with_free(monkeypatch, 2**20)
    assert main.main(["env", "--kv-memory", "1%", "-o", "json"]) == 3
    assert "weights need" in json.loads(capsys.readouterr().out)["model"]["does_not_fit"]


def test_a_share_of_memory_is_of_what_the_weights_leave(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    with_free(monkeypatch, 2**30)
    found = facts(capsys, "--kv-memory", "50%")
    assert found["kv"]["memory_bytes"] == (2**30 - found["model"]["weights_bytes"]) // 2


def test_the_table_lines_up_and_has_no_codes(capsys: pytest.CaptureFixture[str]):
    assert main.main(["env"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "\x1b" not in out and all(line == line.rstrip() for line in lines)
    rungs = next(i for i, line in enumerate(lines) if "bytes per token" in line)
    assert [line.split()[0] for line in lines[rungs:]] == ["rung", lines[rungs + 1], "dense16", "int8", "int4"]
    values = [line for line in lines[:rungs] if line.startswith("  ")]
    assert len({len(line) - len(line[2:].split("  ", 1)[1].lstrip()) for line in values}) == 1
    for label, value in (
        ("product", re.escape(cpu_name())),
        ("threads", r"\d+ \((a short step is faster so|PyTorch's number)\)"),
        ("cpus", r"\d+"),
        ("weights", "29.5 MiB"),
    ):
        assert re.search(rf"^  {label} +{value}$", out, re.MULTILINE)


@pytest.mark.parametrize("width", [120, 80, 60, 40])
def test_capacities_are_whole_at_any_width(width: int, monkeypatch: pytest.MonkeyPatch):
    args = main.build_parser().parse_args(["env", "--kv-memory", "4GiB"])
    found = {"versions": env._versions(), **env._capacity(args)}
    text = env._render(found, "table", width)
    assert all(len(line) <= width for line in text.splitlines()) and "…" not in text
    for name, tokens in (("dense16", "521,376"), ("int8", "1,006,240"), ("int4", "1,945,248")):
        assert any(line.startswith(name) and line.endswith(tokens) for line in text.splitlines())
    gone = {
        120: "",
        80: "1 more column: block",
        60: "3 more columns: block, code bits, bits",
        40: "5 more columns: k, v, block, code bits, bits",
    }[width]
    assert gone in " ".join(text.split()) and ("wider" in text) == bool(gone)


def test_markdown_and_csv(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / "env.csv"
    assert main.main(["env", "--kv", "int4", "-o", "md", "--output", str(file)]) == 0
    out, err = capsys.readouterr()
    assert err == f"qkv-engine: wrote facts to {file}\n"
    rows = {(row["section"], row["name"]): row["value"] for row in csv.DictReader(io.StringIO(file.read_text()))}
    assert rows["versions", "qkv-engine"] == __version__ and rows["kv.int4", "bytes_per_token"] == "2192.0"
    assert re.search(rf"\| versions +\| qkv-engine +\| {__version__} +\|", out)
    assert re.search(r"\| int4 +\| layers 0-7: int4-channel-128 \|", out)


def test_the_help_explains_the_rows(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main.main(["env", "--help"])
    out = capsys.readouterr().out
    assert all(
        f"  {name}" in out
        for name in ("admission", "capacity tokens", "code bits", "bits", "k, v", "sink, recent tokens")
    )


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--kv", "nope"], 2, "unknown KV preset"),
        (["--dtype", "int3"], 2, "dtype='int3'"),
        (["--device", "tpu"], 2, "device='tpu'"),
        (["--kv-memory", "lots"], 2, "--kv-memory='lots'"),
        (["--kv-memory", "8x"], 2, "unknown unit"),
        (
            ["--max-model-len", "8193"],
            2,
            "made for 8192 tokens. Use at most 8192, or ask for a longer context with --ext",
        ),
        (["--output", "env.foo"], 2, ".foo is no known form"),
    ],
)
def test_wrong_options(words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]):
    assert main.main(["env", *words]) == code
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chat", "nope", "-p", "x"], "MODEL='nope': there is no such folder"),
        (["chat", __file__, "-p", "x"], "is a file"),
        (["chat", "--kv", "nope", "-p", "x"], "--kv='nope': unknown KV preset"),
        (["env", "nope"], "MODEL='nope': there is no such folder"),
        (["bench", "nope"], "MODEL='nope': there is no such folder"),
    ],
)
def test_a_wrong_word_is_wrong_usage_whatever_it_stands_for(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main.main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def test_a_longer_context_is_there_for_the_asking(capsys: pytest.CaptureFixture[str]):
    assert facts(capsys, "--max-model-len", "8193", "--extend-context")["model"]["context_tokens"] == 8193


def test_missing_libraries_are_said_to_be_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(env, "_PACKAGES", ("no-such-library",))
    assert env._versions()["no-such-library"] == "not installed"


def test_the_demo_model_answers_as_a_program():
    words = [sys.executable, "-m", "qkv_engine.cli.main", "chat", "--prompt", "What is 47*86?"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "4042\n", "")
