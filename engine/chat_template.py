"""Chat templates: Jinja source from a model folder, compiled once and rendered under limits.

A template is code by a stranger. It runs in Jinja's immutable sandbox without a loader, with a short list of
filters and methods, and under a budget: every loop pass, call and string operation is charged, and no string
may outgrow what its input justifies. So a render ends, with text or with an error. The contract is that of
transformers' ``apply_chat_template``: trim_blocks, lstrip_blocks, loop controls, ``generation`` blocks,
``tojson`` without HTML escapes, ``raise_exception`` and ``strftime_now``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from itertools import islice
from typing import Any, Never

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from .errors import ModelError, RequestError

MAX_TEMPLATE_CHARS = 1 << 18
MAX_INPUT_CHARS = 1 << 26
MAX_RANGE = 10_000
BASE_STEPS, BASE_CHARS = 300_000, 1 << 18  # a render's budget before its input is counted
STEPS_PER_CHAR, CHARS_PER_CHAR = 4, 8
CHARS_PER_STEP = 256  # string work that counts as one step
MAX_INT_BITS = 4096

FILTERS = (
    "abs capitalize count d default dictsort e escape first float groupby int items last length list lower "
    "map max min reject rejectattr reverse safe select selectattr sort title trim unique upper"
)
STR_METHODS = (
    "capitalize casefold count endswith find index isalnum isalpha isdecimal isdigit islower isnumeric "
    "isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex "
    "rpartition rsplit rstrip split splitlines startswith strip swapcase title upper"
)
METHODS: dict[type, frozenset[str]] = {
    str: frozenset(STR_METHODS.split()),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    bytes: frozenset(),
    int: frozenset(),
    float: frozenset(),
}


class _Budget:
    """Steps and characters one render may still use."""

    def __init__(self, input_chars: int):
        self.steps = BASE_STEPS + STEPS_PER_CHAR * input_chars
        self.max_chars = BASE_CHARS + CHARS_PER_CHAR * input_chars

    def spend(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise SecurityError("the template does too much work")

    def check_chars(self, chars: int) -> None:
        self.spend(1 + chars // CHARS_PER_STEP)
        if chars > self.max_chars:
            raise SecurityError(f"the template makes a text of more than {self.max_chars} characters")


_budget: ContextVar[_Budget] = ContextVar("chat_template_budget")


def _spend_loop(iterable: Any) -> Any:
    """Charge a loop for all its passes when it begins."""
    budget = _budget.get()
    if not hasattr(iterable, "__len__"):
        iterable = list(islice(iterable, budget.steps + 1))
    budget.spend(len(iterable))
    return iterable


def _join(parts: Iterable[str]) -> str:
    """``"".join`` that stops when the text grows too long; parts may come from a running template."""
    budget, kept, chars = _budget.get(), [], 0
    for part in parts:
        chars += len(part)
        if chars > budget.max_chars:
            break
        kept.append(part)
    budget.check_chars(chars)
    return "".join(kept)


def _spend_input(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is charged for the size of what it is given."""

    @wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        # the value comes first, or second where Jinja passes its own context before it
        _budget.get().spend(1 + sum(len(arg) // 8 for arg in args[:2] if hasattr(arg, "__len__")))
        return function(*args, **kwargs)

    return metered


def _concat(parts: Sequence[Any]) -> str:
    return _join(_text(part) for part in parts)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(_bounded(value))


def _bounded(value: Any) -> Any:
    """Charge for the size of a nested value before something writes all of it out."""
    if isinstance(value, str | Mapping | list | tuple):
        _budget.get().check_chars(_count_chars(value, _budget.get().max_chars))
    return value


def _count_chars(value: Any, limit: int) -> int:
    """Characters of a nested value, about; stops counting soon after ``limit``."""
    total, pending = 0, [value]
    while pending and total <= limit:
        item = pending.pop()
        total += len(item) if isinstance(item, str) else 4
        if isinstance(item, Mapping):
            pending.extend(item)
            pending.extend(item.values())
        elif isinstance(item, list | tuple):
            pending.extend(item)
    return total


def _replace(text: Any, old: Any, new: Any, count: Any = -1) -> str:
    whole, before, after = _text(text), _text(old), _text(new)
    _budget.get().check_chars(len(whole) + max(0, len(after) - len(before)) * whole.count(before))
    return whole.replace(before, after, -1 if count is None else count)


def _join_filter(items: Any, separator: Any = "", attribute: Any = None) -> str:
    separator, parts = _text(separator), []
    for i, item in enumerate(_spend_loop(items)):
        if i:
            parts.append(separator)
        if attribute is not None:
            item = item.get(attribute, "") if isinstance(item, Mapping) else ""
        parts.append(_text(item))
    return _join(parts)


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    prefix = width if isinstance(width, str) else " " * min(int(width), 64)
    lines = _text(text).split("\n")
    _budget.get().check_chars(len(text) + len(prefix) * len(lines))
    indented = [prefix + line if (i or first) and (line or blank) else line for i, line in enumerate(lines)]
    return "\n".join(indented)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    depth = len(indent) if isinstance(indent, str) else indent or 0
    if not 0 <= depth <= 16:
        raise SecurityError("tojson: indent is too large")
    text = json.dumps(
        _bounded(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    _budget.get().check_chars(len(text))
    return text


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Charge for what ``left operator right`` will make, before it is made."""
    budget = _budget.get()
    if operator == "*" and isinstance(left, int):
        left, right = right, left
    is_int = isinstance(left, int) and isinstance(right, int)
    sized = isinstance(left, str | list | tuple)
    if operator == "%" and isinstance(left, str):
        raise SecurityError("% on strings is not allowed; use ~")
    if operator == "+" and sized and hasattr(right, "__len__"):
        budget.check_chars(len(left) + len(right))
    elif operator == "*" and sized and isinstance(right, int):
        budget.check_chars(len(left) * max(right, 0))
    elif is_int and operator in ("*", "**"):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_INT_BITS:
            raise SecurityError("a number is too large")


def _range(*args: int) -> range:
    """``range`` of at most 10,000 numbers."""
    numbers = range(*args)
    if len(numbers) > MAX_RANGE:
        raise SecurityError(f"range has more than {MAX_RANGE} numbers")
    return numbers


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> Any:
    """What ``{{ value }}`` writes. It takes the context so that Jinja does not run it while compiling."""
    return value if isinstance(value, str) else _bounded(value)


def _raise_exception(message: object) -> Never:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 64 or re.search(r"%[-_0^#]*\d", pattern):
        raise SecurityError("strftime_now: a field width is not allowed")
    return datetime.now().strftime(pattern)


OWN_FILTERS: dict[str, Callable[..., Any]] = {
    "_spend_loop": _spend_loop,
    "_concat": _concat,
    "indent": _indent,
    "join": _join_filter,
    "replace": _replace,
    "string": _text,
    "tojson": _to_json,
}


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks the assistant's words; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Meter(NodeTransformer):
    """Rewrites a parsed template so that loops and ``~`` run under the budget."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node.iter = nodes.Filter(node.iter, "_spend_loop", [], [], None, None, lineno=node.lineno)
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        operands = nodes.List(node.nodes, lineno=node.lineno)
        return self.generic_visit(nodes.Filter(operands, "_concat", [], [], None, None, lineno=node.lineno))


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with loops, calls, filters, operators and texts under the budget of the render."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(_join)

    def __init__(self) -> None:
        extensions = [_Generation, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_finalize)
        metered = {name: _spend_input(self.filters[name]) for name in FILTERS.split()}
        self.filters = {**metered, **OWN_FILTERS}
        kept = {name: self.globals[name] for name in ("dict", "namespace")}
        self.globals = {
            **kept, "range": _range, "raise_exception": _raise_exception, "strftime_now": _strftime_now
        }  # fmt: skip

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        if any(tree.find(kind) for kind in (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
            raise SecurityError("a chat template cannot load other templates")
        return _Meter().visit(tree)  # type: ignore[no-any-return]

    def wrap_str_format(self, value: Any) -> None:
        """No ``str.format``: a field width makes text of any length."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, allowed in METHODS.items():
            if isinstance(obj, kind):
                return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.spend(1)
        if isinstance(obj, LoopContext) and args:  # a recursive loop's next level
            args = (_spend_loop(args[0]), *args[1:])
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            budget.check_chars(len(owner))
            if obj.__name__ == "replace":
                return _replace(owner, *args, **kwargs)
            if obj.__name__ == "join":
                return _join_filter(args[0], owner)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """One compiled template. Immutable; may render from several threads at once."""

    def __init__(self, source: str):
        """Raises ModelError if the template is too large or does not compile."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"the chat template is longer than {MAX_TEMPLATE_CHARS} characters")
        self.source = source
        try:
            self._template = _Environment().from_string(source)
        except Exception as error:  # also RecursionError and Python's own SyntaxError on nested blocks
            raise ModelError(f"the chat template does not compile: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text. ``variables`` reach the template by name: ``tools``, ``bos_token`` and the like.

        Raises RequestError if a message is malformed, or with the template's own message if it refuses.
        """
        values = {"tools": None, "documents": None, **variables}
        values.update(messages=check_messages(messages), add_generation_prompt=add_generation_prompt)
        token = _budget.set(_Budget(_count_chars(values, MAX_INPUT_CHARS)))
        try:
            return self._template.render(values)
        except Exception as error:
            raise RequestError(f"the chat template refuses this conversation: {error}") from error
        finally:
            _budget.reset(token)


def select_template(value: object) -> str | None:
    """The template in tokenizer_config.json: a string, or the one called "default" among named ones."""
    if isinstance(value, list):
        value = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
    if isinstance(value, dict):
        value = value.get("default")
    if value is not None and not isinstance(value, str):
        raise ModelError("must be a string, or named templates of which one is called default", field="chat_template")
    return value


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Messages with a string ``role`` and a string ``content``; a list of text parts is joined.

    Raises RequestError.
    """
    remedy = 'Use a list such as [{"role": "user", "content": "Hello"}]'
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("must be a non-empty list", field="messages", value=messages, remedy=remedy)
    checked = []
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not role:
            raise RequestError("must be a dict with a role", field=f"messages[{i}]", value=message, remedy=remedy)
        checked.append({**message, "content": _content(message.get("content"), f"messages[{i}].content")})
    return checked


def _content(value: object, field: str) -> str | None:
    if value is None or isinstance(value, str):  # None: an assistant's turn that only calls tools
        return value
    parts = value if isinstance(value, list) else [None]
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        remedy = "Use a string, or a list of text parts"
        raise RequestError("must be text", field=field, value=value, remedy=remedy)
    return "".join(texts)
