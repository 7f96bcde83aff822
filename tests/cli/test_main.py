"""The command line as a program: exit codes, what goes to which stream, and what is imported."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qkv_engine import __version__
from qkv_engine.cli import common, main
from qkv_engine.cli.chat import question as chat_question
from qkv_engine.errors import CapacityError, ConfigError, ModelError, QKVError, RequestError
from qkv_engine.presets import PRESETS, preset_families

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
for words in (["--version"], ["--help"], [], ["help"], ["nonsense"]):
    try:
        main.main(words)
    except SystemExit as end:
        assert end.code == 2 * (words == ["nonsense"])
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
    done = program("chat", input="one\n\nWhat is 47*86?\n//help\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "echo: one\n4042\necho: /help\n", "")


def test_piped_text_is_added_to_the_prompt():
    assert program("chat", "-p", "Summarize:", input="a\nb\n").stdout == "echo: Summarize:\n\na\nb\n"
    assert program("chat", "-p", "Summarize:\n", input="").stdout == "echo: Summarize:\n"
    assert program("chat", "-p", "Sum", stdin=subprocess.DEVNULL).stdout == "echo: Sum\n"


def test_who_waits_for_a_silent_pipe_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    reader, writer = os.pipe()
    monkeypatch.setattr(chat_question, "_PATIENCE", 0.05)
    with os.fdopen(reader) as stdin, ThreadPoolExecutor() as pool:
        monkeypatch.setattr(sys, "stdin", stdin)
        question = pool.submit(chat_question.read_question, "Sort:")
        err = ""
        while "waiting for more text on stdin" not in err:
            assert not question.done()
            err += capsys.readouterr().err
            time.sleep(0.01)
        os.write(writer, b" 3 1 2\n")
        os.close(writer)
        assert question.result(10) == "Sort:\n\n3 1 2"


def test_lines_of_a_pipe_may_be_commands(tmp_path: Path):
    path = tmp_path / "chat.json"
    done = program("chat", input=f"/system Be brief.\none\n/Save {path}\n/bye\ntwo\n")
    assert (done.returncode, done.stdout) == (0, "echo: one\n")
    assert done.stderr == f"system prompt: Be brief.\nsaved 1 turn to {path}\n"
    assert '"Be brief."' in path.read_text()
    done = program("chat", input="one\n/nonsense\ntwo\n")
    assert (done.returncode, done.stdout) == (1, "echo: one\n") and "no command /nonsense" in done.stderr


def test_a_reply_that_was_cut_off_says_so_on_stderr(capsys: pytest.CaptureFixture[str]):
    assert chat("-p", "What is 47*86?", "--max-tokens", "12") == 0
    assert capsys.readouterr() == ("\n", "cut off by max_tokens=12 while thinking\n")


@pytest.mark.parametrize(
    ("closed", "code", "out", "err"),
    [
        ("<&-", 0, "echo: hi\n", ""),
        (">&-", 1, "", "qkv-engine: error: stdout is closed. Redirect it to a file, or to /dev/null\n"),
        ("2>&-", 0, "echo: hi\n", ""),
        ("<&- 2>&-", 0, "echo: hi\n", ""),
        ("<&- >&- 2>&-", 1, "", ""),
    ],
)
def test_closed_streams(closed: str, code: int, out: str, err: str):
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", *PROGRAM, "chat", "-p", "hi"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


def test_no_file_takes_the_number_of_a_closed_stream():
    code = "from qkv_engine.cli import common; common.prepare_streams(); print(open('/dev/zero').fileno() > 2)"
    words = ["sh", "-c", 'exec "$@" <&- 2>&-', "sh", sys.executable, "-c", code]
    assert subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=60, check=False).stdout == "True\n"


def test_python_m():
    done = subprocess.run([sys.executable, "-m", "qkv_engine", "-V"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"qkv-engine {__version__}\n")


def test_help_of_a_command_and_the_presets_it_lists(capsys: pytest.CaptureFixture[str]):
    for words in (["help", "chat"], ["chat", "--help"]):
        with pytest.raises(SystemExit) as end:
            main.main(words)
        out = capsys.readouterr().out
        assert end.value.code == 0 and out.startswith("usage: qkv-engine chat")
        assert "auto (default)" in " ".join(out.split()) and all(name in out for name in preset_families())


@pytest.mark.parametrize(
    ("words", "usage", "message"),
    [
        ("caht", "qkv-engine", "there is no command 'caht'. Did you mean chat?"),
        ("help bnech", "qkv-engine", "there is no command 'bnech'. Did you mean bench?"),
        ("chat --kv-memry 1", "qkv-engine chat", "unknown option --kv-memry 1. Did you mean --kv-memory 1?"),
        ("chat --kv-memry=1 x", "qkv-engine chat", "unknown option --kv-memry 1. Did you mean --kv-memory 1?"),
        ("env --verbos -v", "qkv-engine env", "unknown option --verbos. Did you mean --verbose?"),
        ("bench --xyzzy", "qkv-engine bench", "unknown option --xyzzy. See qkv-engine bench --help"),
        ("chat a b", "qkv-engine chat", "unexpected argument 'b'"),
    ],
)
def test_what_is_unknown_is_named_with_what_it_may_mean(
    words: str, usage: str, message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as end:
        main.main(words.split())
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.startswith(f"usage: {usage} [") and message in err


def test_an_error_names_the_option_and_not_the_field():
    options = {"kv_memory": "--kv-memory", "dtype": "--dtype", "batch_sweep": "--batch-sweep", "model": "MODEL"}

    def named(error: QKVError) -> str:
        found = common.name_options(error, options)
        assert type(found) is type(error)
        return str(found)

    assert named(ConfigError("not a size", field="kv_memory", value="4x")) == "--kv-memory='4x': not a size"
    assert named(ConfigError("out of range", field="max_num_seqs", value=99999)) == "--batch-sweep=99999: out of range"
    assert named(ModelError("is missing", field="model", value=None)) == "MODEL: is missing"
    assert named(RequestError("wrong", field="top_k", value=1)) == "top_k=1: wrong"
    remedy = "Raise kv_memory, try dtype bfloat16 or kv_floor, or another model"
    assert named(CapacityError("full", remedy=remedy)) == (
        "full. Raise --kv-memory, try --dtype bfloat16 or kv_floor, or another model"
    )


def test_demo_means_the_demo_model_and_a_shape_is_refused_with_what_it_is_good_for(tmp_path: Path, monkeypatch):
    def options(*words: str) -> dict[str, object]:
        return common.engine_options(main.build_parser().parse_args(["chat", *words]))

    assert options("demo") == options() == {}
    with pytest.raises(ConfigError, match="bench --shape qwen3-8b"):
        options("qwen3-8b")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert options("demo") == {"model": "demo"}


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "script"
    path.write_text(program("completion", "bash").stdout)
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("ch", ["chat"]),
        ("chat --kv-m", ["--kv-memory"]),
        ("chat --kv kivi-k4", [name for name in PRESETS if name.startswith("kivi-k4")]),
        ("bench --shape llama-3.1-8", ["llama-3.1-8b"]),
        ("env --dtype bf", ["bfloat16"]),
        ("completion z", ["zsh"]),
        ("store ver", ["verify"]),
        ("bench --trace READM", ["README.md"]),
    ],
)
def test_bash_completes(bash_script: Path, line: str, found: list[str]):
    words = f"qkv-engine {line}".split()
    code = (
        f"source {bash_script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
        f"_shtab_qkv_engine {words[0]} {words[-1]} {words[-2]}; echo ${{COMPREPLY[@]}}"
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.split() == found, done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_with_the_presets(shell: str, capsys: pytest.CaptureFixture[str]):
    assert main.main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert "kivi-2" in out and "qwen3-8b" in out and "batch-sweep" in out


def test_thinking_in_a_pipe_only_on_request(capsys: pytest.CaptureFixture[str]):
    assert chat("--prompt", "What is 47*86?", "--think") == 0
    assert capsys.readouterr().out.startswith("<think>\n47*80")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["huge", "--prompt", "x"], 3, "--max-model-len=8192: holds 12 tokens"),
        (["bug", "--prompt", "x"], 1, "TypeError: oops"),
        (["--prompt", "fail"], 1, "--top-k=-5: out of range"),
        (["--prompt", "die"], 1, "the engine stopped"),
        (["--prompt", " "], 2, "--prompt=' ': nothing to answer"),
        (["--prompt", "x", "--temperature", "-1"], 2, "--temperature=-1.0: out of range"),
        (["What is 47*86?"], 2, "not a model. To ask a question: qkv-engine chat --prompt TEXT"),
    ],
)
def test_an_error_is_one_line_and_a_code(words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]):
    assert chat(*words) == code
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("qkv-engine: error: ") and message in err


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["--nonsense"],
        ["completion"],
        ["completion", "csh"],
        ["chat", "--temperature", "hot"],
        ["chat", "--think", "--no-think"],
    ],
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
    assert capsys.readouterr().err.endswith("\nqkv-engine: info: a qkv-engine: error: forged[2J\n")


def test_ctrl_c_while_torch_loads_comes_when_it_has_loaded():
    finished = False
    with pytest.raises(KeyboardInterrupt), common.interrupt_later():
        signal.raise_signal(signal.SIGINT)
        finished = True
    assert finished and signal.getsignal(signal.SIGINT) is signal.default_int_handler
