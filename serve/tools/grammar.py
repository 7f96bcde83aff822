"""Grammars of calls, in llguidance's form of Lark: rules are named as they are needed, and joined in the end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable

from qkv_engine.text.tokenizer import Tokenizer

from .schemas import JsonObject, Tool, closed, without_remarks

# Between parts of JSON, such as indented text has; without a bound a model may write on for ever.
_SPACE = " ?\\n{0,2} {0,16}"
_ANY_CHAR = r"(.|\n)"


class GrammarWriter:
    """Rules over a model's tokens. Every method gives an expression for the place where it is called."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._rules: list[str] = []
        self._names: dict[str, str] = {}  # of rules, by their text or key

    def grammar(self, start: str) -> str:
        """The grammar of ``start`` as llguidance takes it."""
        return "\n".join([f"start: {start}", *self._rules])

    def literal(self, text: str) -> str:
        """Exactly ``text``, in ordinary tokens."""
        return json.dumps(text, ensure_ascii=False)

    def mark(self, text: str) -> str:
        """A mark: the token that it is, or its text."""
        token_id = self.token(text)
        return self.literal(text) if token_id is None else f"<[{token_id}]>"

    def token(self, text: str) -> int | None:
        """The token that a mark is; None where it is several."""
        return self._tokenizer.token_of(text) if len(text) > 1 else None

    def json(self, schema: JsonObject, *, is_strict: bool) -> str:
        """JSON of a schema; keywords that llguidance does not know are an error where it ``is_strict``."""
        options: JsonObject = {"whitespace_pattern": _SPACE, **({} if is_strict else {"lenient": True})}
        return self.rule("j", f"%json {json.dumps(without_remarks(schema) | {'x-guidance': options})}")

    def arguments(self, tool: Tool) -> str:
        """The arguments of a call of ``tool`` as JSON."""
        return self.json(closed(tool.schema), is_strict=tool.is_strict)

    def regex(self, pattern: str) -> str:
        """Text of a regular expression, in ordinary tokens."""
        return self._terminal(f"/{pattern}/")

    def one_of(self, choices: Iterable[str]) -> str:
        """One of several expressions."""
        return self.rule("r", " | ".join(dict.fromkeys(choices)))

    def repeated(self, item: str, separator: str, most: int | None) -> str:
        """One to ``most`` times ``item``; None for any number."""
        times = "*" if most is None else f"{{0,{most - 1}}}"
        return item if most == 1 else f"{item} ({separator} {item}){times}"

    def rule(self, prefix: str, body: str) -> str:
        """The name of a rule with this body, the same for the same one."""
        if body not in self._names:
            self._names[body] = f"{prefix}{len(self._names)}"
            self._rules.append(f"{self._names[body]}: {body}")
        return self._names[body]

    def recursive(self, key: str, body: Callable[[], str]) -> str:
        """The name of the rule for ``key``, which ``body`` may refer to by calling this again."""
        if key not in self._names:
            self._names[key] = name = f"d{len(self._names)}"
            self._rules.append(f"{name}: {body()}")
        return self._names[key]

    def text_until(self, mark: str, low: int = 0, high: int | None = None) -> str:
        """Any text of ``low`` to ``high`` characters without ``mark``, and this."""
        count = "*" if (low, high) == (0, None) else f"{{{low},{'' if high is None else high}}}"
        if self.token(mark) is None:
            return self._lazy(f"[suffix={self.literal(mark)}]: /{_ANY_CHAR}{count}/")
        return f"{self._terminal(f'/{_ANY_CHAR}{count}/ & {_without(mark)}')} {self.mark(mark)}"

    def mixed(self, mark: str, after: str, most: int | None) -> str:
        """Any text in which each ``mark`` is followed by ``after``; at most ``most`` of them."""
        times = "*" if most is None else f"{{0,{most}}}"
        if self.token(mark) is not None:
            text = self._terminal(f"/{_ANY_CHAR}+/")
            return f"{text}? ({self.mark(mark)} {after} {text}?){times}"
        text = self._terminal(f"/{_ANY_CHAR}*/ & {_without(mark)}")
        return f"({self._lazy(f'[lazy]: /{_ANY_CHAR}*{_escaped(mark)}/')} {after}){times} {text}"

    def text_not_after(self, chars: str) -> str:
        """Any text whose first character, behind white space, is none of ``chars``."""
        return self._terminal(f"/\\s*([^\\s{re.escape(chars)}]{_ANY_CHAR}*)?/")

    def _terminal(self, pattern: str) -> str:
        return self.rule("T", pattern)

    def _lazy(self, body: str) -> str:
        if body not in self._names:
            self._names[body] = f"z{len(self._names)}"
            self._rules.append(f"{self._names[body]}{body}")
        return self._names[body]


def _escaped(text: str) -> str:
    """``text`` within a regular expression between slashes."""
    return re.sub(r"[\\.+*?()|\[\]{}^$/&~#-]", lambda found: f"\\{found[0]}", text)


def _without(mark: str) -> str:
    return f"~/{_ANY_CHAR}*{_escaped(mark)}{_ANY_CHAR}*/"


def lengths(schema: JsonObject) -> tuple[int, int | None]:
    """The least and the most characters of a string."""
    low, high = schema.get("minLength"), schema.get("maxLength")
    return (low if isinstance(low, int) else 0), (high if isinstance(high, int) else None)
