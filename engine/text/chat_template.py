"""Chat templates: Jinja source from a model folder, rendered in a process under limits.

A template is code by a stranger, and time and memory of Jinja cannot be bounded from inside. So each template has a
sandbox, whose worker (``template_worker``) gives it what transformers' ``apply_chat_template`` does, and whose process
is ended when a render takes too long or too much; the next render starts another.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ModelError, RequestError
from ..sandbox import Job, ProcessEndedError, Refusal, Sandbox
from ..sandbox.process import folders_of
from .special_marks import clean

MAX_TEMPLATE_CHARS = 1 << 18  # of its source; a longer template is refused
JOB = Job(
    work="renders chat templates",
    source=Path(__file__).with_name("template_worker.py"),
    folders=folders_of("jinja2", "markupsafe"),
    seconds=1.25,  # to compile and render; ten times the longest honest conversation's
    start_seconds=10,  # our own code, so no template can use it up
    memory=1 << 30,
)


class ChatTemplate:
    """One template and its process, which is started on first use. May render from several threads, one at a time."""

    def __init__(self, source: str):
        """Raises ModelError if the template is too long; whether it compiles is seen when it is first rendered."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"the chat template is longer than {MAX_TEMPLATE_CHARS} characters")
        setup = clean(source).encode("utf-8", "surrogatepass")
        self._sandbox = Sandbox(JOB, lambda: setup)

    def render(self, variables: Mapping[str, Any]) -> str:
        """The prompt text. ``variables`` are plain JSON data: ``messages``, ``tools``, ``bos_token`` and the like.

        Raises RequestError with the template's own message if it refuses or fails, or when it exceeds its limits,
        ModelError if it does not compile, and UnavailableError if the system has no process for it.
        """
        try:
            request = msgspec.json.encode(variables)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestError(f"the template's variables are not JSON data: {error}") from error
        try:
            return self._sandbox.ask(request).decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError("the chat template writes half a character (a lone surrogate)") from error
        except Refusal as error:
            if error.is_broken:
                raise ModelError(f"the chat template does not compile: {error}") from error
            raise RequestError(f"the chat template refuses this conversation: {error}") from error
        except TimeoutError as error:
            raise RequestError(f"the chat template takes more than {JOB.seconds} s") from error
        except ProcessEndedError as error:
            raise RequestError("the chat template ends its process: it takes too much time or memory") from error

    def close(self) -> None:
        """Ends the process, if there is one. Another render starts another."""
        self._sandbox.close()


def select_template(value: object, name: str = "default") -> str | None:
    """The template called ``name`` in tokenizer_config.json: among named ones, or the string that is the default.

    A model with another template for conversations with tools calls it "tool_use". Raises ModelError.
    """
    if isinstance(value, list):
        named = [item for item in value if isinstance(item, dict) and isinstance(item.get("name"), str)]
        if len(named) < len(value):
            raise ModelError("must be a list of named templates", field="chat_template", value=value)
        value = {item["name"]: item.get("template") for item in named}
    if isinstance(value, dict):
        value = value.get(name)
    elif name != "default":
        return None
    if value is not None and not isinstance(value, str):
        raise ModelError("must be a string, or named ones", field="chat_template")
    return value
