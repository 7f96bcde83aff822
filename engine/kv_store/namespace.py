"""What gives stored bytes their meaning: the model, the ladder and the layout of its blocks."""

from __future__ import annotations

import hashlib
from typing import Self

import msgspec

from ..errors import ConfigError
from ..fingerprint import ModelFingerprint
from ..kv.block import slot_rung
from ..kv.spec import KVSpec
from ..layer_kv import MAX_GROUPS
from .folder import OPTION
from .record import MAX_TOKENS, aligned, header_size


class StoredRung(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A block's name and bytes on one rung, or those of a request's slot."""

    name: str
    nbytes: int


class StoredGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group of layers: the rungs of its blocks, widest first, and the slots of a request."""

    rungs: tuple[StoredRung, ...]
    slots: tuple[StoredRung, ...]

    def size(self, rung: int) -> StoredRung | None:
        """What stands on ``rung``, which is negative for slots, as in ``Block.rung``; None for one that is not here."""
        sizes, index = (self.rungs, rung) if rung >= 0 else (self.slots, slot_rung(rung))
        return sizes[index] if index < len(sizes) else None


class Namespace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Blocks that may stand in for one another if their tokens are equal: of one model, ladder and layout.

    ``layout``: digest of all else that the bytes of a block depend on, such as formats by layer, dtypes and the rank.
    ``piece_tokens``: the most tokens that are stored together. Raises ``ValueError`` for numbers out of range.
    """

    model: ModelFingerprint
    ladder: str
    layout: str
    piece_tokens: int
    groups: tuple[StoredGroup, ...]

    @classmethod
    def of(cls, model: ModelFingerprint, spec: KVSpec, layout: str) -> Self:
        """The namespace of a ladder's blocks under a model. Raises ``ConfigError`` for random weights."""
        if model.weights is None:
            raise ConfigError("the model has random weights, which no name tells apart", field=OPTION)
        groups = (
            StoredGroup(
                tuple(StoredRung(rung.name, rung.nbytes) for rung in group.rungs),
                tuple(StoredRung(slot.name, slot.nbytes) for slot in group.slots),
            )
            for group in spec.groups
        )
        return cls(model, spec.name, layout, max(spec.block_tokens, spec.sink), tuple(groups))

    def __post_init__(self) -> None:
        if not 1 <= len(self.groups) <= MAX_GROUPS or not all(group.rungs for group in self.groups):
            raise ValueError(f"{len(self.groups)} groups, or one without rungs")
        if not 1 <= self.piece_tokens <= MAX_TOKENS:
            raise ValueError(f"pieces of {self.piece_tokens} tokens, not 1 to {MAX_TOKENS}")
        if any(size.nbytes < 1 for group in self.groups for size in (*group.rungs, *group.slots)):
            raise ValueError("a size is not positive")

    def encode(self) -> bytes:
        """JSON of the namespace; equal namespaces have equal bytes."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The namespace of ``encode``. Raises ``msgspec.MsgspecError`` for anything else."""
        return msgspec.json.decode(data, type=cls)

    def digest(self) -> bytes:
        """SHA-256 of the namespace without the model's name, which is for people."""
        unnamed = msgspec.structs.replace(self, model=msgspec.structs.replace(self.model, name=""))
        return hashlib.sha256(unnamed.encode()).digest()

    def nbytes(self, group: int, rung: int) -> int | None:
        """Bytes of a group's block on ``rung``; None for one that the namespace does not have."""
        size = self.groups[group].size(rung) if 0 <= group < len(self.groups) else None
        return None if size is None else size.nbytes

    @property
    def largest_record(self) -> int:
        """The most bytes that a record takes in a segment."""
        sizes = [max(size.nbytes for size in (*group.rungs, *group.slots)) for group in self.groups]
        return header_size(len(sizes), self.piece_tokens) + sum(map(aligned, sizes))
