"""A process that writes into a store until it is killed: ``python writer_program.py FOLDER SEED``.

It prints "open", and after each flush the numbers that have reached the disk.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))

from qkv_engine.kv_store.store import KVStore
from tests.engine.kv_store.model import STEPS
from tests.engine.kv_store.pieces import LARGE_NAMESPACE, SMALL, put, read
from tests.engine.kv_store.pieces import piece as piece_of


def main(folder: str, seed: int) -> None:
    draw = random.Random(seed)
    store = KVStore(folder, 32 * SMALL, LARGE_NAMESPACE)
    print("open", flush=True)
    number = 1000 * seed
    while True:
        begin = number
        for _ in range(draw.randrange(1, 6)):
            put(store, number, draw.choice(STEPS), LARGE_NAMESPACE)
            read(store, piece_of(draw.randrange(begin - 20, number + 1)))
            number += 1
        if draw.random() < 0.5:
            assert store.flush() and store.stats().is_writable
            print(begin, number, store.stats().num_evicted, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
