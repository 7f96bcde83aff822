"""What several files of tests ask of a load: its progress bar, and tokens with weights unpacked and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from qkv_engine import Engine, SamplingParams
from qkv_engine.models import loader


def bar_of(load: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The length of the progress bar of ``load``, and how far it went."""
    bars = []

    @contextmanager
    def progress(total: int) -> Iterator[Callable[[int], None]]:
        read = list[int]()
        yield read.append
        bars.append((total, sum(read)))

    monkeypatch.setattr(loader, "progress", progress)
    load()
    ((total, read),) = bars
    return total, read


def check_tokens(
    plain: Path, folder: Path, ids: list[int], max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> list[list[int]]:
    """Greedy tokens of ``folder``, which are those of ``plain`` with its weights unpacked and with them kept."""
    params, tokens = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True), []
    for each, is_unpacked in ((plain, True), (folder, True), (folder, False)):
        monkeypatch.setattr(loader, "is_unpacked", lambda device, is_unpacked=is_unpacked: is_unpacked)
        with Engine(each, kv="fp32", kv_memory="8MiB", device="cpu", max_model_len=128) as engine:
            outputs = engine.generate([ids, ids[:3] * 10], params)
            tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1] == tokens[2]
    return tokens[0]
