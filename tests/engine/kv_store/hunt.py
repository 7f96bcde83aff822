"""The hunt for a seeded bug: all checks, and random walks of operations on a checked store."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.sim.patch import Patch

from . import checks_faults, checks_folder, checks_shares, checks_store, checks_turns
from .code import Code, load
from .model import FAVOURITE, KINDS, STEPS, CheckedStore

NUM_WALKS = 20
CHECKS = [
    check
    for module in (checks_folder, checks_store, checks_turns, checks_shares, checks_faults)
    for name, check in sorted(vars(module).items())
    if name.startswith("check_")
]
SLOW = (checks_faults.check_the_disk_may_fail_at_any_call, checks_faults.check_opening_fails_in_words)


def walk(code: Code, path: Path, seed: int, num_steps: int = 60) -> None:
    """Random operations on a checked store. Raises ``AssertionError`` for a bug."""
    draw, store = random.Random(seed), CheckedStore(path, code)
    store.put(FAVOURITE)
    for _ in range(num_steps):
        number = draw.randrange(40)
        kind = draw.choices(("put", "read", "other", "reopen", "crash", "damage"), (20, 4, 1, 1, 1, 3))[0]
        if kind == "put":
            store.put(number, draw.choice(STEPS))
        elif kind == "read":
            store.read(number)
        elif kind == "other":
            store.read_as_another(number, draw.randrange(40))
        elif kind == "damage":
            offset = draw.randrange(2**17) if draw.random() < 0.5 else draw.randrange(32) * 4096 + draw.randrange(200)
            store.damage(draw.randrange(9), offset, draw.choice(KINDS))
        else:
            getattr(store, kind)()
        store.put(FAVOURITE)
    store.close()


def hunt(patch: Patch) -> str | None:
    """What finds the bug, and its words; None if it survives."""
    code = load(patch)
    calls: list[tuple[str, Callable[[Path], None]]] = [
        (f"walk {seed}", lambda path, seed=seed: walk(code, path, seed)) for seed in range(NUM_WALKS)
    ]
    calls[3:3] = [(each.__name__, lambda path, each=each: each(code, path)) for each in CHECKS if each not in SLOW]
    calls += [(each.__name__, lambda path, each=each: each(code, path)) for each in SLOW]
    folder = Path(tempfile.mkdtemp())
    try:
        for name, call in calls:
            (folder / name).mkdir()
            try:
                call(folder / name / "store")
            except Exception as error:
                return f"{name}: {type(error).__name__} {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return None
