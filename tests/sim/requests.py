"""Random requests: prompts that share beginnings, lengths and parameters."""

from __future__ import annotations

import random

from qkv_engine.request import SamplingParams

from .options import Options

VOCAB_SIZE = 50


class Requests:
    """Draws requests from the simulation's random numbers, so that one seed still fixes a run."""

    def __init__(self, options: Options, rng: random.Random):
        self.options, self.rng = options, rng
        self._beginnings = [self._tokens(64 * options.block) for _ in range(options.num_prompts)]

    def prompt(self) -> list[int]:
        rng, block = self.rng, self.options.block
        most = self.options.longest * block
        ids = rng.choice(self._beginnings)[: rng.choice((0, most, rng.randint(0, most)))]
        return ids + self._tokens(rng.randint(1, max(1, rng.choice((1, block, most // 2)))))

    def length(self) -> int:
        """Tokens of the answer."""
        return self.rng.randint(1, self.rng.choice((2, min(self.options.block, 24), min(4 * self.options.block, 40))))

    def params(self) -> SamplingParams:
        options, rng = self.options, self.rng
        floored, open_ended = rng.random() < options.floored, rng.random() < options.open_ended
        return SamplingParams(
            max_tokens=None if open_ended else 1,  # else any number: ``length`` replaces it
            ignore_eos=not open_ended and rng.random() < 0.5,
            kv_pinned=rng.random() < options.pinned,
            kv_floor=f"rung{rng.randrange(len(options.sizes))}" if floored else None,
            tenant=f"t{rng.randrange(options.tenants)}",
            cache_salt=f"s{rng.randrange(options.salts)}",
            prompt_logprobs=1 if rng.random() < 0.05 else None,
            presence_penalty=0.5 if rng.random() < 0.1 else 0.0,
            priority=rng.randrange(options.priorities) if options.priorities > 1 else 0,
        )

    def _tokens(self, number: int) -> list[int]:
        return [self.rng.randrange(VOCAB_SIZE) for _ in range(number)]
