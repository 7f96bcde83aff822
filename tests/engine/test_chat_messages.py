"""Conversations and template arguments are copied as plain data, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

import pytest

from qkv_engine.errors import RequestError
from qkv_engine.text.chat_messages import MAX_CHARS, MAX_DEPTH, check_messages, check_template_kwargs


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
LOOP: dict[str, Any] = {}
LOOP["x"] = {"y": LOOP}


class Endless(Mapping[str, Any]):
    """A mapping that never ends, or breaks off."""

    def __init__(self, error: Exception | None = None):
        self._error = error

    def __getitem__(self, key: str) -> Any:
        if self._error is not None:
            raise self._error
        return "user"

    def __iter__(self) -> Iterator[str]:
        while True:
            yield "x"

    def __len__(self) -> int:
        return 1


class Text(str):
    """A string whose methods lie."""

    def replace(self, *args: Any) -> Any:  # type: ignore[override]
        raise RuntimeError

    def __str__(self) -> Any:  # type: ignore[override]
        return 5

    def __len__(self) -> int:
        return -1


class Role(StrEnum):
    USER = "user"


VALUES = [
    object(), b"x", {1, 2}, lambda: 0, 1j, nested(10**5), CYCLE, LOOP, {1: 2}, {None: 1}, 10**5000, 2**64, -(2**63) - 1,
    float("nan"), float("inf"), "x" * (MAX_CHARS + 1), [0] * (MAX_CHARS // 16), Endless(), Endless(ValueError("boom")),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_that_are_no_data(value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        check_messages([{"role": "user", "content": "x", "more": value}])
    assert caught.value.field == "messages[0]" and len(str(caught.value)) < 300
    with pytest.raises(RequestError):
        check_messages([{"role": "user", "content": value}])
    for name in ("x", "tools", "add_generation_prompt"):
        with pytest.raises(RequestError) as caught:
            check_template_kwargs({name: value})
        assert caught.value.field is not None and caught.value.field.startswith("template_kwargs")


@pytest.mark.parametrize(
    "messages",
    [
        [], (), None, "hi", b"x", 5, {}, {"role": "user", "content": "x"}, [None], ["hi"], [[]], [{}], [CYCLE],
        [{"role": 1, "content": "x"}], [{"role": "", "content": "x"}], [{"role": [], "content": "x"}],
        [{"content": "x"}],
        [{"role": "user", "content": 5}], [{"role": "user", "content": [{"type": "image"}]}], [Endless()],
        [{"role": "user", "content": [5]}], [{"role": "user", "content": {"text": "x"}}],
        [{"role": "user", "content": [{"text": 5}]}], [Endless(ValueError("boom"))], iter([]),
    ],
)  # fmt: skip
def test_malformed_messages(messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        check_messages(messages)
    assert caught.value.field is not None and caught.value.field.startswith("messages")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"}, {"role": "user", "content": None}, {"role": "assistant"},
        {"role": "assistant", "content": None},
        {"role": "system", "name": "x"}, {"role": "assistant", "tool_calls": None},
    ],
)  # fmt: skip
def test_a_missing_content_is_named(message: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"messages\[1\]\.content=None: is missing"):
        check_messages([{"role": "user", "content": "x"}, message])


def test_an_assistant_may_only_call_tools() -> None:
    calls = [{"name": "f", "arguments": {"x": [1, 2.5, None, True]}}]
    expected = [{"role": "assistant", "tool_calls": calls}]
    assert check_messages([{"role": "assistant", "content": None, "tool_calls": calls}]) == expected
    assert check_messages([{"role": "assistant", "tool_calls": calls, "refusal": None}]) == expected


def test_reasoning_has_all_its_names() -> None:
    for name in ("reasoning_content", "thinking", "reasoning"):
        (message,) = check_messages([{"role": "assistant", "content": "a", name: "hm"}])
        assert message["reasoning_content"] == message["thinking"] == message[name] == "hm"


def test_copies_are_plain_and_deep() -> None:
    parts = ({"type": "text", "text": Text("b")}, "c")
    given = [{"role": Role.USER, "content": parts, "more": {"x": [1, Text("d"), (2, False)]}}]
    (message,) = check_messages(given)
    texts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    assert message == {"role": "user", "content": texts, "more": {"x": [1, "d", [2, False]]}}
    assert type(message["role"]) is type(message["content"][0]["text"]) is type(message["more"]["x"][1]) is str
    message["more"]["x"].append(3)
    assert len(given[0]["more"]["x"]) == 3  # type: ignore[index]


def test_only_assistants_are_trusted() -> None:
    messages = [{"role": role, "content": "x", "more": ["x"]} for role in ("user", "assistant", "tool")]
    checked = check_messages(messages, rewrite=str.upper)
    assert [m["content"] + m["more"][0] for m in checked] == ["XX", "xx", "XX"]


def test_depth_and_size_that_are_allowed() -> None:
    assert check_messages([{"role": "user", "content": "x", "more": nested(MAX_DEPTH - 3)}])
    assert check_messages([{"role": "user", "content": "x"}] * 50_000)
    assert check_messages([{"role": "user", "content": "x" * (MAX_CHARS - 1000)}])
    with pytest.raises(RequestError, match="in all"):
        check_messages([{"role": "user", "content": "x" * (MAX_CHARS // 8)}] * 8)


def test_template_kwargs() -> None:
    tools = [{"name": "f", "strict": True}]
    given = {"tools": tools, "documents": None, "enable_thinking": False, "bos_token": "<s>", "n": 2**63}
    assert check_template_kwargs(given) == given
    assert check_template_kwargs({}) == {}


@pytest.mark.parametrize(
    "template_kwargs",
    [
        None, [], 5, "x", {"messages": []}, {"self": 1}, {"not a name": 1}, {"": 1}, {1: 2}, {"tools": [lambda: 0]},
        {"tools": "x"}, {"tools": ["x"]}, {"documents": {}}, {"add_generation_prompt": "no"},
        {"add_generation_prompt": 1},
        {"add_generation_prompt": None},
    ],
)  # fmt: skip
def test_template_kwargs_that_are_refused(template_kwargs: Any) -> None:
    with pytest.raises(RequestError) as caught:
        check_template_kwargs(template_kwargs)
    assert caught.value.field is not None and caught.value.field.startswith("template_kwargs")
