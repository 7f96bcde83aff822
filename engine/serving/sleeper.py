"""Sleep of an engine: its requests wait, its device is given back, host memory keeps what was cached."""

from __future__ import annotations

from queue import SimpleQueue

from ..errors import QKVError


class Sleeper:
    """Whether an engine sleeps, or is to fall asleep behind the step under way."""

    def __init__(self) -> None:
        self.is_asleep = False
        self._waiting: list[SimpleQueue[QKVError | None]] = []

    @property
    def is_due(self) -> bool:
        """Whether somebody waits for the engine to fall asleep."""
        return bool(self._waiting)

    def begin(self) -> SimpleQueue[QKVError | None]:
        """Has the engine fall asleep soon; what is returned tells when it did, or what keeps it from it."""
        done: SimpleQueue[QKVError | None] = SimpleQueue()
        if self.is_asleep:
            done.put(None)
        else:
            self._waiting.append(done)
        return done

    def fell_asleep(self) -> None:
        """Notes that the engine sleeps."""
        self.is_asleep = True
        self.end(None)

    def end(self, error: QKVError | None) -> None:
        """Tells all who wait that it is over."""
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            done.put(error)
