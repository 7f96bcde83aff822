"""Start and stop: what does not fit is refused before it is read, and an interrupted load leaves nothing behind."""

from __future__ import annotations

import gc
import logging
import random
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from qkv_engine import CapacityError, ConfigError, Engine, ModelError, loading, startup
from qkv_engine.config import EngineConfig
from qkv_engine.device import memory
from qkv_engine.device.memory import UNLIMITED, cgroup_headroom
from qkv_engine.models import hub, loader, random_weights
from qkv_engine.models.layers import Linear
from qkv_engine.models.registry import build_model, config_from_hf
from qkv_engine.models.shapes import SHAPES
from qkv_engine.presets import resolve_kv

from ..models.tiny import write_tiny

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model")


def open_tiny(folder: Path, **options: Any) -> Engine:
    return Engine(folder, **{"kv": "bf16", "kv_memory": "1MiB", "device": "cpu", "max_num_seqs": 4} | options)


def forbid(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    def called(*_: object, **__: object) -> None:
        raise AssertionError(f"{name} was called")

    monkeypatch.setattr(owner, name, called)


# Memory


@pytest.mark.parametrize("load_format", ["auto", "random"])
def test_weights_that_do_not_fit_are_not_read(folder: Path, load_format: str, monkeypatch: pytest.MonkeyPatch):
    forbid(monkeypatch, loading, "load_weights")
    monkeypatch.setattr(loading, "free_memory", lambda device: 30_000)
    with pytest.raises(CapacityError, match=r"takes \d+\.\d KiB in float32, 29\.3 KiB are free on cpu\. Try dtype bf"):
        open_tiny(folder, load_format=load_format)
    with pytest.raises(CapacityError, match=r"in bfloat16, .* Use a smaller model"):
        open_tiny(folder, load_format=load_format, dtype="bfloat16")


def test_a_shape_that_does_not_fit_is_refused_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loading, "free_memory", lambda device: 20 * 2**30)
    begun = time.monotonic()
    with pytest.raises(CapacityError, match=r"31\.9 GiB in float32, 20\.0 GiB are free"):
        Engine("llama-3.1-8b", load_format="random", device="cpu")
    assert time.monotonic() - begun < 5


def test_what_does_not_fit_is_not_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch):
    fetched: list[list[str]] = []

    def fetch(repo_id: str, revision: str | None, token: str | None, patterns: list[str]) -> Path:
        fetched.append(patterns)
        return folder

    monkeypatch.setattr(hub, "_fetch", fetch)
    monkeypatch.setattr(loading, "free_memory", lambda device: 1000)
    with pytest.raises(CapacityError, match="loading the weights"):
        Engine("org/name", device="cpu")
    assert fetched == [hub.CONFIG_FILES]


@pytest.mark.parametrize("name", SHAPES)
def test_bytes_of_weights_are_those_of_the_model(name: str):
    config = config_from_hf(SHAPES[name])
    parameters = {id(p): p.numel() for p in build_model(config).parameters()}
    counted = loader.weights_nbytes(config, torch.bfloat16) / 2
    # A head norm is kept once for every head.
    assert counted <= sum(parameters.values()) < 1.001 * counted + 8 * config.num_layers * config.hidden_size
    assert loader.load_nbytes(config, torch.bfloat16, torch.device("cuda")) == 2 * counted
    assert loader.load_nbytes(config, torch.bfloat16, CPU) == 2 * counted + 2 * config.vocab_size * config.hidden_size


def test_kv_memory_is_a_share_of_what_the_weights_leave(folder: Path, monkeypatch: pytest.MonkeyPatch):
    loaded, load = Event(), loading.load_weights

    def load_and_note(*args: Any, **options: Any) -> Any:
        model = load(*args, **options)
        loaded.set()
        return model

    monkeypatch.setattr(loading, "load_weights", load_and_note)
    for module in (loading, startup, memory):
        monkeypatch.setattr(module, "free_memory", lambda device: 40 * 2**20 if loaded.is_set() else 100 * 2**20)
    for kv_memory, most in (("50%", 20 * 2**20), (None, 10 * 2**20)):
        loaded.clear()
        with open_tiny(folder, kv_memory=kv_memory, max_num_seqs=4096) as engine:
            assert most - 2**20 < engine.stats().kv_bytes_total <= most


class FailingEmpty:
    """``torch.empty``, of which one call finds no memory."""

    def __init__(self, fails_at: int | None = None):
        self.num_calls, self._fails_at, self._empty = 0, fails_at, torch.empty

    def __call__(self, *args: Any, **options: Any) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls - 1 == self._fails_at:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
        return self._empty(*args, **options)


def test_memory_that_the_system_does_not_give_is_a_capacity_error(folder: Path, monkeypatch: pytest.MonkeyPatch):
    open_tiny(folder).close()  # some memory is asked for once a process
    counting = FailingEmpty()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", counting)
        open_tiny(folder).close()
    num_calls = counting.num_calls
    assert num_calls > 10
    messages = set()
    for number in range(num_calls):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", FailingEmpty(number))
            with pytest.raises(CapacityError) as caught:
                open_tiny(folder)
        assert caught.value.remedy
        messages.add(str(caught.value))
    assert any("the system gives no more memory to start with" in text for text in messages)


def test_other_errors_of_a_start_stay_what_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(startup, "Runner", fail)
    with pytest.raises(RuntimeError, match=r"^something else$"):
        open_tiny(folder)


def test_a_limit_of_the_shell_counts_as_memory():
    limited = ["sh", "-c", 'ulimit -v 6000000; exec "$@"', "sh", sys.executable, "-m", "qkv_engine"]
    found = subprocess.run([*limited, "chat", "--prompt", "hi", "--kv-memory", "8GiB"], capture_output=True, text=True)
    assert found.returncode == 3
    assert re.fullmatch(
        r"qkv-engine: error: --kv-memory='8GiB': 8\.0 GiB asked for, .* free on cpu\. Lower .*\n", found.stderr
    )


# Memory cgroups


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


def test_no_cgroups(tmp_path: Path):
    assert cgroup_headroom(tmp_path) == UNLIMITED
    write(tmp_path, {"proc/self/cgroup": "0::/a/b"})
    assert cgroup_headroom(tmp_path) == UNLIMITED


def test_version_2_in_a_container(tmp_path: Path):
    at = "sys/fs/cgroup/memory."
    stat = "anon 5\ninactive_file 70\nactive_file 9"
    write(tmp_path, {"proc/self/cgroup": "0::/", f"{at}max": 1000, f"{at}current": 400, f"{at}stat": stat})
    assert cgroup_headroom(tmp_path) == 670
    (tmp_path / f"{at}max").write_text("max\n")
    assert cgroup_headroom(tmp_path) == UNLIMITED


@pytest.mark.parametrize(("outer", "inner", "headroom"), [(1000, 300, 200), (250, 300, 150), ("max", 300, 200)])
def test_the_tightest_of_nested_groups_binds(tmp_path: Path, outer: object, inner: object, headroom: int):
    files: dict[str, object] = {"proc/self/cgroup": "0::/user.slice/session.scope"}
    for group, limit in (("user.slice", outer), ("user.slice/session.scope", inner)):
        at = f"sys/fs/cgroup/{group}/memory."
        files |= {f"{at}max": limit, f"{at}current": 100, f"{at}stat": "inactive_file 0"}
    assert cgroup_headroom(write(tmp_path, files)) == headroom


@pytest.mark.parametrize("seen_at", ["docker/abc/", "", "docker/"])
def test_version_1_wherever_the_group_is_mounted(tmp_path: Path, seen_at: str):
    """A container sees its own group as the mount, or the host's tree with its own path in it."""
    at = f"sys/fs/cgroup/memory/{seen_at}memory."
    lines = "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/docker/abc"
    stat = "inactive_file 1\ntotal_inactive_file 50"
    files = {f"{at}limit_in_bytes": 900, f"{at}usage_in_bytes": 400, f"{at}stat": stat, "proc/self/cgroup": lines}
    assert cgroup_headroom(write(tmp_path, files)) == 550
    (tmp_path / f"{at}limit_in_bytes").write_text("9223372036854771712")
    assert cgroup_headroom(tmp_path) == UNLIMITED


def test_a_path_out_of_the_namespace(tmp_path: Path):
    at = "sys/fs/cgroup/memory."
    files = {"proc/self/cgroup": "0::/../../x", f"{at}max": 100, f"{at}current": 150, f"{at}stat": "inactive_file 0"}
    assert cgroup_headroom(write(tmp_path, files)) == -50


# Context and device


def test_a_context_beyond_the_models_must_be_asked_for(folder: Path, caplog: pytest.LogCaptureFixture):
    with pytest.raises(ConfigError, match=r"max_model_len=513: the model was made for 512 tokens.*extend_context"):
        open_tiny(folder, max_model_len=513)
    with caplog.at_level(logging.WARNING, "qkv_engine"):
        with open_tiny(folder, max_model_len=512) as engine:
            assert engine.max_model_len == 512
        assert not caplog.records
        with open_tiny(folder, max_model_len=600, extend_context=True) as engine:
            assert engine.max_model_len == 600
    assert [r.getMessage() for r in caplog.records] == [
        "max_model_len 600 is beyond the 512 tokens the model was made for"
    ]


def test_shapes_obey_their_context_at_once(monkeypatch: pytest.MonkeyPatch):
    forbid(monkeypatch, loading, "load_weights")
    with pytest.raises(ConfigError, match="made for 4096 tokens"):
        Engine("llama-2-7b", load_format="random", max_model_len=4097, device="cpu")


@pytest.mark.parametrize(
    ("rope", "tokens"),
    [
        (None, 1000),
        ({"rope_type": "linear", "factor": 4.0}, 4000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 500}, 2000),
        ({"rope_type": "yarn", "factor": 4.0}, 4000),
        ({"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 500}, 1000),
        (SHAPES["llama-3.1-8b"]["rope_scaling"], 1000),
    ],
)
def test_the_context_after_rope_scaling(rope: dict[str, Any] | None, tokens: int):
    hf = SHAPES["llama-3.1-8b"] | {"max_position_embeddings": 1000, "rope_scaling": rope}
    assert config_from_hf(hf).max_context == tokens


@pytest.mark.parametrize(
    "name", ["cpu:7", "cpu:0", "tpu", "", "\ud800", "cuda:99999999999999999999", "cuda:-1", "meta"]
)
def test_devices_that_are_not_there(name: str):
    with pytest.raises(ConfigError, match=r"device=.*cuda:N"):
        loading.resolve_device(name)


def test_a_path_is_never_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    forbid(monkeypatch, hub, "download")
    monkeypatch.chdir(tmp_path)
    for model in ("/nope", "./nope", "../nope/x", "~/nope", "a/b/c", "nope/", "nope", Path("org/name"), Path("~/x")):
        with pytest.raises(ModelError, match="there is no such folder"):
            Engine(model)


# An interrupt while the model loads


def interrupted_in(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Ctrl-C comes to the main thread when the loading thread calls a function, which then takes a little longer."""
    function: Callable[..., Any] = getattr(owner, name)

    def interrupt(*args: Any, **options: Any) -> Any:
        assert threading.get_ident() != threading.main_thread().ident
        signal_main()
        time.sleep(0.2)
        return function(*args, **options)

    monkeypatch.setattr(owner, name, interrupt)


def signal_main() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.mark.parametrize(
    ("load_format", "step"),
    [("random", "_materialize"), ("auto", "_go_on_unless")],
)
def test_an_interrupted_load_ends_and_leaves_nothing(
    folder: Path, load_format: str, step: str, monkeypatch: pytest.MonkeyPatch
):
    gc.collect()
    tensors, threads = live_tensors(), live_threads()
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    packed: list[object] = []
    config = loader.read_config(folder)
    loader.num_parameters(config)  # counted by building, in the caller's thread
    loader.load_nbytes(config, torch.float32, CPU)
    monkeypatch.setattr(Linear, "pack", packed.append)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupted_in(patch, loader, step)
        open_tiny(folder, load_format=load_format)
    assert not packed, "the load went on"
    deadline = time.monotonic() + 10  # the thread has done its work, and is about to end
    while live_threads() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    gc.collect()
    assert live_tensors() <= tensors and live_threads() <= threads  # fewer where earlier tests' are gone now
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    monkeypatch.undo()
    with open_tiny(folder) as engine:
        assert engine.generate([[3, 4]])[0].finished


def live_threads() -> int:
    """Threads that run Python, whoever started them."""
    return len(sys._current_frames())


def live_tensors() -> int:
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


def test_a_load_that_is_stopped_says_so(folder: Path):
    for load_format in ("auto", "random"):
        source = loader.find_model(str(folder), load_format=load_format)
        with pytest.raises(CancelledError):
            loader.load_weights(source, dtype=torch.float32, device=CPU, load_format=load_format, stopped=lambda: True)


def test_random_weights_do_not_depend_on_the_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def weights() -> torch.Tensor:
        loaded = loader.load_model(str(folder), device=CPU, load_format="random")
        return loaded.model.get_parameter("model.embed_tokens.weight")

    whole = weights()
    monkeypatch.setattr(random_weights, "_PIECE", 256)
    assert torch.equal(whole, weights())


def test_started_config_is_what_was_asked(folder: Path):
    config = EngineConfig(model=str(folder), kv=resolve_kv("bf16"), kv_memory="1MiB", device="cpu", kv_quota=1)
    started = startup.start(config)
    assert (started.max_model_len, started.name) == (512, str(folder))
    started.core.free()


def test_interrupts_anywhere_in_a_start(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A hundred starts, each interrupted at a random moment: no thread, tensor or open file is left."""
    # An interrupt that falls into a finalizer or a callback of the collector is kept, with all its frames, by pytest.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    config = EngineConfig(model=folder, kv=resolve_kv("bf16"), kv_memory="1MiB", device="cpu", max_num_seqs=4)
    startup.start(config).core.free()
    begun = time.monotonic()
    startup.start(config).core.free()
    usual = time.monotonic() - begun
    gc.collect()
    before = live_tensors(), live_threads(), len(list(Path("/proc/self/fd").iterdir()))
    rng, interrupts = random.Random(0), 0

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(100):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, usual))
                startup.start(config).core.free()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    deadline = time.monotonic() + 10
    while live_threads() > before[1] and time.monotonic() < deadline:
        time.sleep(0.01)
    gc.collect()
    assert interrupts > 20
    after = live_tensors(), live_threads(), len(list(Path("/proc/self/fd").iterdir()))
    assert all(now <= then for now, then in zip(after, before, strict=True)), [
        traceback.format_stack(f) for f in sys._current_frames().values()
    ]
