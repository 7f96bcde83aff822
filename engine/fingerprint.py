"""Model fingerprints, by which a plan recognises its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from .errors import ConfigError

if TYPE_CHECKING:
    from qkv_engine.models.config import ModelConfig

MAX_SHOWN_CHARS = 80  # of a value in a message; in a hostile file it may have millions
_SHAPE = ("architecture", "num_layers", "num_kv_heads", "head_dim", "hidden_size", "vocab_size")


class ModelFingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of a model and a digest of its weights. ``name`` is for people and never compared.

    ``weights``: SHA-256 of a sample of the checkpoint, in hex; None for random weights.
    """

    name: str
    architecture: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    weights: str | None

    @classmethod
    def of(cls, name: str, config: ModelConfig, weights: str | None) -> ModelFingerprint:
        return cls(name=name, weights=weights, **{field: getattr(config, field) for field in _SHAPE})

    def check_shape(self, config: ModelConfig, kv: str, option: str = "kv") -> None:
        """Raises ``ConfigError`` unless ``config`` has this shape; ``kv`` is the value of ``option``."""
        for field in _SHAPE:
            mine, found = getattr(self, field), getattr(config, field)
            if mine != found:
                raise self._refusal(kv, option, f"{field} is {str(mine)[:MAX_SHOWN_CHARS]} there and {found} here")

    def check_weights(self, weights: str, kv: str, option: str = "kv") -> None:
        """Raises ``ConfigError`` unless the checkpoint has this digest; ``kv`` is the value of ``option``."""
        if self.weights != weights:
            raise self._refusal(kv, option, "the shapes agree, the weights differ")

    def _refusal(self, kv: str, option: str, why: str) -> ConfigError:
        remedy = "Make one for this model with qkv-engine plan MODEL -o plan.json"
        message = f"a plan for another model ({self.name[:MAX_SHOWN_CHARS]}): {why}"
        return ConfigError(message, field=option, value=kv, remedy=remedy)
