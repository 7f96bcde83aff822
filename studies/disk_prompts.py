"""A prompt from the files of a KV store, beside its records read alone: ``python -m studies.disk_prompts /tmp/disk``.

KV has the bytes of qwen3-8b at 16 bits, made up, 144 KiB a token; nothing is computed. By turns the store's readers
read the records of a prompt into host memory with nothing else to do, and a request waits for it until it could run, on
a CPU with its copies from host memory to KV memory. The files are dropped from the system's memory before each. Host
memory is a file in TMPDIR: name a folder in memory, or the disk writes meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import cast

from qkv_engine.config import EngineConfig
from qkv_engine.device.host_disk import HostDisk
from qkv_engine.kv_store.log import StoredBlock
from qkv_engine.kv_store.store import Piece
from qkv_engine.presets import resolve_kv
from qkv_engine.request import PromptPiece
from qkv_engine.scheduler import ScheduledBatch
from qkv_engine.serving.core import EngineCore
from qkv_engine.startup import start

from .gpu_copies import VOCAB_SIZE, add_prompt
from .gpu_host import forget, write_model
from .gpu_steps import Machine, random_ids

GB = 1e9


class StoredPrompt:
    """A prompt of ``length`` tokens whose blocks are in a store in ``folder``."""

    def __init__(self, folder: Path, length: int):
        self.ids = random_ids(VOCAB_SIZE, length, 0)
        self.folder, self._length = folder / "store", length
        model = folder / "model"
        self._model = model if model.exists() else write_model(model, Machine("cpu"))
        core = self.core()
        self._fill(core)
        core.free()

    def core(self) -> EngineCore:
        """An engine that has nothing of the prompt in memory."""
        size = (self._length + 2048) * 147_456
        return start(
            EngineConfig(
                model=self._model, kv=resolve_kv("bf16"), dtype="bfloat16", device="cpu", kv_memory=size,
                host_memory=size, max_model_len=self._length + 1, kv_store=self.folder, kv_store_size="64GiB",
            )
        ).core  # fmt: skip

    def pieces(self, core: EngineCore) -> Sequence[PromptPiece]:
        """Those of the prompt that a hit may have."""
        assert core.space.prefix is not None
        return core.space.prefix.pieces(self.ids, "", self._length - 1)

    def _fill(self, core: EngineCore) -> None:
        store, nbytes = _disk(core)._store, core.space.spec.main.widest.nbytes
        data = StoredBlock(0, 0, memoryview(bytes(nbytes)))
        for key, parent, tokens in self.pieces(core):
            if store.find(key) is None:
                while not store.put(Piece(key, parent, tokens), [data]):
                    time.sleep(0.01)
        store.flush(600)


def _disk(core: EngineCore) -> HostDisk:
    host = core.space.prefix.host if core.space.prefix is not None else None
    assert host is not None and host.disk is not None
    return cast(HostDisk, host.disk.disk)


def alone(prompt: StoredPrompt) -> float:
    """Bytes a second of the records, read into host memory one behind the other."""
    core = prompt.core()
    disk, asked, at = _disk(core), [], 0
    disk._host.tensor.zero_()  # its pages are there
    for key, parent, tokens in prompt.pieces(core):
        stored = disk._store.find(key)
        assert stored is not None
        nbytes = sum(part[2] for part in stored.parts)
        asked.append((stored, Piece(key, parent, tokens), [disk._bytes[at : at + nbytes]]))
        at += nbytes
    forget(list(prompt.folder.glob("*.kv")))
    began = time.perf_counter()
    results = [disk._store.fetch(*each) for each in asked]
    assert all(result.result() for result in results)
    seconds = time.perf_counter() - began
    core.free()
    return at / seconds


def through_engine(prompt: StoredPrompt) -> float:
    """Bytes a second until a request could run that has all of them in KV memory."""
    core = prompt.core()
    _disk(core)._host.tensor.zero_()
    core.runner.cache.memory.zero_()
    forget(list(prompt.folder.glob("*.kv")))
    schedule, ready = core.scheduler.schedule, list[float]()

    def until_it_runs() -> ScheduledBatch:
        batch = schedule()
        if batch.items:
            ready.append(time.perf_counter())
            core.abort("prompt")
        return ScheduledBatch([], [])

    core.scheduler.schedule = until_it_runs  # type: ignore[method-assign]
    began = time.perf_counter()
    add_prompt(core, "prompt", prompt.ids, 1)
    while not ready:
        core.step()
    nbytes = core.space.prefix.host.tier.stats().fetched_nbytes  # type: ignore[union-attr]
    core.free()
    return nbytes / (ready[0] - began)


def main(argv: list[str] | None = None) -> int:
    """Prints both rates by turns, and the median of their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the model and the store, which stay there")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    prompt, ratios = StoredPrompt(args.folder, args.tokens), []
    for _ in range(args.rounds):
        files, engine = alone(prompt), through_engine(prompt)
        ratios.append(engine / files)
        print(
            f"records alone {files / GB:.2f} GB/s, through the engine {engine / GB:.2f}: {ratios[-1]:.2f}", flush=True
        )
    print(f"median of the ratio {median(ratios):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
