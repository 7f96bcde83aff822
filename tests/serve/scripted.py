"""A model whose template has tools, and whose answers a test chooses; what reaches the engine is seen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from qkv_engine import Engine, StructuredOutputs

from ..small_demo import small_demo
from .running import Running, running

TEMPLATE = """\
{%- macro turn(role, text) -%}{{ '<|im_start|>' ~ role ~ '\\n' ~ text ~ '<|im_end|>\\n' }}{%- endmacro %}
{%- if tools %}{{ turn('system', tools | map('tojson') | join('\\n')) }}{% endif %}
{%- for message in messages %}
    {%- set calls = namespace(text='') %}
    {%- for call in message.tool_calls or [] %}
        {%- set calls.text = calls.text ~ '<tool_call>' ~ call.function | tojson ~ '</tool_call>' %}
    {%- endfor %}
    {{- turn(message.role, message.content ~ calls.text) }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def call_text(name: str, **arguments: object) -> str:
    """A call as the model of ``calling`` writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@contextmanager
def calling(folder: Path, *, before: str = "", model: Path | None = None) -> Iterator[Running]:
    """A server over a model with a template that has tools, made in ``folder``, and ``before`` it more.

    ``model``: the small demo model without one; the whole one reasons before it answers.
    """
    shutil.copytree(small_demo() if model is None else model, folder)
    (folder / "chat_template.jinja").write_text(before + TEMPLATE)
    engine = Engine(str(folder), kv="fp32", kv_memory="128MiB", max_num_seqs=8)
    with engine, running(engine) as server:
        yield server


def say(monkeypatch: pytest.MonkeyPatch, server: Running, text: str) -> None:
    """Lets every answer of ``server`` be ``text``, behind the model's reasoning."""
    params = server.engine.params
    form = {"structured_outputs": StructuredOutputs(choice=[text])}
    monkeypatch.setattr(server.engine, "params", lambda **changes: params(**{**changes, **form}))


def seen(monkeypatch: pytest.MonkeyPatch, server: Running) -> list[dict[str, Any]]:
    """What the engine is asked from now on: the conversation, the template's variables, the parameters."""
    found: list[dict[str, Any]] = []
    stream = server.engine.stream

    def recorded(prompt: object, params: object, **options: Any) -> object:
        found.append({"messages": prompt, "kwargs": options["template_kwargs"], "params": params})
        return stream(prompt, params, **options)

    monkeypatch.setattr(server.engine, "stream", recorded)
    return found
