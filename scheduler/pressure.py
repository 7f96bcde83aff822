"""What happens when KV memory runs short. Here: the youngest running request gives its blocks back and waits.

The oldest running request is never preempted; since every request fits alone, it always finishes, so all do.
"""

from __future__ import annotations

from typing import Protocol

from qkv_engine.request import Request

from .queue import ArrivalQueue


class KVSpace(Protocol):
    """What the scheduler needs of KV memory; ``engine/kv/table.py`` provides it."""

    @property
    def capacity(self) -> int:
        """Tokens that fit in all, for one request alone."""
        ...

    @property
    def num_free_blocks(self) -> int: ...

    def num_blocks(self, num_tokens: int) -> int: ...

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        """Room for the first ``num_tokens`` tokens of a request; all or nothing."""
        ...

    def release(self, request_id: str) -> None: ...


def can_admit(space: KVSpace, request: Request, num_running: int) -> bool:
    """Whether all tokens known of ``request`` fit now and every running request could still open one more block.

    The margin keeps a new request from being preempted right after its prompt was computed.
    """
    return space.num_blocks(request.num_tokens) + num_running <= space.num_free_blocks


def choose_victim(running: ArrivalQueue) -> Request:
    """The request to preempt: the youngest."""
    return running.youngest
