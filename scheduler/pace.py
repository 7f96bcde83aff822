"""Chunk sizes that keep the time between two tokens of running requests under a limit.

A step takes ``base + slope * chunk tokens`` seconds. Both are followed as steps end, and a chunk is the largest within
the limit: a long prompt takes more steps, and its first token comes later. No clock here: times are told.
"""

from __future__ import annotations

from collections import deque

NUM_STEPS = 8  # steps of a kind that are remembered: after as many, a slow spell is forgotten
LEAST_CHUNK = 64  # tokens: prompts go on at this pace whatever the limit; a GPU takes as long for fewer
CHUNK_STEP = 128  # tokens: a captured step is padded to a multiple, so that a part of it takes as long
FIRST_CHUNK = 256  # tokens, while no step with a chunk has been timed
GROWTH = 2  # of a chunk over the largest that was timed lately: the line is not trusted further
LEAST_SLOPE = 1e-9  # seconds a token: a noisy base may leave nothing for the tokens


class Pace:
    """The most chunk tokens of a step with single tokens, from the times of earlier steps; ``max_itl`` is in seconds.

    Base and slope are each the second slowest of the last steps: one slow step, such as one that compiles a kernel,
    counts for nothing, and two in a row are heeded at once. So most steps keep the limit, and not just their mean.
    """

    def __init__(self, max_itl: float):
        self.max_itl = max_itl
        self._bases = deque[float](maxlen=NUM_STEPS)  # seconds of steps without chunks
        self._slopes = deque[float](maxlen=NUM_STEPS)  # seconds a chunk token of steps with chunks
        self._sizes = deque[int](maxlen=NUM_STEPS)  # chunk tokens of the steps in ``_slopes``

    @property
    def chunk_tokens(self) -> int:
        """Chunk tokens of the next step: ``LEAST_CHUNK``, or a multiple of ``CHUNK_STEP``."""
        if not self._sizes:
            return FIRST_CHUNK
        room = self.max_itl - _second_slowest(self._bases)
        tokens = min(int(room / _second_slowest(self._slopes)), GROWTH * max(self._sizes))
        return max(tokens // CHUNK_STEP * CHUNK_STEP, LEAST_CHUNK)

    def note(self, seconds: float, num_chunk_tokens: int) -> None:
        """Notes the time of a step with single tokens and ``num_chunk_tokens`` tokens of chunks."""
        base = _second_slowest(self._bases)
        if num_chunk_tokens == 0 or seconds < base:  # without its chunks a step takes no longer
            self._bases.append(seconds)
        elif num_chunk_tokens >= LEAST_CHUNK:  # the time of fewer is that of launches
            self._slopes.append(max((seconds - base) / num_chunk_tokens, LEAST_SLOPE))
            self._sizes.append(num_chunk_tokens)


def _second_slowest(times: deque[float]) -> float:
    """The second largest of ``times``, the only one, or 0."""
    return sorted(times)[-2:][0] if times else 0.0
