"""``qkv-engine bench`` over the fake engine: exit codes, streams, files; and once over the real one."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qkv_engine.cli import bench
from qkv_engine.cli.main import main
from qkv_engine.errors import CapacityError, ConfigError
from qkv_engine.models.shapes import SHAPES

from .fake import FakeEngine

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from qkv_engine.cli import bench
from qkv_engine.cli.main import main
from tests.bench.fake import FakeEngine
bench._open_engine = lambda args, plan, kv: FakeEngine()
sys.exit(main(["bench", *sys.argv[1:]]))
"""


def use(monkeypatch: pytest.MonkeyPatch, **options: object) -> None:
    monkeypatch.setattr(bench, "_open_engine", lambda args, plan, kv: FakeEngine(**options))


def run_program(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, *words]
    return subprocess.run(command, cwd=ROOT, text=True, stderr=subprocess.PIPE, timeout=60, **options)


def test_rows_go_to_stdout_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch)
    assert main(["bench", "--batch-sweep", "1..4", "--kv", "bf16, fp32", "--repeats", "1", "-o", "json"]) == 0
    out, err = capsys.readouterr()
    assert [(row["kv"], row["batch"]) for row in json.loads(out)] == [
        *(("bf16", 1), ("bf16", 2), ("bf16", 4)),
        *(("fp32", 1), ("fp32", 2), ("fp32", 4)),
    ]
    assert err.splitlines() == [
        f"qkv-engine: {i} of 6: {kv}, batch {batch}"
        for i, (kv, batch) in enumerate([(kv, batch) for kv in ("bf16", "fp32") for batch in (1, 2, 4)], 1)
    ]


@pytest.mark.parametrize(("words", "batches"), [([], [1]), (["--batch-sweep"], [1, 2, 4, 8, 16, 32])])
def test_default_sizes(
    words: list[str], batches: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch)
    assert main(["bench", *words, "-o", "jsonl"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["batch"] for row in rows] == batches
    assert {(row["input_len"], row["output_len"], row["repeats"], row["model"]) for row in rows} == {
        (128, 128, 3, "demo")
    }


@pytest.mark.parametrize(
    ("raises", "code"),
    [
        ({4: CapacityError("no room")}, 0),
        ({1: CapacityError("no room"), 4: CapacityError("no room")}, 3),
        ({4: RuntimeError("broken")}, 1),
        ({4: KeyboardInterrupt()}, 130),
        ({4: ConfigError("bad")}, 2),
    ],
)
def test_exit_codes_and_the_rows_there_are(
    raises: dict[int, BaseException], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, raises=raises)
    assert main(["bench", "--batch-sweep", "1,4", "-o", "json"]) == code
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == (1 if code in (2, 130) else 2)


def test_interrupted_before_the_first_row_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, raises={1: KeyboardInterrupt()})
    assert main(["bench"]) == 130
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "words",
    [
        ["--batch-sweep", "4..1"],
        ["--kv", "bf17"],
        ["--shape", "llama-9"],
        ["--shape", "demo", "some/model"],
        ["--input-len", "0"],
        ["--kv", ""],
        ["--kv", "bf16,"],
        ["--task", "poetry"],
        ["--task", "ledger:2,lookup:2"],
        ["--task", "ledger", "--shape", "qwen3-0.6b"],
        ["--kv-memory", "0x"],
        ["--output", "/nowhere/at/all.json"],
        ["--output", "/tmp"],
        ["--output", "/proc/x.csv"],
        ["--output", "rows.foo"],
        ["--plot", "speed.gif"],
        ["--plot", "/proc/speed.png"],
        ["--plot", "same.txt", "--output", "same.txt"],
        ["--task", "ledger:2", "--input-len", "16"],
        ["--tasks", "ledger:2", "--output-len", "4"],
        ["--task", "ledger:2", "--tasks", "ledger:2"],
        ["--task", "ledger:2", "--batch-sweep", "max"],
        ["--preset", "kity"],
        ["--preset", "kitty", "--task", "ledger:2"],
        ["--preset", "kitty", "--plot", "/proc/speed.png"],
        ["--memory", "1GiB", "--kv-memory", "1GiB"],
    ],
)
def test_mistakes_are_found_before_anything_runs(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, raises={1: AssertionError("ran")})
    model = [word for word in words if word == "some/model"]
    assert main(["bench", *model, *(word for word in words if word not in model)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1


@pytest.mark.parametrize("option", ["--task", "--tasks"])
def test_an_unknown_task_is_named_by_the_option_it_was_given_by(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", option, "poetry"]) == 2
    assert re.search(rf"error: -*{option[2:]}\b.*not a task", capsys.readouterr().err)


def test_the_last_line_says_what_was_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch)
    rows, plot = tmp_path / "rows.csv", tmp_path / "speed.svg"
    assert main(["bench", "--batch-sweep", "1,4", "--format", "md", "--output", str(rows), "--plot", str(plot)]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == f"qkv-engine: wrote 2 rows to {rows}, a plot to {plot}"
    assert plot.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(("name", "kind"), [("rows.json", "json"), ("rows.csv", "csv"), ("rows", "jsonl")])
def test_output_file_takes_the_form_of_its_suffix(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch)
    assert main(["bench", "-o", "jsonl", "--output", str(tmp_path / name)]) == 0
    text = (tmp_path / name).read_text()
    shown = json.loads(capsys.readouterr().out)
    if kind == "csv":
        assert text.splitlines()[0].split(",") == list(shown)
    else:
        assert json.loads(text) == ([shown] if kind == "json" else shown)


def test_plot_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch)
    assert main(["bench", "--batch-sweep", "1,4", "--plot", str(tmp_path / "speed.png")]) == 0
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    assert "out tok/s" in capsys.readouterr().out


def test_a_plot_without_a_name_is_drawn_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch)
    monkeypatch.chdir(tmp_path)
    words = ["--shape", "qwen3-8b", "--batch-sweep", "--kv", "bf16,int8,int4,kivi-2,auto", "--plot"]
    assert main(["bench", *words]) == 0
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, raises={1: AssertionError("ran")})
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--plot", str(tmp_path / "speed.png")]) == 2
    assert "pip install '.[bench]'" in capsys.readouterr().err


def test_full_file_still_prints_the_rows_and_fails() -> None:
    done = run_program("-o", "json", "--output", "/dev/full", stdout=subprocess.PIPE)
    assert done.returncode == 1
    assert json.loads(done.stdout)[0]["status"] == "ok"
    assert (
        "No space left" in done.stderr
        and "/dev/full" in done.stderr
        and "wrote" not in done.stderr
        and "Traceback" not in done.stderr
    )


@pytest.mark.slow
def test_a_disk_full_while_drawing_loses_no_rows(tmp_path: Path) -> None:
    plot, output = tmp_path / "speed.png", tmp_path / "rows.json"
    plot.symlink_to("/dev/full")
    done = run_program("-o", "json", "--plot", str(plot), "--output", str(output), stdout=subprocess.PIPE)
    assert done.returncode == 1
    assert json.loads(done.stdout)[0]["status"] == json.loads(output.read_text())[0]["status"] == "ok"
    assert "No space left" in done.stderr and "speed.png" in done.stderr and "Traceback" not in done.stderr


def test_full_stdout_still_writes_the_file_and_fails(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = run_program("--output", str(tmp_path / "rows.json"), stdout=full)
    assert done.returncode == 1
    assert "No space left" in done.stderr and "Traceback" not in done.stderr
    assert json.loads((tmp_path / "rows.json").read_text())[0]["status"] == "ok"


def test_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -c '{PROGRAM}' -o csv --batch-sweep | true"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert all(" of 6: auto, batch " in line for line in done.stderr.splitlines())


def test_without_a_stderr_nothing_but_rows_goes_to_stdout(tmp_path: Path) -> None:
    command = f"{sys.executable} -c '{PROGRAM}' -o json --output {tmp_path}/rows.csv 2>&-"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0 and json.loads(done.stdout)[0]["status"] == "ok"


def test_help_is_light() -> None:
    script = (
        "import sys\n"
        "from qkv_engine.cli.main import main\n"
        "try:\n    main(['bench', '--help'])\nexcept SystemExit:\n    pass\n"
        "print({'torch', 'matplotlib', 'rich', 'numpy'} & set(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "set()"
    assert "--batch-sweep" in done.stdout


def test_with_the_real_engine(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--batch-sweep", "1,4", "--input-len", "16", "--output-len", "8", "--repeats", "1", "-o", "json"]
    assert main(["bench", *words, "--kv", "bf16"]) == 0
    one, four = json.loads(capsys.readouterr().out)
    assert (one["batch"], four["batch"], one["status"], four["status"]) == (1, 4, "ok", "ok")
    assert (one["model"], one["device"], one["kv"], one["effective_bits"]) == ("demo", "cpu", "bf16", 16.0)
    for row in (one, four):
        assert row["output_tok_s"] > 0 and row["ttft_ms"] > 0 and row["itl_p99_ms"] >= row["itl_ms"] > 0
        assert row["decode_tok_s"] > 0 and row["total_tok_s"] == pytest.approx(3 * row["output_tok_s"], rel=1e-4)
        split = row["kv_bytes_codes"] + row["kv_bytes_meta"] + row["kv_bytes_dense"]
        assert 0 < split == row["kv_bytes_peak"] <= row["kv_bytes_total"]
    assert four["kv_bytes_peak"] == 4 * one["kv_bytes_peak"]


def test_too_little_memory_with_the_real_engine(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--kv-memory", "1000", "--batch-sweep", "1,2", "--kv", "bf16,fp32", "-o", "json"]
    assert main(["bench", *words]) == 3
    rows = json.loads(capsys.readouterr().out)
    assert [row["status"] for row in rows] == ["does not fit"] * 4
    assert all(row["detail"].startswith("--kv-memory=") for row in rows)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--input-len", "9000", "--output-len", "8"], "--input-len + --output-len=9008"),
        (["--max-model-len", "9001"], "--max-model-len=9001"),
        (["--task", "ledger:800"], "--task="),
    ],
)
def test_too_long_a_context_is_named_by_what_asked_for_it(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    assert f"error: {named}" in (err := capsys.readouterr().err) and "the model was made for 8192 tokens" in err


def test_questions_too_long_fail_in_words_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--task", "ledger:20", "--max-model-len", "100", "-o", "json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert row["status"] == "failed" and row["detail"].startswith("--max-model-len=100: the prompt has")


@pytest.mark.slow
def test_more_requests_than_fit_at_16_bits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--task", "ledger:12", "--batch-sweep", "5", "--kv", "bf16,auto", "--kv-memory", "3x"]
    assert main(["bench", *words, "-o", "json"]) == 0
    wide, auto = json.loads(capsys.readouterr().out)
    assert (wide["task"], wide["repeats"], wide["batch"], wide["max_running"]) == ("ledger 12", 1, 5, 3)
    assert wide["kv_bytes_total"] == auto["kv_bytes_total"] and wide["input_len"] == auto["input_len"] > 100
    assert [row["finished"] for row in (wide, auto)] == [row["right"] for row in (wide, auto)] == [5, 5]
    assert (wide["status"], wide["demotions"], wide["effective_bits"]) == ("queued", 0, 16)
    assert auto["max_running"] > 3 and auto["demotions"] > 0 and auto["effective_bits"] < 16
    assert wide["preemptions"] == auto["preemptions"] == 0 and auto["same"] <= 5


def test_random_weights_of_a_shape(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(SHAPES, "tiny", SHAPES["demo"] | {"num_hidden_layers": 1})
    words = ["--shape", "tiny", "--input-len", "4", "--output-len", "2", "--repeats", "1", "--warmup", "0"]
    assert main(["bench", *words, "--dtype", "float32", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["model"] == "tiny"


def test_the_demo_shape_is_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--shape", "demo", "--task", "addition:2", "-o", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["model"], row["right"]) == ("demo", 1)


def test_the_largest_batch_runs_at_once_and_one_more_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--batch-sweep", "max", "--input-len", "400", "--output-len", "20", "--repeats", "1", "--warmup", "0"]
    assert main(["bench", *words, "--kv", "bf16,int4", "--kv-memory", "3x", "-o", "json"]) == 0
    wide, narrow = json.loads(capsys.readouterr().out)
    assert (wide["batch"], wide["status"]) == (3, "ok")
    assert narrow["batch"] > 3 and (narrow["status"], narrow["preemptions"]) == ("ok", 0)
    words[1] = f"{narrow['batch'] + 1}"
    assert main(["bench", *words, "--kv", "int4", "--kv-memory", "3x", "-o", "json"]) == 0
    (more,) = json.loads(capsys.readouterr().out)
    assert (more["status"], more["max_running"]) == ("queued", narrow["batch"])
