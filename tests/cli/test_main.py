"""The command line as a program: exit codes, what goes to which stream, and what is imported."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qkv_engine import __version__
from qkv_engine.cli import common, main

from .fake_engine import open_fake

PROGRAM = [sys.executable, str(Path(__file__).with_name("fake_engine.py"))]


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "open_engine", open_fake)


@pytest.fixture(autouse=True)
def _log_as_before():
    logger = logging.getLogger("qkv_engine")
    before = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate, logger.level = before


def chat(*words: str) -> int:
    return main.main(["chat", *words])


def program(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *words], capture_output=True, text=True, timeout=60, check=False, **options)


def test_help_and_version_import_nothing_heavy():
    heavy = "torch", "rich", "prompt_toolkit", "huggingface_hub", "tokenizers", "triton", "msgspec", "asyncio"
    code = f"""
import sys
from qkv_engine.cli import main
for words in (["--version"], ["--help"]):
    try:
        main.main(words)
    except SystemExit as end:
        assert end.code == 0
assert not set({heavy}) & set(sys.modules), set({heavy}) & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f"qkv-engine {__version__}" in done.stdout
    assert all(name in done.stdout for name in main.COMMANDS)


def test_chat_help_needs_no_torch():
    code = """
import sys
from qkv_engine.cli import main
try:
    main.main(["chat", "--help"])
except SystemExit:
    pass
assert not {"torch", "rich", "prompt_toolkit"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "--kv-memory" in done.stdout


def test_prompt_prints_the_answer_and_nothing_else(capsys: pytest.CaptureFixture[str]):
    assert chat("--prompt", "What is 47*86?") == 0
    assert capsys.readouterr() == ("4042\n", "")


def test_stats_go_to_stderr(capsys: pytest.CaptureFixture[str]):
    assert chat("--prompt", "What is 47*86?", "--stats") == 0
    out, err = capsys.readouterr()
    assert out == "4042\n" and err.count("\n") == 1 and "tok/s" in err


def test_prompt_from_stdin_and_each_line_a_turn():
    assert program("chat", "--prompt", "-", input="two\nlines\n").stdout == "echo: two\nlines\n"
    done = program("chat", input="one\n\nWhat is 47*86?\n/help\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "echo: one\n4042\necho: /help\n", "")


def test_thinking_in_a_pipe_only_on_request(capsys: pytest.CaptureFixture[str]):
    assert chat("--prompt", "What is 47*86?", "--think") == 0
    assert capsys.readouterr().out.startswith("<think>\n47*80")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["huge", "--prompt", "x"], 3, "max_model_len=8192: holds 12 tokens"),
        (["bug", "--prompt", "x"], 1, "TypeError: oops"),
        (["--prompt", "fail"], 1, "top_k=-5: out of range"),
        (["--prompt", "die"], 1, "the engine stopped"),
        (["--prompt", " "], 2, "nothing to answer"),
        (["--prompt", "x", "--temperature", "-1"], 2, "temperature=-1.0: out of range"),
    ],
)
def test_an_error_is_one_line_and_a_code(words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]):
    assert chat(*words) == code
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("qkv-engine: error: ") and message in err


@pytest.mark.parametrize(
    "words", [[], ["nonsense"], ["chat", "--temperature", "hot"], ["chat", "--think", "--no-think"]]
)
def test_wrong_usage_is_code_2(words: list[str]):
    with pytest.raises(SystemExit) as end:
        main.main(words)
    assert end.value.code == 2


def test_debug_shows_the_traceback():
    done = program("chat", "bug", "--prompt", "x", "--debug")
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_a_closed_pipe_and_a_full_disk_are_no_traceback():
    reader = subprocess.Popen([*PROGRAM, "chat", "--prompt", "slow"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert reader.stdout is not None and reader.stderr is not None
    reader.stdout.read(8)
    reader.stdout.close()
    assert reader.wait(30) == 1 and reader.stderr.read() == b""
    reader.stderr.close()
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [*PROGRAM, "chat", "--prompt", "x"],
                stdout=full,
                stderr=subprocess.PIPE,
                timeout=60,
                check=False,
            )
        assert done.returncode == 1 and done.stderr.count(b"\n") == 1 and b"No space" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_a_one_shot_answer(number: signal.Signals, code: int):
    child = subprocess.Popen([*PROGRAM, "chat", "--prompt", "slow"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read(4)
    child.send_signal(number)
    _, err = child.communicate(timeout=30)
    assert (child.returncode, err) == (code, b"")


def test_logged_text_stays_on_its_line(capsys: pytest.CaptureFixture[str]):
    assert chat("-v", "--prompt", "x") == 0
    logging.getLogger("qkv_engine").info("a\nqkv-engine: error: %s", "forged\x1b[2J")
    assert capsys.readouterr().err == "qkv-engine: info: a qkv-engine: error: forged[2J\n"


def test_ctrl_c_while_torch_loads_comes_when_it_has_loaded():
    finished = False
    with pytest.raises(KeyboardInterrupt), common.interrupt_later():
        signal.raise_signal(signal.SIGINT)
        finished = True
    assert finished and signal.getsignal(signal.SIGINT) is signal.default_int_handler
