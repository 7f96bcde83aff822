"""Chat templates: Jinja source from a model folder, rendered in a worker process under limits.

A template is code by a stranger, and time and memory of Jinja cannot be bounded from inside. So each template has a
small process of its own (``template_worker``), which gives it what transformers' ``apply_chat_template`` does, and
which is ended when a render takes too long or too much; the next render starts another.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import ModelError, RequestError
from .special_marks import clean
from .template_process import TemplateProcess, WorkerEndedError, start_process

MAX_TEMPLATE_CHARS = 1 << 18  # of its source; a longer template is refused
RENDER_SECONDS = 1.25  # to compile and render, on the clock; ten times the longest honest conversation's


class ChatTemplate:
    """One template and its process, which is started on first use. May render from several threads, one at a time."""

    def __init__(self, source: str):
        """Raises ModelError if the template is too long; whether it compiles is seen when it is first rendered."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"the chat template is longer than {MAX_TEMPLATE_CHARS} characters")
        self._source = clean(source)
        self._lock = threading.RLock()  # a finalizer may render, or close, in the middle of its thread's render
        self._process: TemplateProcess | None = None
        _TEMPLATES.add(self)

    def render(self, variables: Mapping[str, Any]) -> str:
        """The prompt text. ``variables`` are plain JSON data: ``messages``, ``tools``, ``bos_token`` and the like.

        Raises RequestError with the template's own message if it refuses or fails, or when it exceeds its limits, and
        ModelError if it does not compile.
        """
        try:
            request = msgspec.json.encode(variables)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestError(f"the template's variables are not JSON data: {error}") from error
        with self._lock:
            return self._ask(request)

    def close(self) -> None:
        """Ends the process, if there is one. Another render starts another."""
        with self._lock:
            if self._process is not None:
                self._process.close()
                self._process = None

    def _ask(self, request: bytes) -> str:
        """Asks the running process, and a new one if it ends meanwhile; one deadline for both."""
        seconds = RENDER_SECONDS
        try:
            if self._process is not None and self._process.is_idle:
                begin = time.monotonic()
                try:
                    return self._process.ask(request, begin + seconds)
                except WorkerEndedError:  # perhaps before the request, and by no fault of the template
                    seconds -= time.monotonic() - begin
            self._process = start_process(self._source)
            return self._process.ask(request, time.monotonic() + seconds)
        except TimeoutError as error:
            raise RequestError(f"the chat template takes more than {RENDER_SECONDS} s") from error
        except WorkerEndedError as error:
            raise RequestError("the chat template ends its process: it takes too much time or memory") from error

    def _forget_after_fork(self) -> None:
        self._lock = threading.RLock()  # the parent's may have been held at the fork
        if self._process is not None:
            self._process.leave_to_parent()
            self._process = None


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


_TEMPLATES: weakref.WeakSet[ChatTemplate] = weakref.WeakSet()


def _forget_processes() -> None:
    """Gives every template a new process after a fork: a worker belongs to the process that started it."""
    for template in list(_TEMPLATES):
        template._forget_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_processes)
