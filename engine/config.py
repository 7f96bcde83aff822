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


@dataclass(frozen=True, kw_only=True)
class KVConfig:
    """How KV blocks are stored: the rungs a block may stand on, widest first, by format name."""

    name: str
    rungs: tuple[str, ...]


PRESETS: dict[str, KVConfig] = {
    "bf16": KVConfig(name="bf16", rungs=("dense16",)),
    "fp32": KVConfig(name="fp32", rungs=("dense32",)),
}
DEFAULT_KV = "bf16"


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
    kv_memory: int | str | float | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
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
        if self.load_format not in ("auto", "random"):
            raise ConfigError("unknown", field="load_format", value=self.load_format, remedy='Use "auto" or "random"')


def _check_int(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError("out of range", field=field, value=value, remedy=f"Give an integer from {low} to {high}")
