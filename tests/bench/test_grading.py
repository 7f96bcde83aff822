"""Exact-match grading, sampling by seed, and the confidence interval against published values."""

import random

import pytest

from qkv_engine import Engine, SamplingParams
from qkv_engine.bench import grading, tasks
from qkv_engine.bench.grading import (
    Purpose,
    final_answer,
    grade,
    is_correct,
    mean_interval,
    sample_examples,
    wilson_interval,
)
from qkv_engine.errors import ConfigError


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("4042", "4042"),
        ("<think>\n47*6=282\n</think>\n\n4042<|im_end|>", "4042"),
        ("<think>\n\n</think>\n\n4042", "4042"),
        ("  <think>a</think>4042 \n", "4042"),
        ("<think>a</think><think>b</think>1", ""),  # one block of thought, then the answer
        ("<think>\nnever ends 4042", ""),
        ("", ""),
        ("the tag <think> in an answer", "the tag <think> in an answer"),
    ],
)
def test_final_answer(reply: str, answer: str) -> None:
    assert final_answer(reply) == answer


@pytest.mark.parametrize("reply", ["4042.", "The answer is 4042", "4042 4042", "404", "<think>4042</think>"])
def test_only_the_exact_answer_is_right(reply: str) -> None:
    assert is_correct("<think>x</think>4042", "4042")
    assert not is_correct(reply, "4042")


def test_examples_come_from_the_seed_alone() -> None:
    first = sample_examples("ledger", 4, 5, seed=1)
    assert first == sample_examples("ledger", 4, 9, seed=1)[:5]
    assert first != sample_examples("ledger", 4, 5, seed=2)
    assert len({example.prompt for example in first}) == 5


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ConfigError, match="ledger"):
        sample_examples("poetry", 1, 1)


@pytest.mark.parametrize("task", tasks.TASKS)
def test_a_right_solution_is_graded_right(task: str) -> None:
    rng = random.Random(3)
    turns = [tasks.TASKS[task](rng, 6) for _ in range(20)]
    examples = [grading.Example(task, 6, turn[0], turn[2], "") for turn in turns]
    replies = [tasks.chat_text([turn])[1][0] for turn in turns]
    assert grade(replies, examples)[:2] == (20, 20)
    assert grade(["no"] * 20, examples).correct == 0


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662), (1, 1, 0.2065, 1.0)],
)
def test_wilson_interval(correct: int, total: int, low: float, high: float) -> None:
    assert wilson_interval(correct, total) == pytest.approx((low, high), abs=1e-4)


def test_the_interval_of_a_mean_has_the_mean_in_it_and_weighs_tasks_alike() -> None:
    assert mean_interval([(81, 263)]) == wilson_interval(81, 263)
    assert mean_interval([(20, 20), (10, 20)]) == pytest.approx(wilson_interval(30, 40))
    low, high = mean_interval([(0, 400), (100, 200), (190, 200)])  # a task that is asked twice as often counts once
    assert low < (0 + 0.5 + 0.95) / 3 < high and not low < 290 / 800 < high
    assert mean_interval([(5, 5), (50, 50)])[1] == 1


@pytest.mark.parametrize("seed", [*range(40), 1_000_003, -1])
def test_no_seed_of_a_profile_gives_a_question_of_an_exam(seed: int) -> None:
    profile = {e.prompt for e in sample_examples("lookup", 6, 20, seed, Purpose.PROFILE)}
    assert len(profile) == 20
    for exam in range(40):
        assert not profile & {e.prompt for e in sample_examples("lookup", 6, 20, exam)}


def test_a_conversation_is_asked_its_last_turn_after_right_replies() -> None:
    (example,) = sample_examples("chat", 5, 1, seed=3)
    turns = tasks.chat(random.Random("chat 5 3"), 5)
    assert len(turns) == 4 and example.history == tuple(turns[:-1])
    assert (example.prompt, example.answer) == (turns[-1][0], turns[-1][2])
    text = "".join(text for text, _ in tasks.chat_text(turns))
    assert text == f"{example.chat}{example.reply}\n" and turns[1][1] in example.chat
    facts = turns[0][0]
    assert all(f"{turn[0].removeprefix('What is ').rstrip('?')} is {turn[2]}." in facts for turn in turns[2:])


@pytest.mark.parametrize(("correct", "total"), [(1, 0), (-1, 2), (3, 2)])
def test_no_interval_of_nothing(correct: int, total: int) -> None:
    with pytest.raises(ConfigError):
        wilson_interval(correct, total)


def test_the_prompt_is_the_models_chat_template(demo_engine: Engine) -> None:
    example = sample_examples("lookup", 3, 1)[0]
    template = demo_engine.tokenizer.chat_prompt([{"role": "user", "content": example.prompt}])[0]
    assert template == example.chat


@pytest.mark.parametrize(("task", "size"), [("addition", 2), ("ledger", 2)])
def test_the_demo_model_solves_small_tasks(task: str, size: int, demo_engine: Engine) -> None:
    examples = sample_examples(task, size, 16)
    params = SamplingParams(temperature=0.0, max_tokens=400, skip_special_tokens=False)
    outputs = demo_engine.generate([example.chat for example in examples], params)
    result = grade([output.text for output in outputs], examples)
    assert result.correct >= 15, [output.text for output in outputs]
    assert result.low < result.share <= result.high + 1e-12
