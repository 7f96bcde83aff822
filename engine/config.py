"""Engine options with their bounds, and ladders of rungs. No torch here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from .errors import ConfigError
from .layer_schedule import LayerSchedule
from .sizes import MAX_SIZE, parse_size
from .window import RecentWindow

if TYPE_CHECKING:
    from .fingerprint import ModelFingerprint

MAX_MS = 60_000.0  # of a limit of time: a minute, beyond which nobody waits for a token
BLOCK_TOKENS = 128  # tokens of one request in one KV block
MAX_RUNGS = 16  # of a ladder; each rung in use has one slab that is not full
STATE_DTYPES = ("float32", "int16", "int8")  # how states of layers without KV are stored, the widest first
MAX_NAME_CHARS = 64  # of a ladder's or a rung's name, shown in tables and every output


def _check_int(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError("not an integer", field=field, value=value, remedy=f"Give an integer from {low} to {high}")
    if not low <= value <= high:
        raise ConfigError("out of range", field=field, value=value, remedy=f"Give an integer from {low} to {high}")


def _check_ratio(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError("not a ratio", field=field, value=value, remedy="Give a number from 0 to below 1")


def _check_ms(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_MS:
        remedy = f"Give a number of milliseconds above 0, at most {MAX_MS:,.0f}"
        raise ConfigError("out of range", field=field, value=value, remedy=remedy)


def _check_flag(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError("not a bool", field=field, value=value, remedy="Give True or False")


def _check_text(field: str, value: object) -> None:
    if not isinstance(value, str):
        raise ConfigError("not a string", field=field, value=value, remedy="Give a string")


def _check_name(field: str, value: object) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME_CHARS or not value.isprintable():
        remedy = f"Give a string of 1 to {MAX_NAME_CHARS} printable characters"
        raise ConfigError("not a name", field=field, value=value, remedy=remedy)


@dataclass(frozen=True)
class RungConfig:
    """One rung of a ladder: how a block's K and V are stored.

    Raises ``ConfigError`` for anything but names; whether formats of these names exist and fit a model is checked
    when a ladder is built for it.

    Fields
        name: of the rung, as ``kv_floor`` and ``KVUsage`` have it.
        k, v: format such as "dense16" or "int4-channel-128": one for all layers, a tuple with one a layer, or a
            ``LayerSchedule`` for any number of them.
    """

    name: str
    k: str | tuple[str, ...] | LayerSchedule
    v: str | tuple[str, ...] | LayerSchedule

    def __post_init__(self) -> None:
        _check_name("rung", self.name)
        for field in ("k", "v"):
            value = getattr(self, field)
            if isinstance(value, LayerSchedule):
                continue
            names = value if isinstance(value, tuple) else (value,)
            if not names or not all(isinstance(name, str) for name in names):
                remedy = 'Give the name of a format such as "int4-channel-128", or a tuple of one name a layer'
                raise ConfigError("not a format", field=field, value=value, remedy=remedy)

    def formats(self, side: Literal["k", "v"], num_layers: int) -> tuple[str, ...]:
        """The formats of K or of V, layer by layer. Raises ``ConfigError`` if they are given for other layers."""
        names = self.k if side == "k" else self.v
        if isinstance(names, LayerSchedule):
            return names.formats(num_layers)
        if isinstance(names, str):
            return (names,) * num_layers
        if len(names) != num_layers:
            remedy = "Give one format for all layers, or one a layer"
            message = f"{len(names)} formats for {num_layers} layers"
            raise ConfigError(message, field="rung", value=self.name, remedy=remedy)
        return names


@dataclass(frozen=True)
class BasesFile:
    """A file of bases, in which a ladder stores K and V, by its place and its contents.

    Raises ``ConfigError`` for anything but a path and a digest; the file is read when the weights are loaded.

    Fields
        path: of the safetensors file, which lies beside the plan.
        digest: SHA-256 of its bytes, in hex; another file is refused.
    """

    path: str
    digest: str

    def __post_init__(self) -> None:
        _check_text("path", self.path)
        if not isinstance(self.digest, str) or not re.fullmatch("[0-9a-f]{64}", self.digest):
            remedy = "Give the 64 lower-case hex digits of a SHA-256"
            raise ConfigError("not a digest", field="digest", value=self.digest, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class KVConfig:
    """A ladder: the rungs that KV blocks may step down, and when they do.

    Raises ``ConfigError`` for a value of the wrong type or out of range.

    Fields
        name: of the ladder, as tables show it.
        rungs: 1 to 16 ``RungConfig``, most bits first.
        sink: first tokens of a request, which stay on the first rung for life: 0 or a power of two up to 128.
        recent: newest tokens of a request, which stay on the first rung until they are older; 0 to 1,048,576.
        recent_ratio: share of a request's computed tokens that stays so if it is more than ``recent``; 0 to below 1.
        eager: True: a block goes to the last rung as soon as it may; False: only when memory runs short.
        admit_at: rung on which admission counts requests; None for the last. A rung with more bits makes requests
            queue rather than lose precision.
        narrow_windows: True: layers that see a window of tokens step down to all rungs, as the others do; False: to
            those of at least 8 bits, since their blocks are few.
        model: fingerprint of the only model that the ladder was made for, as a plan file has it; None for any.
        key_scale: divisors of K by layer, KV head and rotary pair, which the weights take in when they are loaded;
            None for keys as the model has them.
        bases: file of the bases in which K and V are stored; None for channels as the model has them. Keys are divided
            by ``key_scale`` first.
        state_dtype: how recurrent states of a hybrid are stored: "float32", or codes of "int16" or "int8"; or what they
            step down behind the blocks, None for "float32,int16" if those do when memory runs short, else "float32".
    """

    name: str
    rungs: tuple[RungConfig, ...]
    sink: int = 0
    recent: int = 0
    recent_ratio: float = 0.0
    eager: bool = False
    admit_at: str | None = None
    narrow_windows: bool = False
    model: ModelFingerprint | None = None
    key_scale: tuple[tuple[tuple[float, ...], ...], ...] | None = None
    bases: BasesFile | None = None
    state_dtype: str | None = None

    def __post_init__(self) -> None:
        _check_name("name", self.name)
        self._check_rungs()
        if type(self.sink) is not int or self.sink not in (0, 1, 2, 4, 8, 16, 32, 64, 128):
            remedy = f"Give 0 or a power of two up to {BLOCK_TOKENS}, so that sinks tile a block"
            raise ConfigError("not supported", field="sink", value=self.sink, remedy=remedy)
        _check_int("recent", self.recent, 0, 2**20)
        _check_ratio("recent_ratio", self.recent_ratio)
        _check_flag("eager", self.eager)
        _check_flag("narrow_windows", self.narrow_windows)
        if self.model is not None:
            self._check_fingerprint()
        if self.bases is not None and not isinstance(self.bases, BasesFile):
            remedy = "Give None, or BasesFile(path, digest)"
            raise ConfigError("not a file of bases", field="bases", value=self.bases, remedy=remedy)
        self._check_states()
        names = [rung.name for rung in self.rungs]
        if self.admit_at is not None and (not isinstance(self.admit_at, str) or self.admit_at not in names):
            remedy = f"Choose from {', '.join(names)}, or None for the last rung"
            raise ConfigError("no rung of this ladder", field="admit_at", value=self.admit_at, remedy=remedy)

    @property
    def steps_down_late(self) -> bool:
        """Whether blocks step down when memory runs short."""
        return len(self.rungs) > 1 and not self.eager

    @property
    def states(self) -> tuple[str, ...]:
        """The formats that recurrent states step down, widest first."""
        return STATE_DTYPES[: 1 + self.steps_down_late] if self.state_dtype is None else (*self.state_dtype.split(","),)

    def _check_states(self) -> None:
        names = str("float32" if self.state_dtype is None else self.state_dtype).split(",")
        if names != [name for name in STATE_DTYPES if name in names]:
            remedy = f"Use {', '.join(STATE_DTYPES)}, or several of them, widest first, as in float32,int16"
            raise ConfigError("unknown", field="state_dtype", value=self.state_dtype, remedy=remedy)
        if len(names) > 1 and not self.steps_down_late:
            message = f"states step down behind blocks, and those of {self.name} do not when memory runs short"
            remedy = f"Name one format, such as {names[-1]}, or use a ladder such as auto"
            raise ConfigError(message, field="state_dtype", value=self.state_dtype, remedy=remedy)

    @property
    def window(self) -> RecentWindow:
        """``recent`` and ``recent_ratio`` as one window; the ratio is exact, so 0.1 is a tenth."""
        return RecentWindow.of(self.recent, Fraction(str(float(self.recent_ratio))))

    def _check_rungs(self) -> None:
        rungs, remedy = self.rungs, f"Give a tuple of 1 to {MAX_RUNGS} RungConfig, widest first"
        if not isinstance(rungs, tuple) or not all(isinstance(rung, RungConfig) for rung in rungs):
            raise ConfigError("not rungs", field="rungs", value=rungs, remedy=remedy)
        if not 1 <= len(rungs) <= MAX_RUNGS:
            raise ConfigError(f"a ladder of {len(rungs)} rungs", field="rungs", value=rungs, remedy=remedy)
        if len({rung.name for rung in rungs}) < len(rungs):
            remedy = "Give each rung a name of its own"
            raise ConfigError("two rungs have one name", field="rungs", value=[r.name for r in rungs], remedy=remedy)

    def _check_fingerprint(self) -> None:
        from .fingerprint import ModelFingerprint  # takes msgspec, which --help does without

        if not isinstance(self.model, ModelFingerprint):
            remedy = "Give None, or the path of a plan file in the ladder's place"
            raise ConfigError("not a fingerprint", field="model", value=self.model, remedy=remedy)


DENSE16 = RungConfig("dense16", "dense16", "dense16")

_INTEGERS = {
    "max_num_seqs": (1, 4096),
    "max_num_batched_tokens": (1, 2**20),
    "seed": (0, 2**63 - 1),
    "tensor_parallel": (1, 64),
}
WARM_UPS = ("lazy", "full")
WEIGHTS = ("int8", "int4", "fp8")  # what a plain checkpoint can be quantized to while it is read
MAX_CONTEXT = 2**24  # tokens of a request
_FLAGS = ("prefix_caching", "resizable", "extend_context", "cuda_graphs", "deterministic")
_TEXTS = ("dtype", "device", "load_format", "warm_up")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A load for which weights and KV are stored so that both fit in one budget of memory.

    Raises ``ConfigError`` for a value of the wrong type or out of range.

    Fields
        context: tokens of each request, prompt and output together, 2 to 16,777,216; None for the model's own context.
        requests: requests that run at once, 1 to 4,096.
        memory: bytes for weights and KV together, a size such as "24GiB", or a share of the memory that is free; None
            for what the device has. Of each GPU where several share the model.
    """

    context: int | None = None
    requests: int = 1
    memory: int | str | float | None = None

    def __post_init__(self) -> None:
        if self.context is not None:
            _check_int("context", self.context, 2, MAX_CONTEXT)
        _check_int("requests", self.requests, *_INTEGERS["max_num_seqs"])
        if self.memory is not None:
            parse_size(self.memory, field="memory", free=MAX_SIZE)


_CHOSEN = {  # options that a fit chooses, each with what to do instead
    "kv": "Leave kv or fit out",
    "weights": "Leave weights or fit out",
    "kv_memory": "Leave it out: the memory of fit is for weights and KV together",
    "max_model_len": "Leave it out: the context of fit is that of the longest request",
}


def check_beside_fit(fit: Fit | None, options: Mapping[str, object]) -> None:
    """Raises ``ConfigError`` for one of the ``options`` of ``Engine`` that is given beside a fit which chooses it."""
    for field, remedy in _CHOSEN.items():
        value = options.get(field)
        if fit is not None and value is not None:
            shown = value.name if isinstance(value, KVConfig) else value
            raise ConfigError("fit chooses it", field=field, value=shown, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options of ``Engine``, checked for type and range; ``ConfigError`` names the one that is wrong.

    Values that depend on the machine or the model are resolved and checked by the engine at start.
    """

    kv: KVConfig
    model: str | os.PathLike[str] | None = None
    fit: Fit | None = None
    kv_quota: float | None = None
    prefix_caching: bool = True
    resizable: bool = False
    kv_memory: int | str | float | None = None
    host_memory: int | str | float | None = None
    kv_store: str | os.PathLike[str] | None = None
    kv_store_size: int | str | float | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    extend_context: bool = False
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_itl_ms: float | None = None
    deterministic: bool = False
    tensor_parallel: int = 1
    cuda_graphs: bool = True
    warm_up: str = "lazy"
    num_threads: int | None = None
    load_format: str = "auto"
    weights: str | None = None
    revision: str | None = None
    token: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _check_model(self.model)
        if not isinstance(self.kv, KVConfig):
            raise ConfigError("not a KVConfig", field="kv", value=self.kv, remedy="resolve_kv makes one of a name")
        if self.fit is not None and not isinstance(self.fit, Fit):
            remedy = "Give Fit(context=..., requests=...), or None"
            raise ConfigError("not a Fit", field="fit", value=self.fit, remedy=remedy)
        if self.kv_quota is not None:
            _check_share("kv_quota", self.kv_quota)
        if self.kv_memory is not None:
            parse_size(self.kv_memory, field="kv_memory", free=MAX_SIZE)
        if self.host_memory is not None:
            _check_host_memory(self.host_memory, self.prefix_caching)
        _check_store(self.kv_store, self.kv_store_size, self.prefix_caching)
        for name, (low, high) in _INTEGERS.items():
            _check_int(name, getattr(self, name), low, high)
        if self.max_model_len is not None:
            _check_int("max_model_len", self.max_model_len, 2, MAX_CONTEXT)
        if self.max_itl_ms is not None:
            _check_ms("max_itl_ms", self.max_itl_ms)
        if self.num_threads is not None:
            _check_int("num_threads", self.num_threads, 1, 1024)
        for name in _FLAGS:
            _check_flag(name, getattr(self, name))
        for name in _TEXTS:
            _check_text(name, getattr(self, name))
        for name in ("revision", "weights"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        if self.token is not None and not isinstance(self.token, str):  # a secret: its value stays out of the message
            raise ConfigError("must be a string", field="token", value=type(self.token).__name__)
        if self.warm_up not in WARM_UPS:
            remedy = f"Use {' or '.join(WARM_UPS)}"
            raise ConfigError("unknown", field="warm_up", value=self.warm_up, remedy=remedy)
        if self.weights is not None and self.weights not in WEIGHTS:
            remedy = f"Use {', '.join(WEIGHTS)}, or None for the checkpoint's own"
            raise ConfigError("unknown", field="weights", value=self.weights, remedy=remedy)
        if self.load_format not in ("auto", "random"):
            raise ConfigError("unknown", field="load_format", value=self.load_format, remedy='Use "auto" or "random"')

    @property
    def source(self) -> str | None:
        """``model`` as a string; a ``PathLike`` as an absolute path, which cannot be taken for a name on the Hub."""
        if self.model is None or isinstance(self.model, str):
            return self.model
        return os.path.abspath(os.path.expanduser(os.fspath(self.model)))


def _check_model(model: object) -> None:
    path = model
    if isinstance(model, os.PathLike):
        try:
            path = os.fspath(model)
        except Exception as error:
            raise ConfigError(f"its path cannot be had: {error}", field="model", value=model) from error
    if path is not None and not isinstance(path, str):
        remedy = "Give a folder or a Hub name as a string or a Path, or None for the demo model"
        raise ConfigError("not a model", field="model", value=model, remedy=remedy)


def _check_host_memory(size: int | str | float, prefix_caching: bool) -> None:
    parse_size(size, field="host_memory", free=MAX_SIZE)
    if prefix_caching is False:
        remedy = "Leave host_memory or prefix_caching out"
        raise ConfigError("is for cached prefixes, and none are cached", field="host_memory", value=size, remedy=remedy)


def _check_store(folder: object, size: int | str | float | None, prefix_caching: bool) -> None:
    if folder is not None and not (isinstance(folder, str | os.PathLike) and isinstance(os.fspath(folder), str)):
        raise ConfigError("not a folder", field="kv_store", value=folder, remedy="Give a path as a string or a Path")
    if folder is not None and prefix_caching is False:
        remedy = "Leave kv_store or prefix_caching out"
        raise ConfigError("is for cached prefixes, and none are cached", field="kv_store", value=folder, remedy=remedy)
    if size is not None:
        if folder is None:
            raise ConfigError("bounds a KV store", field="kv_store_size", value=size, remedy="Give kv_store, too")
        parse_size(size, field="kv_store_size", free=MAX_SIZE)


def _check_share(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError("out of range", field=field, value=value, remedy="Give a share in (0, 1]")
