"""``qkv-engine env``: versions, the device, the ladder of a preset, and how many tokens fit on each of its rungs."""

from __future__ import annotations

import argparse
import platform
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from qkv_engine import __version__
from qkv_engine.config import BLOCK_TOKENS, EngineConfig
from qkv_engine.errors import CapacityError
from qkv_engine.presets import resolve_kv
from qkv_engine.sizes import format_size, parse_size

from . import common, results
from .log import note
from .model import read_model, weight_dtype

if TYPE_CHECKING:
    import torch

    from qkv_engine.bench.table import Table
    from qkv_engine.device.layouts import Ladder

_PACKAGES = (
    "torch",
    "triton",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "msgspec",
    "jinja2",
    "rich",
    "prompt-toolkit",
)
_TABLES = ("rungs", "groups")  # facts that are tables
EPILOG = """\
Nothing is loaded but the model's configuration, so the figures are those of a
fresh start. Exit code 3: the model and its KV memory do not fit.

kv:
  sink, recent tokens   the first and the newest tokens of a request, which stay
                        on the first rung
  recent ratio          share of all its tokens that stays there, if more
  admission             the rung on which requests are counted: one starts while
                        all running ones and it would fit there
rungs, from the widest to the floor:
  k, v                  formats of keys and values, by layers
  block                 bytes of a block of 128 tokens in all layers
  bytes per token       of the whole context, of which a layer with a window
                        holds its window alone
  code bits             per KV element of those bytes; shared codes count once
  bits                  the same with all metadata counted
  states, state bytes   format and bytes of a request's states, if it has any
  capacity tokens       of one request whose blocks all stand on the rung
  capacity requests     of the whole context together, if layers have windows
                        or states
  host tokens           of prefixes in --host-memory, which keeps all blocks
groups, if some layers see a window of tokens or have other heads:
  block                 bytes of a block of 128 tokens in these layers, at first
  most blocks           of a request that decodes, whatever its length
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``env``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    common.add_model_arguments(parser, caches_prefixes=True)
    results.add_arguments(parser.add_argument_group("output").add_argument)


def run(args: argparse.Namespace) -> int:
    """Print what ``args`` ask about and return the exit code."""
    results.check_targets(args)
    facts = {"versions": _versions(), **_capacity(args)}
    results.deliver(args, lambda form, width: _render(facts, form, width), "facts")
    if not (shortage := facts["model"]["does_not_fit"]):
        return common.EXIT_OK
    note(f"{facts['model']['name']} does not fit here: {shortage}")
    return common.EXIT_CAPACITY


def _versions() -> dict[str, str]:
    """Installed versions, read from their metadata: importing ten libraries would take seconds."""
    found = {"qkv-engine": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _capacity(args: argparse.Namespace) -> dict[str, Any]:
    common.load_torch()
    from qkv_engine.bench.sizing import make_ladder
    from qkv_engine.device.cpu.threads import choose_threads
    from qkv_engine.loading import check_context, resolve_device
    from qkv_engine.models.loader import num_parameters, weights_nbytes

    device, config = resolve_device(args.device or "auto"), read_model(args, args.model).config
    num_ranks = args.tensor_parallel or 1
    check_context(config, args.max_model_len, bool(args.extend_context))
    dtype = weight_dtype(args.dtype or "auto", config, device)
    context = args.max_model_len or config.max_position_embeddings
    kv_config = resolve_kv(args.kv, args.state_dtype)
    ladder = make_ladder(kv_config, config, dtype, num_ranks, context)
    facts = _device(device)
    weights, free = weights_nbytes(config, dtype, num_ranks, device), facts["free_bytes"]
    threads = choose_threads(args.num_threads, weights)
    facts |= {"threads": threads.number, "threads_reason": threads.reason}
    nbytes = _kv_nbytes(args, ladder, context, weights, device)
    capacities, reserve, shortage = _capacities(ladder, nbytes, context)
    host = _host_nbytes(args)
    excess = _excess(weights, nbytes, free) or (shortage and common.describe_with(args)(shortage))
    model = {
        "name": args.model or "demo",
        "architecture": config.architecture,
        "parameters": num_parameters(config),
        "dtype": str(dtype).removeprefix("torch."),
        "weights_bytes": weights,
        "context_tokens": context,
        "does_not_fit": excess,
    }
    kv = {
        "preset": ladder.name,
        "policy": _policy(ladder),
        "sink_tokens": ladder.sink,
        "recent_tokens": ladder.window.num_tokens,
        "recent_ratio": float(ladder.window.ratio),
        "admission": _admission(ladder),
        "memory_bytes": nbytes,
        "reserve_bytes": reserve,
        "host_memory_bytes": host,
        **_slots(ladder),
        "rungs": _rungs(ladder, capacities, context, None if host is None else host // num_ranks),
    }
    if len(ladder.groups) > 1 or ladder.main.visible is not None:
        kv["groups"] = _groups(ladder)
    return {"device": facts, "model": model, "kv": kv}


def _excess(weights: int, kv_nbytes: int, free: int) -> str | None:
    """The reason why the model cannot be started here; None if it can."""
    if weights > free:
        return f"weights need {format_size(weights)}, {format_size(free)} are free"
    if weights + kv_nbytes > free:
        left = format_size(free - weights)
        return f"KV memory of {format_size(kv_nbytes)}, {left} are free beside the weights"
    return None


def _policy(ladder: Ladder) -> str:
    """When blocks step down, in words that begin with the policy's name."""
    if all(len(group.rungs) == 1 for group in ladder.groups):
        return "fixed: blocks never step down"
    if ladder.eager:
        return f"eager: blocks go to {ladder.narrowest.name} as soon as they may"
    return "pressure: blocks step down when memory runs short"


def _admission(ladder: Ladder) -> str:
    name = ladder.names[ladder.admit_at]
    return f"a request starts while all running ones and it fit with their blocks on {name}"


def _kv_nbytes(args: argparse.Namespace, ladder: Ladder, context: int, weights: int, device: torch.device) -> int:
    """KV memory as the engine would choose it, once the weights have taken theirs."""
    from qkv_engine.device.memory import default_kv_memory, free_memory
    from qkv_engine.startup import most_nbytes

    if args.kv_memory is not None:
        left = max(100, free_memory(device) - weights)  # a share of nothing is no size; 1 % of this is
        return parse_size(args.kv_memory, field="kv_memory", free=left)
    most = most_nbytes(ladder, EngineConfig.max_num_seqs, context, EngineConfig.max_num_batched_tokens)
    taken = weights if device.type == "cuda" else 0  # the share of a computer's memory is small enough for both
    return max(0, min(most, default_kv_memory(device, most + taken) - taken))


def _host_nbytes(args: argparse.Namespace) -> int | None:
    """Host memory of all ranks, if some is asked for."""
    import torch

    from qkv_engine.device.memory import free_memory

    if args.host_memory is None:
        return None
    return parse_size(args.host_memory, field="host_memory", free=max(100, free_memory(torch.device("cpu"))))


def _capacities(ladder: Ladder, nbytes: int, context: int) -> tuple[list[dict[str, int]], int, CapacityError | None]:
    """What ``nbytes`` hold on each rung, bytes kept for steps down, and the error if no block fits.

    Tokens of one request, at most ``context`` where all layers have windows; with windows also requests of ``context``.
    """
    from qkv_engine.kv.slabs import make_tables

    try:
        tables = make_tables(ladder.spec, nbytes)
    except CapacityError as error:
        return [{"capacity_tokens": 0}] * len(ladder.names), 0, error
    found = [{"capacity_tokens": tables.max_tokens(rung, context=context)} for rung in range(len(ladder.names))]
    if ladder.spec.has_windows or ladder.spec.has_states:
        for rung, row in enumerate(found):
            row["capacity_requests"] = tables.max_requests(context, rung)
    return found, tables.arena.reserve_nbytes, None


def _slots(ladder: Ladder) -> dict[str, int]:
    """Bytes of each slot that a request has beside its blocks, in all groups of layers."""
    found: dict[str, int] = {}
    for slot in (slot for group in ladder.groups for slot in group.slots):
        name = f"request_{slot.name}_bytes"
        found[name] = found.get(name, 0) + slot.nbytes
    return found


def _rungs(
    ladder: Ladder, capacities: Sequence[dict[str, int]], context: int, host: int | None
) -> list[dict[str, Any]]:
    """A row for each rung, in requests of ``context`` tokens; ``host``: bytes of host memory of a rank."""
    from qkv_engine.device.per_token import per_token

    rows = []
    for number, (name, capacity) in enumerate(zip(ladder.names, capacities, strict=True)):
        formats, token = ladder.stored(number), per_token(ladder, number, context)
        rows.append(
            {
                "rung": name,
                "k": by_layers(formats.formats("k", len(ladder.places))),
                "v": by_layers(formats.formats("v", len(ladder.places))),
                "block_bytes": ladder.block_nbytes(number),
                "bytes_per_token": round(token.nbytes, 1),
                "code_bits": token.code_bits,
                "effective_bits": token.bits,
                **_states(ladder, number),
                **capacity,
                **({} if host is None else {"host_tokens": host // ladder.block_nbytes(number) * BLOCK_TOKENS}),
            }
        )
    return rows


def _states(ladder: Ladder, number: int) -> dict[str, Any]:
    """The format and the bytes of a request's states on a rung, if it has some."""
    spec = ladder.main.spec
    step = spec.state_floors[number] if spec.state_floors else 0
    forms = [state.forms[step] for state in ladder.states]
    if not forms:
        return {}
    return {"states": forms[0].format.name, "state_bytes": sum(form.nbytes(ladder.dtype) for form in forms)}


def _groups(ladder: Ladder) -> list[dict[str, Any]]:
    """Layers that have block tables of their own; with a window, what they hold of a request while it decodes."""
    return [
        {
            "layers": _ranges(group.layers),
            "window": "all" if group.visible is None else group.visible,
            "rungs": ", ".join(rung.name for rung in group.rungs),
            "block_bytes": group.widest.block_nbytes,
            "bytes_per_token": group.widest.token_nbytes,
            "most_blocks": "any" if group.visible is None else group.spec.most_visible,
        }
        for group in ladder.groups
    ]


def _ranges(numbers: Sequence[int]) -> str:
    """Rising numbers, those in a row together: "0-4, 6-10, 12"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts)


def by_layers(names: Sequence[str]) -> str:
    """The formats of all layers, those alike together: "layers 0-2, 4-6: int4-token-128, layers 3, 7: dense16".

    Two formats by turns are one entry: "layers 3-7: int1-token-64-subordinate, int1-token-64 by turns".
    """
    layers, first = defaultdict[str, list[int]](list), 0
    while first < len(names):
        alike, turns = _repeats(names, first, 1), _repeats(names, first, 2)
        by_turns = alike == 1 and turns > 2
        number = turns if by_turns else alike
        name = f"{names[first]}, {names[first + 1]} by turns" if by_turns else names[first]
        layers[name] += range(first, first + number)
        first += number
    return ", ".join(f"layer{'s' if len(found) > 1 else ''} {_ranges(found)}: {name}" for name, found in layers.items())


def _repeats(names: Sequence[str], first: int, period: int) -> int:
    """Names from ``first`` on that repeat the first ``period`` of them."""
    further = range(first + period, len(names))
    return period + sum(1 for _ in takewhile(lambda i: names[i] == names[i - period], further))


def _device(device: torch.device) -> dict[str, Any]:
    import torch

    from qkv_engine.bench.provenance import device_name, num_cpus
    from qkv_engine.device.memory import free_memory

    facts: dict[str, Any] = {"name": str(device), "product": device_name(str(device))}
    facts["free_bytes"] = free_memory(device)
    if device.type == "cuda":
        facts["total_bytes"] = torch.cuda.get_device_properties(device).total_memory
    return {**facts, "cpus": num_cpus()}


@dataclass(frozen=True)
class _Fact:
    """One line of ``env``'s CSV; of a rung the section is "kv.NAME"."""

    section: str
    name: str
    value: Any


def _render(facts: dict[str, Any], form: str, width: int | None) -> str:
    from qkv_engine.bench import report, table

    if form in ("json", "jsonl"):
        return report.as_json(facts, indent=2 if form == "json" else None) + "\n"
    if form == "csv":
        return report.as_csv(list(_flat(facts)))
    reason = facts["device"]["threads_reason"]
    shown = [
        (section, name, f"{value} ({reason})" if name == "threads" else _in_words(name, value))
        for section, name, value in _entries(facts)
        if name != "threads_reason"
    ]
    tables = [_facts_table(facts["kv"][name]) for name in _TABLES if name in facts["kv"]]
    if form == "md":
        cells = [[section, _label(name), value] for section, name, value in shown]
        listing = table.Table("", ["section", "name", "value"], cells, [], group=None, text=("name", "value"))
        return "\n".join(table.as_markdown(each) for each in (listing, *tables))
    longest = max(len(_label(name)) for _, name, _ in shown)
    parts = []
    for section in facts:
        entries = [(f"{_label(name):{longest}}", value) for found, name, value in shown if found == section]
        parts.append(table.as_listing(section, entries, width))
    return "\n".join(["".join(parts), *(table.as_text(each, width) for each in tables)])


def _entries(facts: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Section, name and value of every fact but those in tables; facts without a value are left out."""
    for section, entries in facts.items():
        for name, value in entries.items():
            if name not in _TABLES and value is not None:
                yield section, name, value


def _flat(facts: dict[str, Any]) -> Iterator[_Fact]:
    for entry in _entries(facts):
        yield _Fact(*entry)
    for rung in facts["kv"]["rungs"]:
        for name, value in rung.items():
            yield _Fact(f"kv.{rung['rung']}", name, value)
    for number, group in enumerate(facts["kv"].get("groups", ())):
        for name, value in group.items():
            yield _Fact(f"kv.group {number}", name, value)


def _facts_table(rows: list[dict[str, Any]]) -> Table:
    from qkv_engine.bench.table import Table

    headers = [_label(name) for name in rows[0]]
    cells = [[_in_words(name, value) for name, value in row.items()] for row in rows]
    return Table(
        "",
        headers,
        cells,
        [],
        group=None,
        text=("k", "v", "layers", "rungs"),
        spare=("block", "code bits", "bits", "v", "k", "bytes per token"),
    )


def _label(name: str) -> str:
    return name.removesuffix("_bytes").removeprefix("effective_").replace("_", " ")


def _in_words(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return format_size(value)
    if name.endswith("_bits"):
        return f"{value:.2f}"
    return f"{value:,.10g}" if isinstance(value, int | float) else str(value)
