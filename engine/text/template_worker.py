"""Compiles one chat template and renders it: the worker of a sandbox, which runs this file by its path.

A template is code by a stranger; Jinja's sandbox keeps it from the machine, the process keeps its time and memory from
the engine.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, Never

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

if TYPE_CHECKING:
    from jinja2.parser import Parser
    from jinja2.runtime import Macro

MAX_TEXT_CHARS = 1 << 23  # of a rendered prompt


class BrokenTemplateError(Exception):
    """The source does not compile."""

    is_broken = True  # for the sandbox's program


class Worker:
    """A source and, once it was compiled, its template."""

    def __init__(self, setup: bytes):
        """``setup`` is the source in UTF-8, lone surrogates among it."""
        self._source = setup.decode("utf-8", "surrogatepass")
        self._template: jinja2.Template | None = None
        self._walks_parts = False

    def answer(self, request: bytes) -> bytes:
        """The text in UTF-8 for the template's variables as JSON. Raises BrokenTemplateError, or the template's own."""
        variables = json.loads(request)
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
            raise BrokenTemplateError(str(error) or type(error).__name__) from error


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
