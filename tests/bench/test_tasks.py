"""The tasks: recorded examples that must never change, and answers worked out a second time."""

import hashlib
import random
import re

import pytest

from qkv_engine.bench.tasks import TASKS, chat_text, memory, sample_conversation

GOLDEN = {
    "ledger": (
        "Accounts: Yves 43, Abe 75, Cid 72. 1) Abe gives Cid 6. 2) Yves pays 4. 3) Yves gives Abe 9. "
        "What are the balances?",
        "1) Abe 75-6=69, Cid 72+6=78\n2) Yves 43-4=39\n3) Yves 39-9=30, Abe 69+9=78",
        "Yves 30, Abe 78, Cid 78",
    ),
    "lookup": (
        "Remember: Yan's ticket is 7961. Abe's stone is 6634. Quin's bridge is 4969. "
        "What is Abe's stone, Yan's ticket, Quin's bridge?",
        "",
        "6634, 7961, 4969",
    ),
    "addition": (
        "What is 7056020 + 4 + 63691?",
        "7056020+4: 0+4+0=4 2+0+0=2 0+0+0=0 6+0+0=6 5+0+0=5 0+0+0=0 7+0+0=7 so 7056024\n"
        "7056024+63691: 4+1+0=5 2+9+0=11 0+6+1=7 6+3+0=9 5+6+0=11 0+0+1=1 7+0+0=7 so 7119715",
        "7119715",
    ),
    "subtraction": (
        "calculate 7056020 - 4",
        "7056020-4: 0-4-0=6! 2-0-1=1 0-0-0=0 6-0-0=6 5-0-0=5 0-0-0=0 7-0-0=7 so 7056016",
        "7056016",
    ),
    "multiplication": ("What is 6890 x 4?", "6890*4: 0*4+0=0 9*4+0=36 8*4+3=35 6*4+3=27 so 27560, 27560", "27560"),
    "sorting": ("Sort: 776 911 430", "", "430 776 911"),
}
DIGEST = "aef2fedf38e4a72ca99f7a2f5849fa384445788d3bc433996f318a1d494d08a9"


@pytest.mark.parametrize("task", TASKS)
def test_recorded_examples(task: str) -> None:
    assert TASKS[task](random.Random(0), 3) == GOLDEN[task]


def test_recorded_conversations() -> None:
    rng = random.Random(0)
    text = repr([sample_conversation(rng, 220) for _ in range(200)])
    assert hashlib.sha256(text.encode()).hexdigest() == DIGEST


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("size", [1, 7, 40])
def test_ledger_keeps_the_books(size: int, seed: int) -> None:
    prompt, thought, answer = TASKS["ledger"](random.Random(seed), size)
    start, _, moves = prompt.removeprefix("Accounts: ").partition(". ")
    balance = {name: int(amount) for name, amount in re.findall(r"(\w+) (\d+)", start)}
    for move in re.findall(r"\) ([^.]+)\.", moves):
        words = move.split()
        amount = int(words[-1])
        balance[words[0]] += amount if words[1] == "earns" else -amount
        if words[1] == "gives":
            balance[words[2]] += amount
        assert all(0 <= value <= 99 for value in balance.values())
    assert answer == ", ".join(f"{name} {value}" for name, value in balance.items())
    assert len(thought.splitlines()) == size


@pytest.mark.parametrize("task", ["addition", "subtraction", "multiplication"])
def test_sums_are_right(task: str) -> None:
    sign = {"addition": "+", "subtraction": "-", "multiplication": "*"}[task]
    reduce = {"+": sum, "-": lambda n: abs(n[0] - n[1]), "*": lambda n: n[0] * n[1]}[sign]
    rng = random.Random(1)
    for _ in range(200):
        prompt, thought, answer = TASKS[task](rng, 8)
        assert int(answer) == reduce([int(number) for number in re.findall(r"\d+", prompt)])
        assert thought.split()[-1] == answer


def test_sorting_is_sorted() -> None:
    rng = random.Random(1)
    for size in (1, 2, 60, 100):
        prompt, _, answer = TASKS["sorting"](rng, size)
        assert sorted(map(int, re.findall(r"\d+", prompt))) == [int(word) for word in answer.split()]


def test_lookup_answers_are_among_the_facts() -> None:
    prompt, thought, answer = TASKS["lookup"](random.Random(5), 30)
    facts = dict(re.findall(r"(\w+'s \w+) is (\d{4})\.", prompt))
    asked = prompt.partition("What is ")[2].rstrip("?").split(", ")
    assert len(facts) == 30 and thought == ""
    assert answer == ", ".join(facts[key] for key in asked)


def test_memory_asks_what_was_told() -> None:
    turns = memory(random.Random(2), 6)
    facts = dict(re.findall(r"(\w+'s \w+) is (\d{4})\.", turns[0][0]))
    assert turns[0][2] == f"Noted: {len(facts)}."
    last, _, answer = turns[-1]
    assert facts[last.removeprefix("What is ").rstrip("?")] == answer


def test_chat_text_marks_what_the_model_writes() -> None:
    pieces = chat_text([("Hi", "", "Hello!"), ("1+1", "so 2", "2")])
    own = "".join(text for text, mine in pieces if mine)
    assert own == "<think>\n\n</think>\n\nHello!<|im_end|><think>\nso 2\n</think>\n\n2<|im_end|>"
    assert pieces[0] == ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False)
