"""Templates render as under transformers, and a hostile one ends with an error, soon and without harm."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import qkv_engine
from qkv_engine.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate, check_messages, select_template
from qkv_engine.errors import ModelError, RequestError

DEMO = Path(qkv_engine.__file__).parent / "assets" / "demo"
CHATML: str = json.loads((DEMO / "tokenizer_config.json").read_text())["chat_template"]

LLAMA3 = """\
{%- set ns = namespace(system='') %}
{%- if messages[0]['role'] == 'system' %}
    {%- set ns.system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- bos_token }}
{%- if ns.system or tools is not none %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + ns.system }}
    {%- if tools is not none %}
        {%- for tool in tools %}
            {{- '\\n' ~ (tool | tojson(indent=4)) }}
        {%- endfor %}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' ~ message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN3 = """\
{%- macro turn(role, text) %}
    {{- '<|im_start|>' ~ role ~ '\\n' ~ text ~ '<|im_end|>\\n' }}
{%- endmacro %}
{%- set ns = namespace(last_query=messages | length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and message.content is string %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- turn('system', '# Tools\\n' ~ tools | map('tojson') | join('\\n')) }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- set reasoning = '' %}
    {%- if '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {%- if loop.index0 > ns.last_query and reasoning %}
            {%- set content = '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content %}
        {%- endif %}
        {{- turn('assistant', content) }}
        {%- endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' ~ {'name': call.name, 'arguments': call.arguments} | tojson ~ '</tool_call>\\n' }}
        {%- endfor %}
    {%- elif message.role == 'note' %}
        {%- continue %}
    {%- else %}
        {{- turn(message.role, content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

PLAIN = """\
{% for message in messages %}
    {% if loop.first %}
[BEGIN]
    {% endif %}
{{ message.role | upper }}: {{ message.content }}
    {% if loop.last and add_generation_prompt %}
ASSISTANT:{% break %}
    {% endif %}
{% endfor %}
"""

TOOLS = [{"name": "add", "parameters": {"x": "<a & 'é'>"}}]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": " Be kind. "}, {"role": "user", "content": "é <b>🙂</b>\n"}],
    [
        {"role": "user", "content": "1+1?"},
        {
            "role": "assistant",
            "content": "<think>\neasy\n</think>\n\n2",
            "tool_calls": [{"name": "f", "arguments": {}}],
        },
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "<think>a</think>b"},
    ],
]
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("source", [CHATML, LLAMA3, QWEN3, PLAIN], ids=["chatml", "llama3", "qwen3", "plain"])
@pytest.mark.parametrize("kwargs", [{}, {"tools": TOOLS}, {"enable_thinking": False}, {"add_generation_prompt": False}])
def test_renders_as_transformers(source: str, kwargs: dict[str, Any]) -> None:
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    template = ChatTemplate(source)
    for messages in CONVERSATIONS:
        tools = kwargs.get("tools")
        rest = {key: value for key, value in kwargs.items() if key != "tools"}
        expected, _ = reference.render_jinja_template(
            [messages], tools=tools, chat_template=source, bos_token="<|begin|>",
            **{"add_generation_prompt": True, **rest},
        )  # fmt: skip
        assert template.render(messages, bos_token="<|begin|>", **kwargs) == expected[0]


def test_chatml_text() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    expected = "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    assert ChatTemplate(CHATML).render(messages) == expected


def test_template_refusal_reaches_the_caller() -> None:
    with pytest.raises(RequestError, match="unknown role robot"):
        ChatTemplate(LLAMA3).render([*USER, {"role": "robot", "content": "x"}], bos_token="")


def test_strftime_now() -> None:
    text = ChatTemplate("{{ strftime_now('%d %b %Y') }}").render(USER)
    assert text in {datetime.now().strftime("%d %b %Y"), text}
    assert datetime.strptime(text, "%d %b %Y")


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['__builtins__'] }}",
    "{{ (messages|map(attribute='__class__')|list)[0].__bases__ }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ ['{0.__class__}']|map('format', messages)|list }}",
    "{{ messages|attr('append') }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ messages[0].clear() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% from 'os' import path %}",
    "{% extends 'base' %}",
    "{{ self.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ lipsum(5) }}",
    "{% macro m() %}{% endmacro %}{{ m.__globals__ }}",
    "{{ _budget }}{{ environment.filters }}",
    "{{ loop.__init__.__globals__ }}",
]
DOUBLE = "{%% set ns = namespace(s='ab') %%}{%% for i in range(60) %%}%s{%% endfor %%}{{ ns.s }}"
BOMBS = [
    "{% set x = range(9999) %}{% for i in x %}{% for j in x %}{% for k in x %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "{% for i in range(9999) %}{% for j in range(9999) %}{{ 'x' }}{% endfor %}{% endfor %}",
    "{{ range(10**9)|list }}",
    "{{ 9**(9**9) }}",
    "{% set x = 9 %}{{ x**(x**x) }}",
    "{{ (10**5000)|string }}",
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ [0] * 10**10 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ 'a'|center(10**9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a'.zfill(10**9) }}",
    "{{ ('a\\n' * 9999)|indent(10**9) }}",
    "{{ ('a' * 99999)|replace('a', 'b' * 99999) }}",
    "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "{{ (range(9999)|list)|join('b' * 99999) }}",
    "{{ ('b' * 99999).join(['a'] * 9999) }}",
    "{{ [1]|batch(10**9)|list }}",
    "{{ messages|tojson(indent=10**9) }}",
    "{{ (1).to_bytes(10**10, 'big') }}",
    "{{ strftime_now('%999999999Y') }}",
    "{{ strftime_now('%-0999999999d') }}",
    DOUBLE % "{% set ns.s = ns.s ~ ns.s %}",
    DOUBLE % "{% set ns.s = ns.s + ns.s %}",
    DOUBLE % "{% set ns.s = ns.s * 2 %}",
    DOUBLE % "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}",
    DOUBLE % "{% set ns.s = [ns.s, ns.s]|join %}",
    DOUBLE % "{% set ns.s = [ns.s, ns.s] %}",
    DOUBLE % "{% set ns.s = [ns.s, ns.s] %}{% set t = ns.s|tojson %}",
    DOUBLE % "{% set ns.s = [ns.s, ns.s] %}{% set t = ns.s|string %}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "{% for c in [1, 2] recursive %}{{ loop([1, 2, 3]) }}{% endfor %}",
    "(" * 10,
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "{{ " + "+".join("1" * 5000) + " }}",
    "x" * (MAX_TEMPLATE_CHARS + 1),
]


@pytest.mark.parametrize("source", ESCAPES)
def test_escapes_give_nothing(source: str) -> None:
    try:
        text = ChatTemplate("{% for m in messages %}" + source + "{% endfor %}").render(USER)
    except (ModelError, RequestError):
        return
    assert text == ""


@pytest.mark.parametrize("source", BOMBS, ids=lambda s: s[:40])
def test_bombs_end_soon(source: str) -> None:
    start = time.process_time()
    try:
        text = ChatTemplate(source).render(USER)
    except (ModelError, RequestError):
        text = ""
    assert len(text) < 300_000
    assert time.process_time() - start < 3


def test_large_honest_conversations_fit() -> None:
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 2000} for i in range(200)]
    text = ChatTemplate(QWEN3).render(messages)
    assert len(text) > 2_000_000
    assert len(ChatTemplate(CHATML).render([{"role": "user", "content": ""}] * 5000)) > 100_000


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ x", "{% for %}", "{{ x|nonsense }}", "{% generation %}", "{% unknown %}"]
)
def test_broken_template_is_a_model_error(source: str) -> None:
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "messages",
    [
        [], None, "hi", {}, [None], ["hi"], [{}], [{"role": 1, "content": "x"}], [{"role": "", "content": "x"}],
        [{"role": "user", "content": 5}], [{"role": "user", "content": [{"type": "image"}]}],
        [{"role": "user", "content": [5]}], [{"role": "user", "content": {"text": "x"}}],
    ],
)  # fmt: skip
def test_malformed_messages(messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        check_messages(messages)
    assert caught.value.field is not None and caught.value.field.startswith("messages")


def test_select_template() -> None:
    assert select_template(None) is None
    assert select_template("x") == "x"
    assert select_template({"default": "a", "rag": "b"}) == "a"
    assert select_template([{"name": "rag", "template": "b"}, {"name": "default", "template": "a"}]) == "a"
    assert select_template([{"name": "rag", "template": "b"}]) is None
    with pytest.raises(ModelError):
        select_template(5)
