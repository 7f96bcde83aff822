"""Model fingerprints, by which a plan recognises its model."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import msgspec

from .errors import ConfigError
from .layer_kv import MAX_GROUPS, LayerKV, LayerState, kv_of_layers

if TYPE_CHECKING:
    from qkv_engine.models.config import ModelConfig

MAX_SHOWN_CHARS = 80  # of a value in a message; in a hostile file it may have millions
_SHAPE = ("architecture", "num_layers", "num_kv_heads", "head_dim", "hidden_size", "vocab_size")


class ModelFingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Shape of a model and a digest of its weights. ``name`` is for people and never compared.

    ``weights``: SHA-256 of a sample of the checkpoint, in hex; None for random weights. ``layers``: KV of each layer;
    empty where all layers have equal heads and no window. ``states``: of each layer that has one in place of KV.
    """

    name: str
    architecture: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    weights: str | None
    layers: tuple[LayerKV, ...] = ()
    states: tuple[LayerState, ...] = ()

    @classmethod
    def of(cls, name: str, config: ModelConfig, weights: str | None) -> ModelFingerprint:
        shape = {field: getattr(config, field) for field in _SHAPE}
        return cls(name=name, weights=weights, layers=_layers(config), states=_states(config), **shape)

    def __post_init__(self) -> None:
        if len(self.layers) not in (0, self.num_layers):
            raise ValueError(f"layers has {len(self.layers)} entries for {self.num_layers} layers")
        numbers = (number for number in chain(*self.layers) if number is not None)
        if len(set(self.layers)) > MAX_GROUPS or any(number < 1 for number in numbers):
            raise ValueError(f"layers are not of up to {MAX_GROUPS} kinds, all numbers positive")
        if any(number < 1 for number in chain(*self.states)):
            raise ValueError("states have numbers that are not positive")

    @property
    def kv_of_layers(self) -> list[LayerKV]:
        """The KV of each layer."""
        return list(self.layers) or [LayerKV(self.num_kv_heads, self.head_dim)] * self.num_layers

    def check_shape(self, config: ModelConfig, kv: str, option: str = "kv") -> None:
        """Raises ``ConfigError`` unless ``config`` has this shape; ``kv`` is the value of ``option``."""
        for field in _SHAPE:
            mine, found = getattr(self, field), getattr(config, field)
            if mine != found:
                raise self._refusal(kv, option, f"{field} is {str(mine)[:MAX_SHOWN_CHARS]} there and {found} here")
        if self.layers != _layers(config):
            raise self._refusal(kv, option, "other layers have windows, or other numbers or sizes of KV heads")
        if self.states != _states(config):
            raise self._refusal(kv, option, "the states of layers without KV are others")

    def check_weights(self, weights: str, kv: str, option: str = "kv") -> None:
        """Raises ``ConfigError`` unless the checkpoint has this digest; ``kv`` is the value of ``option``."""
        if self.weights != weights:
            raise self._refusal(kv, option, "the shapes agree, the weights differ")

    def _refusal(self, kv: str, option: str, why: str) -> ConfigError:
        remedy = "Make one for this model with qkv-engine plan MODEL -o plan.json"
        message = f"a plan for another model ({self.name[:MAX_SHOWN_CHARS]}): {why}"
        return ConfigError(message, field=option, value=kv, remedy=remedy)


def _layers(config: ModelConfig) -> tuple[LayerKV, ...]:
    """The KV of each layer of ``config``; empty where it is that of the first heads everywhere, without windows."""
    found = tuple(kv_of_layers(config))
    return () if set(found) == {LayerKV(config.num_kv_heads, config.head_dim)} else found


def _states(config: ModelConfig) -> tuple[LayerState, ...]:
    return tuple(LayerState(*(getattr(spec, field) for field in LayerState._fields)) for spec in config.states)
