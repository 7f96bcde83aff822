"""Questions: tasks by name and size, files of one's own, and requests long enough for a right reply."""

import os
from pathlib import Path

import pytest

from qkv_engine import Engine
from qkv_engine.bench import questions
from qkv_engine.bench.grading import is_correct, task_names
from qkv_engine.bench.questions import DEFAULT_SIZES, ask, parse_tasks, read_questions
from qkv_engine.errors import ConfigError


def test_tasks_with_and_without_sizes() -> None:
    found = parse_tasks("ledger:7, sorting,ledger:7", samples=3, seed=1)
    assert [(task.name, task.size, len(task.examples)) for task in found] == [("ledger", 7, 3), ("sorting", 40, 3)]
    assert found == parse_tasks("ledger:7,sorting", samples=3, seed=1)
    assert found != parse_tasks("ledger:7,sorting", samples=3, seed=2)
    assert DEFAULT_SIZES.keys() == set(task_names())


@pytest.mark.parametrize("text", ["", "ledger,", "poetry", "ledger:", "ledger:0", "ledger:-1", "ledger:x", "LEDGER"])
def test_what_is_no_task(text: str) -> None:
    with pytest.raises(ConfigError, match=r"not a task.*addition"):
        parse_tasks(text, samples=1)


@pytest.mark.parametrize("name", task_names())
def test_a_right_reply_fits_its_limit_and_is_right(name: str, demo_engine: Engine) -> None:
    (task,) = parse_tasks(f"{name}:5", samples=4)
    tokenizer = demo_engine.tokenizer
    assert tokenizer is not None
    for example, request in zip(task.examples, ask(tokenizer, task.examples), strict=True):
        assert is_correct(example.reply, example.answer)
        assert example.history or request.prompt == tokenizer.encode(example.chat)
        reply = tokenizer.encode(example.reply)
        assert len(reply) < (request.params.max_tokens or 0) <= 1.1 * len(reply) + 16
        assert request.num_tokens == len(request.prompt) + request.params.max_tokens - 1
    assert {a.params.max_tokens for a in ask(tokenizer, task.examples, max_tokens=9)} == {9}


def test_questions_of_a_file(tmp_path: Path, demo_engine: Engine) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text('{"prompt": "1+1=?", "answer": " 2\\n"}\n\n{"prompt": "2+2=?", "answer": "4", "more": 1}\n')
    task = read_questions(path, samples=10)
    assert (task.name, task.size, task.label) == ("sums", None, "sums")
    assert [(e.prompt, e.answer) for e in task.examples] == [("1+1=?", "2"), ("2+2=?", "4")]
    assert read_questions(path, samples=1).examples == task.examples[:1]
    assert demo_engine.tokenizer is not None
    assert {a.params.max_tokens for a in ask(demo_engine.tokenizer, task.examples)} == {512}


@pytest.mark.parametrize(
    "line",
    [
        *("{", "[]", "7", '{"prompt": "a"}', '{"prompt": 1, "answer": "b"}', '{"prompt": "a", "answer": 2}'),
        '{"prompt": "a", "answer": "b", "deep": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"prompt": "\\ud800", "answer": "b"}',
    ],
    ids=lambda line: line[:40],
)
def test_a_line_that_is_no_question_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 2 is no question"):
        read_questions(path, samples=5)


def test_lines_end_at_newlines_alone(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes('{"prompt": "a\u2028b\x85", "answer": "c"}\r\n'.encode())
    assert [e.prompt for e in read_questions(path, samples=5).examples] == ["a\u2028b\x85"]


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(ConfigError, match=r"data=.*not a regular file"):
            read_questions(path, samples=5)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "big.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n')
    monkeypatch.setattr(questions, "MAX_FILE_NBYTES", path.stat().st_size - 1)
    with pytest.raises(ConfigError, match=r"data=.*larger than 30 B"):
        read_questions(path, samples=1)
    monkeypatch.setattr(questions, "MAX_FILE_NBYTES", path.stat().st_size)
    assert len(read_questions(path, samples=1).examples) == 1


def test_bytes_that_are_no_text_are_a_line_that_is_no_question(tmp_path: Path) -> None:
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(b'{"prompt": "\xff", "answer": "b"}')
    with pytest.raises(ConfigError, match="line 1 is no question"):
        read_questions(path, samples=1)


def test_a_file_without_questions(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no lines"):
        read_questions(path, samples=5)


def test_messages_behind_the_first_are_read_as_decoded(demo_engine: Engine) -> None:
    assert demo_engine.tokenizer is not None
    single, chat = parse_tasks("lookup:5,chat:5", samples=2)
    for asked in ask(demo_engine.tokenizer, single.examples):
        assert asked.judged.num_prefill_tokens == asked.num_first == len(asked.prompt)
        assert asked.params.num_prefill_tokens is None
    for asked, example in zip(ask(demo_engine.tokenizer, chat.examples), chat.examples, strict=True):
        first = demo_engine.tokenizer.decode(asked.prompt[: asked.num_first], skip_special_tokens=False)
        assert example.history[0][0] in first and "Noted" not in first
        assert asked.judged.num_prefill_tokens == asked.num_first < len(asked.prompt)
        whole = demo_engine.tokenizer.decode(asked.prompt, skip_special_tokens=False)
        assert whole.count("<|im_start|>user") == 4 and example.prompt in whole
