"""The format of each weight of a model, as ``quantization_config`` of its ``config.json`` says, or an option."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from qkv_engine.errors import ModelError

from ..fields import Fields
from .awq import Awq
from .float8 import Float8
from .format import WeightFormat
from .gptq import Gptq
from .integers import Integers
from .mxfp4 import Mxfp4
from .on_load import OnLoad
from .plain import PLAIN

_GROUPS = (16, 32, 64, 128, 256)
_GATES = ("shared_expert_gate",)  # a single row, which tools leave plain and do not list
REMEDY = "Use the original float32, bfloat16 or float16 checkpoint, or one in a format of docs/weights.md"


class Rule(NamedTuple):
    """Weights of one format: those of linear layers, but for what ``targets`` leave out; names, or patterns."""

    targets: tuple[str, ...]
    format: WeightFormat


class Scheme(NamedTuple):
    """The format of each weight by its name. What is ``ignored``, or the target of no rule, is plain."""

    name: str = "plain"
    rules: tuple[Rule, ...] = ()
    ignored: tuple[str, ...] = ()

    def format_of(self, name: str) -> WeightFormat:
        """The format of the weight of a checkpoint's module."""
        if _is_any(self.ignored, name):
            return PLAIN
        return next((rule.format for rule in self.rules if _is_any(rule.targets, name)), PLAIN)


UNQUANTIZED = Scheme()


def on_load_scheme(kind: str) -> Scheme:
    """All linear layers and experts quantized while they are read, the output embedding at no fewer than 8 bits."""
    head = OnLoad("int8" if kind == "int4" else kind)
    return Scheme(kind, (Rule(("lm_head",), head), Rule(("Linear",), OnLoad(kind))), _GATES)


def read_scheme(fields: Fields) -> Scheme:
    """The scheme of a ``config.json``. Raises ``ModelError`` for one that is not supported, by its name."""
    name = "quantization_config" if fields.get("quantization_config") is not None else "compression_config"
    if fields.get(name) is None:
        return UNQUANTIZED
    found = Fields(fields.get(name), name)
    default = "compressed-tensors" if name == "compression_config" else ""
    read = found.given(quant_method=default).choice("quant_method", METHODS, default, "is not supported")
    return read(found)


def _is_any(targets: tuple[str, ...], name: str) -> bool:
    """Whether a name or words of one in a row, a class, or a pattern after ``re:`` stands for a module."""
    plain, patterns = _sorted(targets)
    if "Linear" in plain:
        return True
    names = (name, f"language_model.{name}", name.replace("model.", "model.language_model.", 1))
    if any(pattern.match(each) for pattern in patterns for each in names):
        return True
    return any(not plain.isdisjoint(_runs(each)) for each in names[1:] if plain)  # the second has those of the first


@lru_cache(maxsize=64)
def _sorted(targets: tuple[str, ...]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """Those that are names, and the patterns."""
    patterns = tuple(re.compile(each[3:]) for each in targets if each.startswith("re:"))
    return frozenset(each for each in targets if not each.startswith("re:")), patterns


def _runs(name: str) -> Iterator[str]:
    """All words of a name that stand in a row: experts have many names, and files list many targets."""
    words = name.split(".")
    for start in range(len(words)):
        run = words[start]
        yield run
        for word in words[start + 1 :]:
            run = f"{run}.{word}"
            yield run


def _names(fields: Fields, name: str) -> tuple[str, ...]:
    found = fields.get(name) or []
    if not isinstance(found, list) or any(type(each) is not str or len(each) > 1000 for each in found):
        raise fields.error(name, "must be a list of names")
    for each in found:
        try:
            re.compile(each.removeprefix("re:") if each.startswith("re:") else "")
        except re.error:
            raise fields.error(name, "has a pattern that is none") from None
    return tuple(found)


def _refuse(fields: Fields, name: str, supported: str) -> ModelError:
    return fields.error(name, "is not supported", f"Supported: {supported}. {REMEDY}")


def _bits(fields: Fields, name: str, *allowed: int) -> int:
    bits = fields.get(name)
    if bits not in allowed:
        raise _refuse(fields, name, " and ".join(map(str, allowed)))
    assert isinstance(bits, int)
    return bits


def _group(fields: Fields, *, required: bool = False) -> int | None:
    group = fields.get("group_size")
    if group in (None, -1) and not required:
        return None
    if group not in _GROUPS:
        raise _refuse(fields, "group_size", ", ".join(map(str, _GROUPS)))
    assert isinstance(group, int)
    return group


def _compressed_tensors(fields: Fields) -> Scheme:
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise fields.error("config_groups", "must be an object of groups of layers")
    if Fields(fields.get("sparsity_config") or {}).string("format", "dense") != "dense":
        raise _refuse(fields, "sparsity_config", "dense")
    kind, rules = fields.string("format", ""), []
    for name in groups:
        group = Fields(groups[name], f"config_groups.{name}")
        weights = Fields(group.get("weights"), f"config_groups.{name}.weights")
        rules.append(Rule(_names(group, "targets"), _compressed_format(weights, group.string("format", kind), fields)))
    return Scheme("compressed-tensors", tuple(rules), _names(fields, "ignore"))


def _compressed_format(weights: Fields, kind: str, fields: Fields) -> WeightFormat:
    strategy, number = weights.string("strategy", "tensor"), weights.string("type", "int")
    symmetric = weights.boolean("symmetric", True)
    is_plain = kind == "naive-quantized"  # a tensor of 8-bit numbers: the name where inputs are not quantized, too
    if (is_plain or kind == "float-quantized") and number == "float" and strategy in ("tensor", "channel", "block"):
        _bits(weights, "num_bits", 8)
        if strategy == "block" and weights.get("block_structure") != [128, 128]:
            raise _refuse(weights, "block_structure", "[128, 128]")
        return Float8("weight_scale", strategy)
    if (is_plain or kind == "int-quantized") and number == "int" and strategy in ("tensor", "channel", "group"):
        if not symmetric:
            raise _refuse(weights, "symmetric", "true of 8 bits")
        group = _group(weights, required=True) if strategy == "group" else None
        return Integers(_bits(weights, "num_bits", 8), group, packed=False, whole=strategy == "tensor")
    if kind == "pack-quantized" and number == "int" and strategy in ("channel", "group"):
        bits = _bits(weights, "num_bits", 4, 8)
        if bits == 8 and not symmetric:
            raise _refuse(weights, "symmetric", "true of 8 bits")
        if weights.get("actorder") in ("group", True):
            raise _refuse(weights, "actorder", "weight, static")
        group = _group(weights, required=True) if strategy == "group" else None
        return Integers(bits, group, packed=True, zeros=not symmetric)
    kinds = "float-quantized, int-quantized, naive-quantized and pack-quantized"
    raise _refuse(fields, "format", f"{kinds}, of tensors, channels or groups")


def _fp8(fields: Fields) -> Scheme:
    block = fields.get("weight_block_size")
    if fields.string("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _refuse(fields, "fmt", "e4m3")
    if block not in (None, [128, 128]):
        raise _refuse(fields, "weight_block_size", "[128, 128]")
    found = Float8("weight_scale", "tensor") if block is None else Float8("weight_scale_inv", "block")
    names = _names(fields, "modules_to_not_convert") + _names(fields, "ignored_layers")
    return _linear("fp8", found, names)


def _fbgemm(fields: Fields) -> Scheme:
    return _linear("fbgemm_fp8", Float8("weight_scale", "channel"), _names(fields, "modules_to_not_convert"))


def _awq(fields: Fields) -> Scheme:
    _bits(fields.given(bits=fields.get("w_bit")), "bits", 4)
    if fields.string("version", "gemm").lower() != "gemm":
        raise _refuse(fields, "version", "gemm")
    if not fields.boolean("zero_point", True):
        raise _refuse(fields, "zero_point", "true")
    group = _group(fields.given(group_size=fields.get("q_group_size")), required=True)
    assert group is not None
    return _linear("awq", Awq(group), (*_GATES, *_names(fields, "modules_to_not_convert")))


def _gptq(fields: Fields) -> Scheme:
    if fields.boolean("lm_head", False):
        raise _refuse(fields, "lm_head", "false")
    left = _left_out(fields, "dynamic", lambda key, value: f"re:{key[2:]}" if key.startswith("-:") else None)
    bits, symmetric = _bits(fields, "bits", 4, 8), fields.boolean("sym", True)
    if bits == 8 and not symmetric:
        raise _refuse(fields, "sym", "true of 8 bits")
    kinds = {"gptq": 1, "gptq_v2": 0}
    stored_less = fields.choice("checkpoint_format", kinds, "gptq", "is not supported")
    act_order = fields.boolean("desc_act", False)
    found = Gptq(bits, _group(fields), symmetric, act_order and _group(fields) is not None, stored_less)
    return _linear("gptq", found, (*_GATES, *left, *_names(fields, "modules_to_not_convert")))


def _auto_round(fields: Fields) -> Scheme:
    packing = fields.string("packing_format", "auto_round:auto_gptq")
    if packing not in ("auto_round:auto_gptq", "auto_round:gptq"):
        raise _refuse(fields, "packing_format", "auto_round:auto_gptq")
    left = _left_out(fields, "extra_config", lambda key, value: key if value.get("bits") == 16 else None)
    found = _gptq(fields)
    return found._replace(name="auto-round", ignored=(*found.ignored, *left))


def _left_out(fields: Fields, name: str, read: Callable[[str, dict[str, Any]], str | None]) -> tuple[str, ...]:
    """The modules that options of single ones leave plain, by ``read``. Raises ``ModelError`` for other options."""
    found = fields.get(name) or {}
    if not isinstance(found, dict) or not all(isinstance(value, dict) for value in found.values()):
        raise fields.error(name, "must be an object of options by module")
    targets = {key: read(key, value) for key, value in found.items()}
    if any(target is None and found[key] for key, target in targets.items()):
        raise _refuse(fields, name, "modules that are left plain")
    return _names(Fields({name: [target for target in targets.values() if target is not None]}), name)


def _linear(name: str, found: WeightFormat, ignored: tuple[str, ...]) -> Scheme:
    """All linear layers but the output embedding and what is left out."""
    return Scheme(name, (Rule(("Linear",), found),), ("lm_head", *ignored))


def _mxfp4(fields: Fields) -> Scheme:
    """The experts alone, whatever else ``modules_to_not_convert`` names."""
    return Scheme("mxfp4", (Rule(("experts",), Mxfp4()),), _names(fields, "modules_to_not_convert"))


METHODS: dict[str, Callable[[Fields], Scheme]] = {
    "auto-round": _auto_round,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _fbgemm,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
