"""What the server tells about its model: its names, its context, and what its chat template can."""

from __future__ import annotations

from typing import Any

from qkv_engine.text.chat_messages import THINKING_SWITCH, TOOLS

from .frontend import Frontend


def model_card(frontend: Frontend, name: str) -> dict[str, Any]:
    """The model as ``/v1/models`` lists it by ``name``.

    ``root`` and ``max_model_len`` are vLLM's. Our own: ``thinking_switch``, whether the template knows
    ``enable_thinking``; ``tools``, whether it shows tools to the model; ``examples``, questions that suit the model.
    """
    tokenizer = frontend.engine.tokenizer
    template = "" if tokenizer is None else tokenizer.chat_template or ""
    owner = {"id": name, "object": "model", "created": frontend.created, "owned_by": "qkv-engine"}
    known = {"root": frontend.name, "max_model_len": frontend.engine.max_model_len}
    can = {"thinking_switch": THINKING_SWITCH in template, "tools": TOOLS in template}
    return owner | known | can | {"examples": list(frontend.examples)}
