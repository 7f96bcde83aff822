"""What the core knows and answers, compared with what happened in a simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .broken import require

if TYPE_CHECKING:
    from .simulator import Simulation


def check_answer(simulation: Simulation, name: str, answer: Any) -> None:
    """Checks the final output of a request's reader."""
    require(answer is not None and answer.finished, "a reader waits for ever")
    tokens, reason = simulation.outputs[name]
    completion = answer.outputs[0]
    require((completion.token_ids, completion.finish_reason) == (tokens, reason), "the answer is another one")
    require(answer.kv.blocks == simulation.usage.get(name, answer.kv.blocks), "the answer's blocks stood elsewhere")
    require(len(answer.metrics.token_times) == len(tokens), "tokens are timed twice, or not at all")


def check_core(simulation: Simulation) -> None:
    """Checks that the core knows the live requests, and no others."""
    live = set(simulation.scheduler.requests.values())
    registry = simulation.core.registry
    require(set(registry.owners) == set(registry.rows) == live, "the core remembers who is gone")
    require(set(simulation.core.live) == set(simulation.scheduler.requests), "a submission is lost")
