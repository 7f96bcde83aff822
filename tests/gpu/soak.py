"""A load that never lets up: clients that submit, read and abort random requests while memory is watched."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from qkv_engine import Engine, SamplingParams

INTERVAL = 500  # steps between two looks at memory and books
STATM = Path("/proc/self/statm")


@dataclass(frozen=True)
class Load:
    """What the clients ask for. Lengths in tokens, drawn evenly from least to most; one in ten is short."""

    clients: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    floors: tuple[str | None, ...] = (None,)
    pinned: float = 0.0  # share of requests whose KV never steps down


@dataclass(frozen=True)
class Memory:
    """Bytes at one moment: of this process on the device, kept by torch's allocator, and on the host; graphs held."""

    device: int
    reserved: int
    resident: int
    num_graphs: int


@dataclass
class Watch:
    """What was seen between steps, on the engine's own thread."""

    engine: Engine
    started: float = field(default_factory=time.monotonic)
    use: list[float] = field(default_factory=list)  # share of the arena's bytes that blocks own, one a busy step
    memory: list[tuple[float, Memory]] = field(default_factory=list)  # (seconds since the start, bytes)
    num_warm: int = 0  # steps until the warm-up was over
    num_loaded: int = 0  # steps until clients stopped to ask
    num_evacuations: int = 0
    num_recoveries: int = 0

    def __post_init__(self) -> None:
        core = self.engine._started.core
        tables, step, recover, evacuate = core.space.tables, core.step, core.recover, core.space.tables.store._evacuate

        def watched_step() -> None:
            step()
            self.use.append(tables.arena.used_nbytes / tables.arena.nbytes)
            if len(self.use) % INTERVAL == 0:
                tables.check_integrity()
                self.memory.append((time.monotonic() - self.started, self.look()))

        def watched_recover(isolate: bool) -> bool:
            self.num_recoveries += 1
            return recover(isolate)

        def watched_evacuate() -> bool:
            self.num_evacuations += 1
            return evacuate()

        core.step, core.recover, tables.store._evacuate = watched_step, watched_recover, watched_evacuate

    def look(self) -> Memory:
        runner = self.engine._started.core.runner
        num_graphs = sum(len(owner._graphs or ()) for owner in (runner.backend.steps, runner.backend.mover))
        resident = int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return Memory(device_nbytes(), torch.cuda.memory_reserved(), resident, num_graphs)


def device_nbytes() -> int:
    """Device memory of this process by the driver's books; all that is in use where those name no processes."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except OSError:
        return 0
    for line in listed.splitlines():
        pid, _, mebibytes = line.partition(",")
        if pid.strip() == str(os.getpid()) and mebibytes.strip().isdigit():
            return int(mebibytes) << 20
    free, total = torch.cuda.mem_get_info()
    return total - free


def soak(engine: Engine, load: Load, seconds: float, warm_up: float, seed: int = 0) -> tuple[Watch, Counter[str]]:
    """Keeps ``load`` on the engine for ``seconds`` and waits for every request; returns how each ended, too.

    In the first ``warm_up`` seconds kernels are compiled, steps captured, and the arena filled.
    """
    watch = Watch(engine)
    ends: Counter[str] = Counter()
    deadline = watch.started + seconds
    failures: list[BaseException] = []

    def run(index: int) -> None:
        rng = random.Random(f"{seed}/{index}")
        try:
            while time.monotonic() < deadline and not failures:
                ends[_one(engine, load, rng)] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(load.clients)]
    for thread in threads:
        thread.start()
    time.sleep(warm_up)
    watch.num_warm = len(watch.use)
    time.sleep(seconds - warm_up)
    watch.num_loaded = len(watch.use)
    for thread in threads:
        thread.join(120)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads), "a request never ended"
    return watch, ends


def _one(engine: Engine, load: Load, rng: random.Random) -> str:
    """One client's next request, read to its end or aborted on the way; returns how it ended."""
    params, prompt = make_params(load, rng), make_prompt(load, rng)
    if rng.random() < 0.3:
        time.sleep(rng.random() / 20)
    if rng.random() < 0.7:
        output = engine.generate([prompt], params)[0]
    else:
        stream, patience = engine.stream(prompt, params), rng.randrange(1, 500)
        for count, output in enumerate(stream):  # noqa: B007
            if count == patience:
                engine.abort(stream.request_id)
    assert output.finished and output.error is None, output.error
    for completion in output.outputs:
        assert completion.finish_reason in ("stop", "length", "abort")
        assert completion.finish_reason != "length" or len(completion.token_ids) == params.max_tokens
    return str(output.outputs[0].finish_reason)


def make_prompt(load: Load, rng: random.Random) -> list[int]:
    """Random tokens, some behind a beginning that others have too."""
    length = rng.randint(1, 200) if rng.random() < 0.1 else rng.randint(*load.prompt)
    shared = random.Random(rng.randrange(4)) if rng.random() < 0.3 else rng
    common = [shared.randrange(5, 1000) for _ in range(min(length, load.prompt[0] // 4))]
    return common + [rng.randrange(5, 1000) for _ in range(length - len(common))]


def make_params(load: Load, rng: random.Random) -> SamplingParams:
    """Greedy and sampled, short and long, with stops, penalties, floors and log-probabilities here and there."""
    greedy = rng.random() < 0.4
    return SamplingParams(
        temperature=0.0 if greedy else rng.choice((0.3, 0.8, 1.5)),
        top_p=1.0 if greedy else rng.choice((1.0, 0.9)),
        top_k=0 if greedy else rng.choice((0, 20)),
        min_p=0.0 if greedy else rng.choice((0.0, 0.05)),
        seed=rng.randrange(2**31),
        repetition_penalty=rng.choice((1.0, 1.0, 1.0, 1.2)),
        n=1 if greedy else rng.choice((1, 1, 1, 2)),
        max_tokens=rng.randint(1, 20) if rng.random() < 0.1 else rng.randint(*load.output),
        stop=rng.choice((None, None, None, ["7", "zq"])),
        stop_token_ids=rng.choice((None, None, [rng.randrange(5, 1000)])),
        ignore_eos=rng.random() < 0.8,
        logprobs=rng.choice((None, None, None, None, 2)),
        kv_floor=rng.choice(load.floors),
        kv_pinned=rng.random() < load.pinned,
    )
