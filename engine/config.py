"""What an engine is asked for: options with their bounds, sizes in words, KV presets. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import ConfigError

BLOCK_TOKENS = 128  # tokens of one request in one KV block (DESIGN 4)

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def _check_int(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError("out of range", field=field, value=value, remedy=f"Give an integer from {low} to {high}")


@dataclass(frozen=True)
class RungConfig:
    """One rung of a ladder: the format of K and of V, by name; one for all layers, or one a layer."""

    name: str
    k: str | tuple[str, ...]
    v: str | tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class KVConfig:
    """How KV blocks are stored: the rungs a block may step down, widest first, and when it does.

    The first ``sink`` tokens of a request stay on the first rung for life, and so do the newest ``recent`` ones until
    they are older. With ``eager`` a block goes to the last rung as soon as it may; otherwise blocks step down only
    when memory runs short. Admission counts requests on the last rung, or on ``admit_at`` for an operator who would
    rather queue than lose precision.
    """

    name: str
    rungs: tuple[RungConfig, ...]
    sink: int = 0
    recent: int = 0
    eager: bool = False
    admit_at: str | None = None

    def __post_init__(self) -> None:
        if not self.rungs:
            raise ConfigError("a ladder needs a rung", field="rungs", value=self.rungs)
        if self.sink not in (0, 1, 2, 4, 8, 16, 32, 64, 128):
            remedy = f"Give 0 or a power of two up to {BLOCK_TOKENS}, so that sinks tile a block"
            raise ConfigError("not supported", field="sink", value=self.sink, remedy=remedy)
        _check_int("recent", self.recent, 0, 2**20)


DENSE16 = RungConfig("dense16", "dense16", "dense16")


def uniform_rung(bits: int, group: int = 128) -> RungConfig:
    """KIVI's choice of axes: K in groups of tokens per channel, V in groups of channels per token."""
    return RungConfig(f"int{bits}", f"int{bits}-channel-{group}", f"int{bits}-token-{group}")


PRESETS: dict[str, KVConfig] = {
    preset.name: preset
    for preset in (
        KVConfig(name="bf16", rungs=(DENSE16,)),
        KVConfig(name="fp32", rungs=(RungConfig("dense32", "dense32", "dense32"),)),
        KVConfig(name="int8", rungs=(DENSE16, uniform_rung(8)), sink=32, eager=True),
        KVConfig(name="int4", rungs=(DENSE16, uniform_rung(4)), sink=32, eager=True),
        KVConfig(name="kivi-4", rungs=(DENSE16, uniform_rung(4)), recent=128, eager=True),
        KVConfig(name="kivi-2", rungs=(DENSE16, uniform_rung(2)), recent=128, eager=True),
        KVConfig(name="auto", rungs=(DENSE16, uniform_rung(8), uniform_rung(4)), sink=32),
    )
}
DEFAULT_KV = "auto"


def resolve_kv(kv: str | KVConfig) -> KVConfig:
    """The KV configuration a preset name or ``KVConfig`` stands for. Raises ``ConfigError`` for an unknown name."""
    if isinstance(kv, KVConfig):
        return kv
    if kv not in PRESETS:
        raise ConfigError("unknown KV preset", field="kv", value=kv, remedy=f"Choose from {', '.join(PRESETS)}")
    return PRESETS[kv]


def parse_size(size: int | str | float, *, field: str, free: int) -> int:
    """Bytes named by ``size``: an int (bytes), "20GiB", or a share of ``free`` bytes as a float in (0, 1] or "50%".

    Raises ``ConfigError`` for anything else.
    """
    remedy = 'Give bytes, a size such as "20GiB", or a share of free memory such as 0.5 or "50%"'
    if isinstance(size, bool) or not isinstance(size, int | float | str):
        raise ConfigError("not a size", field=field, value=size, remedy=remedy)
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[kmgt]?i?b|)\s*", size, re.IGNORECASE)
        if match is None:
            raise ConfigError("not a size", field=field, value=size, remedy=remedy)
        number, unit = float(match[1]), match[2].upper()
        if unit != "%" and unit not in _UNITS:
            raise ConfigError("unknown unit", field=field, value=size, remedy=remedy)
        nbytes = int(number / 100 * free) if unit == "%" else int(number * _UNITS[unit])
    elif isinstance(size, float):
        if not 0.0 < size <= 1.0:
            raise ConfigError("a share lies in (0, 1]", field=field, value=size, remedy=remedy)
        nbytes = int(size * free)
    else:
        nbytes = size
    if nbytes <= 0:
        raise ConfigError("must be positive", field=field, value=size, remedy=remedy)
    return nbytes


def format_size(nbytes: float) -> str:
    """``nbytes`` in words, three significant digits: 20.0 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options of ``Engine``, checked. Machine-dependent values are resolved by the engine at start."""

    model: str | None = None
    kv: KVConfig = PRESETS[DEFAULT_KV]
    kv_quota: float | None = None
    prefix_caching: bool = True
    kv_memory: int | str | float | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    cuda_graphs: bool = True
    load_format: str = "auto"
    revision: str | None = None
    token: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_num_seqs", 1, 4096),
            ("max_num_batched_tokens", 1, 2**20),
            ("seed", 0, 2**63 - 1),
        ):
            _check_int(name, getattr(self, name), low, high)
        if self.max_model_len is not None:
            _check_int("max_model_len", self.max_model_len, 2, 2**24)
        if self.kv_quota is not None and not (isinstance(self.kv_quota, float) and 0.0 < self.kv_quota <= 1.0):
            raise ConfigError("out of range", field="kv_quota", value=self.kv_quota, remedy="Give a share in (0, 1]")
        if not isinstance(self.cuda_graphs, bool):
            raise ConfigError("not a bool", field="cuda_graphs", value=self.cuda_graphs, remedy="Give True or False")
        if self.load_format not in ("auto", "random"):
            raise ConfigError("unknown", field="load_format", value=self.load_format, remedy='Use "auto" or "random"')
