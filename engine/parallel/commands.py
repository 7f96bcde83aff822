"""Commands that rank 0 sends to the workers, and their encoding."""

from __future__ import annotations

import msgspec

from ..device.backend import StepLimits
from ..device.command import StepCommand
from ..kv.moves import MoveCommand
from ..kv.table_rows import TableLayout


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """The first command, once weights are loaded.

    Fields
        kv_nbytes: KV memory of each rank.
        chunk_nbytes: in which it is given back.
        host_nbytes: host memory of each rank; 0 for none.
        layout: of the block tables.
        num_threads: CPU threads that the rank computes with.
    """

    kv_nbytes: int
    chunk_nbytes: int
    host_nbytes: int
    layout: TableLayout
    num_threads: int


class Capture(msgspec.Struct, frozen=True, tag="capture"):
    """Capture the steps that ``limits`` allow."""

    limits: StepLimits


Command = Setup | Capture | StepCommand | MoveCommand

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Command)


def encode(command: Command) -> bytes:
    """A command as bytes."""
    return _encoder.encode(command)


def decode(message: bytes) -> Command:
    """The command in ``message``."""
    found: Command = _decoder.decode(message)
    return found
