"""Calls as each family's template writes them, made without the parsers: what a test reads back."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from qkv_engine.serve.tools.families import find_family
from qkv_engine.serve.tools.family import CallFamily

Arguments = dict[str, Any]
Call = tuple[str, Arguments]
NAMES = ("weather", "get_time", "list-files", "a", "Übersetzen", "tool.v2", "x" * 60)
MARKS = [
    *("<tool_call>", "</tool_call>", "<function=a>", "</function>", "</parameter>", "<arg_value>", "</arg_value>"),
    *("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<escape>", "<think>"),
    *("<|channel|>", "<|message|>", "<|call|>", "<|start|>assistant", "\n</parameter>", "a(b=1)]", '"}}', "'", '\\"'),
]
PIECES = [*" \n\t\"'\\{}[],:=é5<#()%🙂\u2028\x7f", "", "\n\n", "\\n", "東京", "null", "True", "ab", "x" * 50]
PIECES += ["</", "</par", "&amp;", "//"]


class Form(NamedTuple):
    """How a family writes.

    Fields
        template: a piece of a chat template of the family.
        write: the text of some calls.
        own: marks that a string cannot have, for nothing in the form escapes them.
        takes_text: text may stand before and between calls.
    """

    template: str
    write: Callable[[list[Call]], str]
    own: tuple[str, ...] = ()
    takes_text: bool = True

    @property
    def family(self) -> CallFamily:
        found = find_family(self.template)
        assert found is not None
        return found


def hermes(calls: list[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_object(call, 'arguments')}\n</tool_call>" for call in calls)


def qwen_coder(calls: list[Call]) -> str:
    def one(call: Call) -> str:
        name, arguments = call
        lines = [f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in arguments.items()]
        return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"

    return "\n".join(map(one, calls))


def glm(calls: list[Call], line: str = "\n") -> str:
    def one(call: Call) -> str:
        name, arguments = call
        pairs = [
            f"<arg_key>{key}</arg_key>{line}<arg_value>{_plain(value)}</arg_value>{line}"
            for key, value in arguments.items()
        ]
        return f"<tool_call>{name}{line}{''.join(pairs)}</tool_call>"

    return line.join(map(one, calls))


def glm_without_lines(calls: list[Call]) -> str:
    return glm(calls, "")


def llama(calls: list[Call]) -> str:
    return "; ".join(_object(call, "parameters") for call in calls)


def pythonic(calls: list[Call]) -> str:
    def one(call: Call) -> str:
        name, arguments = call
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    return f"[{', '.join(map(one, calls))}]"


def mistral(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def mistral_with_ids(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]Ab3dE6gH9[ARGS]{json.dumps(each)}" for name, each in calls)


def mistral_list(calls: list[Call]) -> str:
    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return f"[TOOL_CALLS] {json.dumps(objects, ensure_ascii=False)}"


def gpt_oss(calls: list[Call]) -> str:
    head = "<|start|>assistant<|channel|>commentary to=functions."
    return "".join(f"{head}{name} <|constrain|>json<|message|>{json.dumps(each)}" for name, each in calls)


def gpt_oss_by_role(calls: list[Call]) -> str:
    return "".join(
        f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{json.dumps(each, indent=1)}"
        for name, each in calls
    )


def gemma(calls: list[Call], opening: str = "<|tool_call>", closing: str = "<tool_call|>", quote: str = '<|"|>') -> str:
    def name(key: str) -> str:
        return key if key.isascii() and key.isalnum() else f"{quote}{key}{quote}"

    def value(given: Any) -> str:
        if isinstance(given, str):
            return f"{quote}{given}{quote}"
        if isinstance(given, dict):
            return f"{{{','.join(f'{name(key)}:{value(each)}' for key, each in given.items())}}}"
        return f"[{','.join(map(value, given))}]" if isinstance(given, list) else json.dumps(given)

    def one(call: Call) -> str:
        name, arguments = call
        return f"{opening}call:{name}{{{','.join(f'{key}:{value(each)}' for key, each in arguments.items())}}}{closing}"

    return "".join(map(one, calls))


def function_gemma(calls: list[Call]) -> str:
    return gemma(calls, "<start_function_call>", "<end_function_call>", "<escape>")


_CODER, _GLM = "<tool_call>\n<function=x>\n<parameter=y>", "<tool_call>{{ name }}<arg_key><arg_value>"
FORMS = {
    "hermes": Form("<tool_call></tool_call>", hermes),
    "qwen-coder": Form(_CODER, qwen_coder, ("</parameter>",)),
    "glm": Form(_GLM, glm, ("</arg_value>",)),
    "glm-4.7": Form(_GLM, glm_without_lines, ("</arg_value>",)),
    "llama": Form("<|python_tag|>", llama, takes_text=False),
    "pythonic": Form("[func_name1(params_name1=params_value1)]", pythonic, takes_text=False),
    "mistral": Form("[TOOL_CALLS][ARGS]", mistral),
    "mistral-ids": Form("[TOOL_CALLS][CALL_ID][ARGS]", mistral_with_ids),
    "mistral-list": Form("[TOOL_CALLS] [", mistral_list),
    "gpt-oss": Form("<|start|><|channel|><|message|>", gpt_oss),
    "gpt-oss-role": Form("<|start|><|channel|><|message|>", gpt_oss_by_role),
    "gemma": Form("<|tool_call>call:", gemma, ('<|"|>',)),
    "function-gemma": Form("<start_function_call>call:", function_gemma, ("<escape>",)),
}


class Writer:
    """Random calls of random tools, whose schemas say what the arguments are."""

    def __init__(self, seed: int, own: tuple[str, ...] = ()):
        self.rng, self._own = random.Random(seed), own

    def calls(self, most: int = 3) -> list[Call]:
        """One to ``most`` calls, each of another tool."""
        names = self.rng.sample(NAMES, self.rng.randint(1, most))
        return [(name, self._arguments()) for name in names]

    def text(self) -> str:
        """Text that is none of a call, with marks as far as they begin none."""
        words = ["Let me see.", " a < b", "\n", " <tool", " [TOOL", " {x}", "é", " <|", " <start_", " ok"]
        return "T" + "".join(self.rng.choices(words, k=self.rng.randint(0, 5))) + "."

    def _arguments(self) -> Arguments:
        keys = self.rng.sample(
            ["city", "days", "opts", "q", "flag", "ids", "none", "x_1", "a-b"], self.rng.randint(0, 4)
        )
        return {key: self._value(2) for key in keys}

    def _value(self, depth: int) -> Any:
        kind = self.rng.randrange(8 if depth else 6)
        if kind < 2:
            return self._string()
        if kind == 2:
            return self.rng.choice([0, -1, 7, 10**18, self.rng.randint(-(10**9), 10**9)])
        if kind == 3:
            return self.rng.choice([0.5, -2.25, 1e300, 1e-9, self.rng.random()])
        if kind < 6:
            return self.rng.choice([True, False, None])
        if kind == 6:
            return [self._value(depth - 1) for _ in range(self.rng.randint(0, 3))]
        keys = self.rng.sample(["k", "a b", "é", "x:y", "z"], self.rng.randint(0, 3))
        return {key: self._value(depth - 1) for key in keys}

    def _string(self) -> str:
        marks = [mark for mark in MARKS if not any(own in mark or mark in own for own in self._own)]
        text = "".join(
            self.rng.choice(marks if self.rng.random() < 0.2 else PIECES) for _ in range(self.rng.randint(0, 6))
        )
        for own in self._own:  # which neighbours have made
            text = text.replace(own, "")
        return text


def tools_for(calls: list[Call]) -> list[dict[str, Any]]:
    """Tools whose schemas the calls meet."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {key: schema_of(each) for key, each in arguments.items()},
                },
            },
        }
        for name, arguments in calls
    ]


def schema_of(value: Any) -> dict[str, Any]:
    """A schema that ``value`` meets."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return {"type": kinds.get(type(value), "null")}


def _object(call: Call, arguments: str) -> str:
    return json.dumps({"name": call[0], arguments: call[1]}, ensure_ascii=False)


def _plain(value: Any) -> str:
    """An argument in XML: a string as it is, others as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
