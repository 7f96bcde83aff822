"""The program that compiles one chat template and renders it, in a process of its own under limits.

Run by path, without ``site`` and without this package: it needs the standard library and Jinja alone, so it starts in a
tenth of a second. A template is code by a stranger; Jinja's sandbox keeps it from the machine, the process keeps its
time and memory from the engine. Messages are JSON behind a length of four bytes: first the source, then requests
(the template's variables), each answered by an error, or by ``{}`` and a second message, the text in UTF-8. The end of
the input ends the program.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any, BinaryIO, Never, cast

if __name__ == "__main__":
    sys.path += sys.argv[2:]  # where Jinja and MarkupSafe are installed

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

if TYPE_CHECKING:
    from jinja2.parser import Parser
    from jinja2.runtime import Macro

MAX_MEMORY = 1 << 30  # bytes of address space; beyond it the template gets a MemoryError
MAX_CPU_SECONDS = 1  # of one exchange, rounded up to a full second; the kernel ends the process then
MAX_TEXT_CHARS = 1 << 23  # of a rendered prompt
MAX_ERROR_CHARS = 500  # of a template's own message, so that it cannot flood a log
FRAME = struct.Struct(">I")  # length of a message in bytes, sent before it


def main() -> None:
    """Reads the source and then requests from the socket whose number is the first argument, until its end."""
    limit_process()
    stream = cast(BinaryIO, socket.socket(fileno=int(sys.argv[1])).makefile("rwb"))
    reply(stream)  # ready
    worker = Worker(read_frame(stream))
    while (variables := read_frame(stream)) is not None:
        limit_cpu()
        try:
            text = worker.render(variables)
        except BrokenTemplateError as error:
            reply(stream, template_error=describe(error))
        except MemoryError:  # this process may be in pieces: the next request gets a new one
            return reply(stream, error=f"it needs more than {MAX_MEMORY >> 20} MiB of memory")
        except Exception as error:
            reply(stream, error=describe(error))
        else:
            reply(stream, text=text)


class BrokenTemplateError(Exception):
    """The source does not compile."""


class Worker:
    """A source and, once it was compiled, its template."""

    def __init__(self, source: str):
        self._source = source
        self._template: jinja2.Template | None = None
        self._walks_parts = False

    def render(self, variables: dict[str, Any]) -> bytes:
        """The text in UTF-8. Raises BrokenTemplateError, or any error of the template."""
        if self._template is None:
            self._compile()
        assert self._template is not None
        if not self._walks_parts:
            join_parts(variables["messages"])
        text = self._template.render(variables)
        if len(text) > MAX_TEXT_CHARS:
            raise ValueError(f"it makes a text of {len(text)} characters; {MAX_TEXT_CHARS} are allowed")
        return text.encode("utf-8", "surrogatepass")  # a lone surrogate is for the other side to refuse

    def _compile(self) -> None:
        try:
            self._template = compile_template(self._source)
            self._walks_parts = loops_over_content(self._template.environment.parse(self._source))
        except MemoryError:
            raise
        except Exception as error:  # also RecursionError and Python's own SyntaxError on nested blocks
            raise BrokenTemplateError(describe(error)) from error


def describe(error: Exception) -> str:
    """The error's own words on one line, or its type where it has none."""
    try:
        return " ".join(str(error)[: 4 * MAX_ERROR_CHARS].split())[:MAX_ERROR_CHARS] or type(error).__name__
    except Exception:  # raise_exception was given a value that cannot be written out
        return type(error).__name__


def read_frame(stream: BinaryIO) -> Any:
    """The next message; ``None`` at the end of the input."""
    head = stream.read(FRAME.size)
    if len(head) < FRAME.size:
        return None
    return json.loads(stream.read(FRAME.unpack(head)[0]))


def reply(stream: BinaryIO, text: bytes | None = None, **error: str) -> None:
    """Sends an error, or ``{}`` and the text if there is one."""
    frames = [json.dumps(error).encode()] + ([] if text is None else [text])
    for frame in frames:
        stream.write(FRAME.pack(len(frame)))
        stream.write(frame)
    stream.flush()


# ---- limits


def limit_process() -> None:
    """Bounds memory and forbids files and core dumps, where the system can."""
    if sys.platform != "win32":
        import resource

        _limit(resource.RLIMIT_AS, MAX_MEMORY)
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_FSIZE, 0)


def limit_cpu() -> None:
    """Gives the next exchange its CPU time; ends the program even if nobody is left to kill it."""
    if sys.platform != "win32":
        import resource

        _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + MAX_CPU_SECONDS)


def _limit(kind: int, value: int) -> None:
    import resource

    hard = resource.getrlimit(kind)[1]
    try:
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    except (OSError, ValueError):  # macOS has limits that cannot be set; the parent's deadline holds there
        return


# ---- what transformers gives templates


def compile_template(source: str) -> jinja2.Template:
    """``source`` in the environment of transformers' ``apply_chat_template``. Raises Jinja's errors."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(
        raise_exception=raise_exception, strftime_now=strftime_now, dict=DictFactory(), namespace=SafeNamespace
    )
    return environment.from_string(source)


def loops_over_content(tree: nodes.Template) -> bool:
    """Whether a template goes through a message's text parts itself; one that does not wants their joined text."""
    for loop in tree.find_all(nodes.For):
        iterated = nodes.List([loop.iter])
        names = {name.name for name in iterated.find_all(nodes.Name)}
        names |= {attribute.attr for attribute in iterated.find_all(nodes.Getattr)}
        names |= {key.value for key in iterated.find_all(nodes.Const) if isinstance(key.value, str)}
        if "content" in names:
            return True
    return False


def join_parts(messages: list[dict[str, Any]]) -> None:
    """Replaces each list of text parts by its text."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            message["content"] = "".join(part["text"] for part in content)


class GenerationBlock(Extension):
    """``{% generation %} ... {% endgeneration %}``: marks the assistant's words in training; renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a call, so that it has a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class SafeNamespace(Namespace):
    """Jinja's ``namespace`` without names that begin with an underscore, through which Python's internals answer."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no parameter ``self``: a template may set one
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class DictFactory:
    """``dict(...)`` and ``dict.fromkeys`` without the class's other attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As ``dict.fromkeys``."""
        return dict.fromkeys(*args)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: it begins with an underscore")


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """``tojson`` without Jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: Any) -> Never:
    """The template's way to refuse a conversation."""
    raise TemplateError(message)


def strftime_now(format: str) -> str:
    """The local time, written by ``format``."""
    return datetime.now().strftime(format)


if __name__ == "__main__":
    main()
