"""Damaged model folders, each loaded to the end: a typed error or a model that runs. As a program: a range of seeds."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import random
import resource
import shutil
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qkv_engine import Engine, QKVError, SamplingParams
from qkv_engine.config import EngineConfig
from qkv_engine.presets import resolve_kv
from qkv_engine.startup import start

from .tiny import INDEX, WEIGHTS, shard, write_tiny

HANG_SECONDS = 60  # of one case on a busy machine; usual are 0.02
MAX_BYTES = 16 * 2**30  # of address space, four times what a run takes: memory without bound is a failure, too
MESSAGES = [{"role": "user", "content": "the </s> cat"}, {"role": "assistant", "content": "a<s>"}]
RUN_EVERY = 20  # one folder in so many that load also answers a request

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 63, 64, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**30, 0.0, -0.5, 0.5),
    *(1e-300, 1e308, "", "a", "</s>", "<pad>", "x" * 3000, "\ud800", "\x00", "\ufdd00\ufdd1", "../x", "linear"),
    *("llama3", "default", "float16", "MistralForCausalLM", [], {}, [[]], [None], [0], [-1], [2**40], {"a": 1}),
    *({"content": "</s>"}, {"type": "Sequence"}, {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}),
]
RAW: list[Callable[[random.Random, bytes], bytes]] = [
    lambda rng, data: data[: rng.randrange(len(data))],
    lambda rng, data: b"",
    lambda rng, data: b"\xef\xbb\xbf" + data,
    lambda rng, data: data.decode("utf-8", "replace").encode("utf-16"),
    lambda rng, data: (b"[" * 100_000, b'{"a":' * 5000, b"[" * 70 + b"]" * 70)[rng.randrange(3)],
    lambda rng, data: data.replace(b":", b": NaN, " + data[2:9] + b":", 1),
    lambda rng, data: data[:1] + data[1:-1] + b"," + data[1:],
    lambda rng, data: _flipped(rng, data),
    lambda rng, data: _flipped(rng, data),
    lambda rng, data: _spliced(rng, data),
    lambda rng, data: b'{"a": ' + b"9" * 6000 + b"}",
    lambda rng, data: b"\x80\x02}q\x00." + data,
    lambda rng, data: b"PK\x03\x04" + data,
]


def _flipped(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 3, 20])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _spliced(rng: random.Random, data: bytes) -> bytes:
    start, stop = sorted(rng.randrange(len(data)) for _ in range(2))
    at = rng.randrange(len(data))
    return data[:at] + data[start:stop] * rng.choice([0, 1, 2]) + data[at:]


def mutate_json(rng: random.Random, data: bytes) -> bytes:
    """One to three values, keys or items changed, dropped, doubled or swapped."""
    value = json.loads(data)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        value = _mutate_value(rng, value)
    return json.dumps(value).encode()


def _mutate_value(rng: random.Random, value: Any) -> Any:
    if type(value) in (int, float) and rng.random() < 0.6:  # a little beside what was right
        return rng.choice([value + 1, value - 1, value * 2, value / 2, value // 2, -value, value * 1.5])
    if not isinstance(value, dict | list) or not value or rng.random() < 0.03:
        return json.loads(json.dumps(rng.choice(VALUES)))
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key, way = rng.choice(keys), rng.random()
    if way < 0.45:
        value[key] = _mutate_value(rng, value[key])
    elif way < 0.75:
        value[key] = json.loads(json.dumps(rng.choice(VALUES)))
    elif way < 0.85:
        del value[key]
    elif way < 0.92:
        other = rng.choice(keys)
        value[key], value[other] = value[other], value[key]
    elif isinstance(value, dict):
        value[rng.choice(["", "x", "a" * 300, "\ud800", *map(str, keys[:3])])] = value[key]
    else:
        value.append(value[key])
    return value


def mutate_weights(rng: random.Random, data: bytes) -> bytes:
    """The header as JSON, its length, the offsets, or bytes anywhere."""
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], data[8 + length :]
    way = rng.random()
    if way < 0.6:
        header = mutate_json(rng, header)
        return struct.pack("<Q", len(header)) + header + body
    if way < 0.7:  # the padding that the format allows, also to lengths whose bytes look like a pickle's
        header += b" " * (rng.choice([640, 1152, 66176, 0x380, 0x580]) - len(header))
        return struct.pack("<Q", len(header)) + header + body
    if way < 0.8:
        number = rng.choice([0, 1, 2**24, 2**31, 2**62, 2**64 - 1, len(data), len(data) - 8, length + 1, length - 1])
        return struct.pack("<Q", number) + header + body
    return rng.choice(RAW)(rng, data)


def special(rng: random.Random, path: Path, outside: Path) -> bool:
    """Something that is no regular file inside, in its place; whether the folder may load all the same."""
    way = rng.randrange(11)
    data = path.read_bytes()
    path.unlink()
    if way == 0:
        os.mkfifo(path)
    elif way == 1:
        path.mkdir()
    elif way == 2:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))
    elif way == 3:
        path.write_bytes(data)
        os.truncate(path, 20 * 2**30)
    elif way == 4:  # the right content beside other files of the folder
        (path.parent / "blob").write_bytes(data)
        path.symlink_to("blob")
        return True
    elif way == 5:
        return path.name not in ("config.json", WEIGHTS)  # missing
    else:
        (outside / path.name).write_bytes(data)
        path.symlink_to(("/dev/zero", "/dev/stdin", path.name, "absent", outside / path.name)[way - 6])
    return False


class Fuzzer:
    """Damages one file after another of a folder that is whole again before each case."""

    def __init__(self, folder: Path):
        self.folder, self.outside = folder / "model", folder / "outside"
        write_tiny(self.folder)
        self.single = self._contents()
        shard(self.folder)
        self.sharded = self._contents()
        self.outside.mkdir()
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []

    def _contents(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder.iterdir()}

    def case(self, seed: int, name: str) -> None:
        """Damages the file called ``name`` as ``seed`` says and loads the folder."""
        rng = random.Random(f"{seed} {name}")
        is_sharded = name == INDEX or (name == WEIGHTS and rng.random() < 0.2)
        files = self.sharded if is_sharded else self.single
        self._write(files)
        if name.startswith("tokenizer"):  # its own template is read only where there is no file with one
            (self.folder / "chat_template.jinja").unlink()
        target = self.folder / (rng.choice([n for n in files if n.endswith("tensors")]) if name == WEIGHTS else name)
        may_load, way = True, rng.random()
        if way < 0.12:
            may_load = special(rng, target, self.outside)
        elif way < 0.3:
            target.write_bytes(rng.choice(RAW)(rng, target.read_bytes()))
        elif name == WEIGHTS:
            target.write_bytes(mutate_weights(rng, target.read_bytes()))
        elif name.endswith(".json"):
            target.write_bytes(mutate_json(rng, target.read_bytes()))
        else:
            target.write_bytes(_spliced(rng, target.read_bytes()))
        self._load(seed, name, may_load)

    def _load(self, seed: int, name: str, may_load: bool) -> None:
        try:
            self._run() if seed % RUN_EVERY == 0 else self._start(name)
        except QKVError as error:
            self.outcomes[f"{name}: {type(error).__name__}"] += 1
        except BaseException as error:  # a panic of a library in Rust is no Exception
            self.failures.append(f"seed {seed}, {name}: {type(error).__name__}: {str(error)[:200]}")
        else:
            self.outcomes[f"{name}: loaded"] += 1
            if not may_load:
                self.failures.append(f"seed {seed}, {name}: was loaded")

    def _start(self, name: str) -> None:
        config = EngineConfig(model=self.folder, kv=resolve_kv("bf16"), kv_memory="1MiB", device="cpu", max_num_seqs=4)
        started = start(config)
        started.core.free()
        if name.startswith("tokenizer") and started.tokenizer is not None:
            _, ids = started.tokenizer.chat_prompt(MESSAGES)
            started.tokenizer.decode(ids)

    def _run(self) -> None:
        """A request that meets the ids that end a sequence; its own error is its own affair."""
        with Engine(self.folder, kv="bf16", kv_memory="1MiB", device="cpu", max_num_seqs=4) as engine:
            params = SamplingParams(temperature=0.0, max_tokens=4, min_tokens=2, detokenize=False)
            output = engine.generate([[3, 4, 5]], params)[0]
            assert output.finished and (output.error is None or "finite" in str(output.error)), output.error

    def _write(self, files: dict[str, bytes]) -> None:
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        for name, content in files.items():
            (self.folder / name).write_bytes(content)


def main(folder: str, first: str, count: str, *names: str) -> None:
    """Seeds from ``first`` on, for each of the files called ``names``; prints outcomes and failures as JSON."""
    torch.set_num_threads(1)
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    os.chdir(folder)  # a socket's path has few characters
    fuzzer = Fuzzer(Path(folder))
    for seed in range(int(first), int(first) + int(count)):
        for name in names:
            print(f"seed {seed}, {name}", file=sys.stderr, flush=True)
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
            fuzzer.case(seed, name)
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps({"outcomes": fuzzer.outcomes, "failures": fuzzer.failures}))


if __name__ == "__main__":
    main(*sys.argv[1:])
