"""The load of a benchmark with arrivals: rates, lengths of prompts and outputs, latency limits; no engine here."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from qkv_engine.errors import ConfigError

from .timing import Timeline
from .traces import Arrival

MAX_RATE = 1e6  # requests a second
MAX_LEN = 2**24  # tokens
E2E = "e2e"
# Latencies that may be limited, by the name of a limit. vLLM writes e2el.
LIMITS = {"ttft": "ttft", "tpot": "tpot", E2E: E2E, "e2el": E2E}


class Rate(NamedTuple):
    """Requests a second, as they were asked for: ``inf`` is all at once, None the times of a trace."""

    label: str
    per_second: float | None

    @property
    def words(self) -> str:
        """The rate in a sentence: "8 a second", "all at once"."""
        if self.per_second is None:
            return "at the times of the trace"
        return "all at once" if math.isinf(self.per_second) else f"{self.label} a second"

    def times(self, requests: Sequence[Arrival], seed: int) -> list[float]:
        """Seconds from the start at which ``requests`` come: a Poisson process, whose gaps are exponential.

        One seed gives the same gaps at every rate, scaled.
        """
        if self.per_second is None:
            return [request.seconds or 0.0 for request in requests]
        rng, at = random.Random(f"arrivals {seed}"), 0.0
        return [at := at + rng.expovariate(1.0) / self.per_second for _ in requests]


class Range(NamedTuple):
    """Lengths of ``low`` to ``high`` tokens, each as likely as the other."""

    low: int
    high: int


def parse_rates(text: str, *, has_times: bool) -> tuple[Rate, ...]:
    """The rates of "8,16,inf", each once; ``has_times``: whether there is a trace whose own times "trace" may name.

    Raises ``ConfigError`` for anything but positive numbers up to 1e6, "inf" and "trace".
    """
    return tuple(dict.fromkeys(_rate(word.strip(), has_times) for word in text.split(",")))


def _rate(word: str, has_times: bool) -> Rate:
    if word == "trace":
        if not has_times:
            remedy = "Give a --trace whose lines have times, or a rate"
            raise ConfigError("there are no times", field="arrivals", value=word, remedy=remedy)
        return Rate(word, None)
    if word == "inf":
        return Rate(word, math.inf)
    rate = _number(word)
    if rate is None or not 0 < rate <= MAX_RATE:
        remedy = f'Give requests a second above 0 and up to {MAX_RATE:,.0f}, "inf" for all at once, or "trace"'
        raise ConfigError("not a rate", field="arrivals", value=word, remedy=remedy)
    return Rate(f"{rate:g}", rate)


def parse_lengths(text: str, field: str) -> Range:
    """Tokens as "512", or as a range "128..2048". Raises ``ConfigError`` naming ``field``."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*(?:\.\.\s*(\d{1,9})\s*)?", text, re.ASCII)
    remedy = f'Give tokens from 1 to {MAX_LEN:,}, or a range such as "128..2048"'
    if match is None:
        raise ConfigError("not a length", field=field, value=text, remedy=remedy)
    found = Range(int(match[1]), int(match[2] or match[1]))
    if not 1 <= found.low <= MAX_LEN or not 1 <= found.high <= MAX_LEN:
        raise ConfigError("out of range", field=field, value=text, remedy=remedy)
    if found.low > found.high:
        raise ConfigError("the range is reversed", field=field, value=text, remedy=f"Give {found.high}..{found.low}")
    return found


def draw_requests(number: int, input_len: Range, output_len: Range, seed: int) -> list[Arrival]:
    """``number`` requests with lengths out of uniform ranges; a seed gives the same ones, and the first ones first."""
    rng = random.Random(f"lengths {seed}")
    return [Arrival(rng.randint(*input_len), rng.randint(*output_len)) for _ in range(number)]


def parse_limits(text: str) -> dict[str, float]:
    """Latency limits in ms of "ttft:1000,tpot:50,e2e:30000" by name. Raises ``ConfigError`` for other words."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, words = part.strip().partition(":")
        limit, latency = _number(words.strip()), LIMITS.get(name.strip())
        if latency is None or limit is None or not 0 < limit < math.inf or latency in found:
            remedy = 'Give each of ttft, tpot and e2e at most once, in ms above 0: "ttft:1000,tpot:50"'
            raise ConfigError("not a limit", field="goodput", value=part.strip(), remedy=remedy)
        found[latency] = limit
    return found


def meets(timeline: Timeline, limits: Mapping[str, float]) -> bool:
    """Whether a request kept every one of ``limits``; one of a single token has no TPOT to miss."""
    latencies = {"ttft": timeline.ttft, "tpot": timeline.tpot or 0.0, E2E: timeline.e2e}
    return all(1e3 * latencies[name] <= limit for name, limit in limits.items())


def _number(text: str) -> float | None:
    """A number in decimal digits; None for anything else, "nan" and "1_000" included."""
    return float(text) if re.fullmatch(r"\d{1,12}(\.\d{0,12})?|\.\d{1,12}", text, re.ASCII) else None
