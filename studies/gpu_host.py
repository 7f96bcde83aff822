"""Prompts back from host memory and from disk: what parts of ``studies/gpu_check.py`` time.

KV has the bytes of qwen3-8b at 16 bits, 144 KiB a token. On a CPU with the demo shape it says nothing of speed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from qkv_engine import Engine
from qkv_engine.models.shapes import SHAPES

from .gpu_steps import Machine, ask, random_ids

PAUSE = 1.0  # seconds, for idle blocks to be copied
READ_NBYTES, READERS = 2**22, (4, 16)  # of a file at once, by so many threads: what the disk gives
NARROW = {
    "hidden_size": 256, "intermediate_size": 512, "vocab_size": 2048, "num_attention_heads": 16,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


class Return(NamedTuple):
    """A prompt that came back with its first token: ``nbytes`` were fetched. ``computed``: seconds without a cache."""

    when: str
    nbytes: int
    seconds: float
    computed: float

    @property
    def rate(self) -> float:
        """Bytes a second, the token behind them included."""
        return self.nbytes / self.seconds


def options(machine: Machine, length: int, **changes: Any) -> dict[str, Any]:
    """Of an engine whose KV memory has room for one prompt of 32,768 tokens."""
    found = {
        "model": machine.shape("qwen3-8b"),
        "load_format": "random",
        "kv": "bf16",
        "dtype": "bfloat16",
        "device": machine.device,
        "kv_memory": machine.memory("6GiB", tiny="8MiB"),
        "host_memory": machine.memory("24GiB"),
        "max_model_len": length + 1,
    }
    return found | changes


def returns(machine: Machine) -> Iterator[Return]:
    """A whole prompt back from host memory, while the one before it leaves, and after a pause."""
    length = machine.tokens(32_768)
    with Engine(**options(machine, length)) as engine:
        ids = [random_ids(engine.vocab_size, length, seed) for seed in range(3)]
        computed = [ask(engine, [each]) for each in ids][-1]
        for when, pause in (("right behind another one", 0.0), ("after a pause", PAUSE)):
            for each in (1, 2):  # the first one is gone then
                ask(engine, [ids[each]])
                time.sleep(pause)
            before = engine.stats().host_bytes_fetched
            seconds = ask(engine, [ids[0]])
            yield Return(when, engine.stats().host_bytes_fetched - before, seconds, computed)


class DiskTimes(NamedTuple):
    """Bytes a second of the files alone, and of a prompt with the token behind it; its bytes, and computed seconds."""

    files: float
    prompt: Return


def from_disk(machine: Machine, folder: Path) -> DiskTimes:
    """A prompt from the files of a KV store in ``folder`` after a restart, with nothing of them in memory."""
    length, store = machine.tokens(32_768), folder / "store"
    model = write_model(folder / "model", machine)
    changes = {"model": str(model), "load_format": "auto", "kv_store": str(store), "kv_store_size": "16GiB"}
    with Engine(**options(machine, length, **changes)) as engine:
        ids, other = (random_ids(engine.vocab_size, length, seed) for seed in range(2))
        ask(engine, [other])  # kernels are compiled
        computed = ask(engine, [ids])
        wait_for_writes(engine)
    files = [path for path in store.iterdir() if path.suffix == ".kv"]
    rates = []
    for threads in READERS:
        forget(files)
        rates.append(read_rate(files, threads))
    with Engine(**options(machine, length, **changes)) as engine:
        forget(files)
        ask(engine, [random_ids(engine.vocab_size, length, 2)])
        before = engine.stats().host_bytes_fetched
        seconds = ask(engine, [ids])
        nbytes = engine.stats().host_bytes_fetched - before
    return DiskTimes(max(rates), Return("from disk", nbytes, seconds, computed))


def wait_for_writes(engine: Engine) -> None:
    """Waits until a store has had nothing to write for a while."""
    written = -1
    while written < (written := engine.stats().store_bytes_written):
        time.sleep(PAUSE)


def write_model(folder: Path, machine: Machine) -> Path:
    """A checkpoint of random weights, narrow but with the KV heads and layers of the shape, without a tokenizer."""
    config = SHAPES[machine.shape("qwen3-8b")] | ({} if machine.is_tiny else NARROW)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = (config[f"num_{name}_heads"] * head for name in ("attention", "key_value"))
    shapes = {"embed_tokens": (config["vocab_size"], hidden), "norm": (hidden,)}
    for index in range(config["num_hidden_layers"]):
        parts = {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries), "self_attn.q_norm": (head,), "self_attn.k_norm": (head,),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        shapes |= {f"layers.{index}.{name}": shape for name, shape in parts.items()}
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"model.{name}.weight": (0.02 * torch.randn(shape, generator=generator)).to(torch.bfloat16)
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return folder


def forget(files: list[Path]) -> None:
    """Has the system keep nothing of ``files`` in memory."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_rate(files: list[Path], threads: int) -> float:
    """Bytes a second of ``files``, each read in parts by so many threads."""
    parts = [(path, start) for path in files for start in range(0, path.stat().st_size, READ_NBYTES)]

    def read(part: tuple[Path, int]) -> int:
        with part[0].open("rb", buffering=0) as file:
            return os.preadv(file.fileno(), [bytearray(READ_NBYTES)], part[1])

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        nbytes = sum(pool.map(read, parts))
    return nbytes / (time.perf_counter() - began)
