"""Right answers by turn in chats of several questions: ``python -m studies.chat_turns [MODEL] --chats 60``.

Each chat has sums, products, differences and lists to sort, all drawn from one seed. Earlier answers are the right ones
and come without their reasoning, as clients send a conversation back.
"""

from __future__ import annotations

import argparse
import random

from qkv_engine import Engine, SamplingParams
from qkv_engine.bench import tasks

TURNS = 4
KINDS = ("addition", "multiplication", "sorting", "subtraction")
MAX_TOKENS = 1500  # of a reply: three times the longest right one


def question(rng: random.Random) -> tasks.Turn:
    """One question of a chat, as long as people ask in passing."""
    kind = rng.choice(KINDS)
    return tasks.TASKS[kind](rng, rng.randint(3, 12) if kind == "sorting" else rng.randint(2, 6))


def messages(turns: list[tasks.Turn]) -> list[dict[str, str]]:
    """The chat as a client sends it to have the last of ``turns`` answered."""
    found = []
    for prompt, _, answer in turns:
        found += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return found[:-1]


def right_by_turn(engine: Engine, chats: int, seed: int = 5) -> list[int]:
    """How many of ``chats`` have the right answer in each of ``TURNS`` turns, decoded greedily."""
    rng = random.Random(seed)
    asked = [[question(rng) for _ in range(TURNS)] for _ in range(chats)]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    right = []
    for turn in range(TURNS):
        outputs = engine.chat([messages(chat[: turn + 1]) for chat in asked], params)
        right.append(sum(output.text.strip() == chat[turn][2] for output, chat in zip(outputs, asked, strict=True)))
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="folder or Hub name; default: the demo model")
    parser.add_argument("--chats", type=int, default=60)
    parser.add_argument("--kv", default="bf16")
    args = parser.parse_args()
    with Engine(args.model, kv=args.kv) as engine:
        for turn, right in enumerate(right_by_turn(engine, args.chats), 1):
            print(f"turn {turn}: {right} of {args.chats}")


if __name__ == "__main__":
    main()
