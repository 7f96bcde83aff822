"""The tables of a chat: its commands, its parameters, the engine's figures, the KV memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from rich.text import Text

from qkv_engine.request import SamplingParams
from qkv_engine.sizes import format_size

from ..text import count, one_line
from .params import SETTABLE

if TYPE_CHECKING:
    from rich.console import Console

    from qkv_engine.metrics import EngineStats

    from .session import Turn

_ROOM = 36  # columns that a text beside its name needs, or it goes below


def print_help(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    """Names and their meanings."""
    _print_rows(console, [(name, Text(meaning)) for name, meaning in rows])


def print_params(console: Console, params: SamplingParams) -> None:
    """The parameters that can be set; bold what differs from the defaults of ``SamplingParams``."""
    plain, rows = SamplingParams(), []
    for name in SETTABLE:
        value = getattr(params, name)
        rows.append((name, Text(repr(value), style="" if value == getattr(plain, name) else "bold")))
    _print_rows(console, rows)


def print_history(console: Console, messages: Iterable[Mapping[str, str]]) -> None:
    """The messages of a conversation, a line each, with the number of its turn."""
    turn = 0
    for message in messages:
        turn += message["role"] == "user"
        line = Text(f"{turn:>3} {'you' if message['role'] == 'user' else 'model':5} {one_line(message['content'])}")
        line.truncate(console.width, overflow="ellipsis")
        console.print(line)


def print_stats(console: Console, stats: EngineStats) -> None:
    """What the engine is and has done, for people."""
    rows = {
        "engine": f"{stats.model} on {stats.device} in {stats.dtype}, {count(stats.num_threads, 'CPU thread')}",
        "KV": f"{stats.kv}, {format_size(stats.kv_bytes_used)} of {format_size(stats.kv_bytes_total)} in use (see /kv)",
        "context": f"{stats.max_model_len:,} tokens",
        "requests now": f"{stats.num_running:,} running, {stats.num_waiting:,} waiting",
        "requests so far": f"{stats.num_requests:,}: {stats.num_finished:,} finished, {stats.num_failed:,} failed, "
        f"{stats.num_refused:,} refused",
        "steps": f"{stats.num_steps:,}",
        "tokens": f"{stats.prompt_tokens:,} of prompts, {stats.generation_tokens:,} generated",
        "prefix cache": f"had {stats.prefix_hit_tokens:,} of {stats.prefix_query_tokens:,} prompt tokens",
        "preemptions": f"{stats.num_preemptions:,}",
        "blocks stepped down": _by_rung(stats.demotions),
        "  of cached ones": _by_rung(stats.idle_demotions),
    }
    _print_rows(console, [(name, Text(text)) for name, text in rows.items()])


def print_kv(console: Console, stats: EngineStats, last: Turn | None) -> None:
    """How the KV memory is used, and by the chat's ``last`` turn."""
    floor = f", {stats.kv_tokens_floor:,} at its floor" if stats.kv_tokens_floor > stats.kv_tokens_capacity else ""
    groups = {f"  of group {index}": text for index, text in enumerate(_groups(stats))}
    rows = {
        "preset": stats.kv,
        "memory": f"{format_size(stats.kv_bytes_total)}, {stats.kv_tokens_capacity:,} tokens{floor}",
        "in use now": f"{format_size(stats.kv_bytes_used)}, at most {format_size(stats.kv_bytes_peak)} so far",
        "kept for reuse": format_size(stats.kv_bytes_cached),
        "reserve": format_size(stats.kv_bytes_reserve),
        "blocks": _by_rung(stats.kv_blocks),
        **groups,
        **({"states": _by_rung(stats.kv_states)} if stats.kv_states else {}),
        "stepped down": _by_rung(stats.demotions),
        "  for reuse": _by_rung(stats.idle_demotions),
        "precision": f"{stats.effective_bits:.4g} bits an element, metadata counted",
    }
    if stats.kv_bytes_state:
        checkpoints = format_size(stats.kv_bytes_checkpoints)
        rows["states"] = f"{format_size(stats.kv_bytes_state)} of the most so far; {checkpoints} in checkpoints now"
    if stats.host_bytes_total:
        used = f"{format_size(stats.host_bytes_used)} of {format_size(stats.host_bytes_total)}"
        rows["host memory"] = f"{used} in use, {stats.host_fetched_tokens:,} tokens came back"
    if stats.store_bytes_total:
        used = f"{format_size(stats.store_bytes_used)} of {format_size(stats.store_bytes_total)}"
        rows["KV store"] = f"{used} in use, {stats.store_hit_tokens:,} tokens came from there"
    if stats.basis_miss is not None:
        rows["basis miss"] = f"{stats.basis_miss:.2f} times the energy of calibration"
    if last is not None:
        share = last.context_tokens / stats.max_model_len
        context = f"{last.context_tokens:,} of {stats.max_model_len:,} tokens ({share:.0%} of the context)"
        rows["this chat"] = f"{format_size(last.kv_nbytes)}, {context}"
    _print_rows(console, [(name, Text(text)) for name, text in rows.items()])


def _groups(stats: EngineStats) -> Iterator[str]:
    """Blocks and bytes of each group of layers, and what its layers see."""
    groups = zip(stats.kv_group_blocks, stats.kv_group_bytes, stats.kv_group_windows, strict=True)
    for blocks, nbytes, window in groups:
        seen = "all tokens" if window is None else f"the last {window:,} tokens"
        yield f"{_by_rung(blocks)}; {format_size(nbytes)}, in layers that see {seen}"


def _by_rung(blocks: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {rung}" for rung, number in blocks.items()) or "none"


def _print_rows(console: Console, rows: list[tuple[str, Text]]) -> None:
    """Names in one column and texts in another; on a narrow screen each text below its name.

    No line is padded: a screen that becomes narrower would wrap the spaces, too.
    """
    column = max(len(name) for name, _ in rows)
    is_narrow = console.width < column + _ROOM
    indent = " " * (4 if is_narrow else column + 2)
    for name, text in rows:
        lines = [Text.assemble(indent, line) for line in text.wrap(console, console.width - len(indent))]
        if is_narrow:
            lines.insert(0, Text(name))
        else:
            lines[0] = Text.assemble(f"{name:{len(indent)}}", lines[0][len(indent) :])
        for line in lines:
            line.rstrip()
            console.print(line)
