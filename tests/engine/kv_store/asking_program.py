"""A process that asks an engine with a KV store until it is killed: ``python asking_program.py FOLDER SEED``.

It prints "ready" when the engine is there, and each answer.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))

from tests.engine.kv_store.asked import PROMPTS, answer, make_engine


def main(folder: str, seed: int) -> None:
    draw = random.Random(seed)
    with make_engine(folder) as engine:
        print("ready", flush=True)
        while True:
            number = draw.randrange(len(PROMPTS))
            print(number, *answer(engine, number), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
