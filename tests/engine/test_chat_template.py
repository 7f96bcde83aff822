"""Templates render as under transformers, tools included, and give nothing to those who would break out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import qkv_engine
from qkv_engine.errors import ModelError, RequestError
from qkv_engine.text.chat_messages import check_messages
from qkv_engine.text.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate, select_template
from qkv_engine.text.template_worker import compile_template

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

PARTS = """\
{%- for message in messages %}
    {{- '[' ~ message.role ~ ']' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'text' %}
                {{- part.text ~ ('|' if not loop.last else '') }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
"""
RAG = """\
{%- for document in documents or [] %}
    {{- loop.index ~ '. ' ~ document['title'] | title ~ ': ' ~ document.text | truncate(12) ~ '\\n' }}
{%- endfor %}
{%- for message in messages if message.role != 'system' %}
    {{- message.content.replace('a', 'b').strip().split(' ', 1) | last }}
{%- else -%}
    nothing
{%- endfor %}
{{- messages | map(attribute='role') | unique | sort | join(',') }}
"""
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "<a & 'é'>", "parameters": {"x": [1, 2.5, None]}}},
    {"type": "function", "function": {"name": "neg", "description": "", "parameters": {"x": {"b": True, "a": "🙂"}}}},
]
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
MESSAGES = CONVERSATIONS[2]
USER = [{"role": "user", "content": "hi"}]
# One construct a line, of those that templates in the wild are made of; ⏎ is a line break.
CONSTRUCTS = Path(__file__).with_name("chat_constructs.txt").read_text("utf-8").rstrip("\n").split("\n")
CONSTRUCTS = [line.replace("⏎", "\n") for line in CONSTRUCTS]


@pytest.fixture(scope="module")
def render() -> Iterator[Any]:
    """Renders messages by a source; one process for each source."""
    templates: dict[str, ChatTemplate] = {}

    def render(source: str, messages: Any, **variables: Any) -> str:
        template = templates.setdefault(source, ChatTemplate(source))
        values = {"tools": None, "documents": None, "add_generation_prompt": True, **variables}
        return template.render({**values, "messages": check_messages(messages)})

    yield render
    for template in templates.values():
        template.close()


def reference(source: str, messages: Any, **variables: Any) -> str:
    module = pytest.importorskip("transformers.utils.chat_template_utils")
    texts, _ = module.render_jinja_template([messages], chat_template=source, **variables)
    return str(texts[0])


SOURCES = {"chatml": CHATML, "llama3": LLAMA3, "qwen3": QWEN3, "plain": PLAIN, "rag": RAG}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("kwargs", [{}, {"tools": TOOLS}, {"enable_thinking": False}, {"add_generation_prompt": False}])
def test_renders_as_transformers(name: str, kwargs: dict[str, Any], render: Any) -> None:
    documents = [{"title": "the tale", "text": "once upon a time in a land"}]
    variables = {"add_generation_prompt": True, "bos_token": "<|begin|>", "documents": documents, **kwargs}
    for messages in CONVERSATIONS:
        expected = reference(SOURCES[name], messages, **variables)
        assert render(SOURCES[name], messages, **variables) == expected
        assert expected


@pytest.mark.parametrize("source", CONSTRUCTS)
def test_constructs_render_as_transformers(source: str) -> None:
    """Compiled as in the worker, but in this process, to save the start of many."""
    messages = [*MESSAGES, {"role": "assistant", "content": "c", "thinking": "hm"}]
    variables = {"tools": TOOLS, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
    text = compile_template(source).render({**variables, "documents": None, "messages": check_messages(messages)})
    assert text == reference(source, messages, **variables)
    assert text


def test_text_parts(render: Any) -> None:
    """A template that goes through parts gets them, as under transformers; any other gets their text."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(PARTS, messages) == reference(PARTS, messages) == "[user]a|b"
    assert render(CHATML, messages) == "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    assert render(PARTS, USER) == "[user]hi"


def test_template_refusal_reaches_the_caller(render: Any) -> None:
    with pytest.raises(RequestError, match="unknown role robot"):
        render(LLAMA3, [*USER, {"role": "robot", "content": "x"}], bos_token="")


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('a' * 10**6) }}", "{{ raise_exception([[1]]) }}", "{{ 1 / 0 }}"]
)
def test_refusals_are_short(source: str, render: Any) -> None:
    with pytest.raises(RequestError, match="refuses") as caught:
        render(source, USER)
    assert len(str(caught.value)) < 700 and "\n" not in str(caught.value)


def test_strftime_now(render: Any) -> None:
    before = datetime.now().replace(microsecond=0)
    text = render("{{ strftime_now('%d %b %Y %H:%M:%S') }}", USER)
    assert before <= datetime.strptime(text, "%d %b %Y %H:%M:%S") <= datetime.now()


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
    "{% macro m() %}{% endmacro %}{{ m.__globals__ }}",
    "{{ loop.__init__.__globals__ }}",
    "{{ lipsum.__globals__ }}",
    "{{ environment.filters }}{{ to_json }}{{ stream }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ dict.__class__ }}{{ dict.__globals__ }}",
    "{{ (namespace(__class__=1)).x }}",
    "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
    "{{ namespace(_a=1) }}",
    "{{ tools.pop() }}{{ messages.sort() }}",
    "{{ messages[0].__class__.__base__.__subclasses__() }}",
    "{{ ''|attr('__class__') }}",
    "{{ (messages|map('attr', '__class__')|list)[0].x }}",
    "{{ ''.join.__self__.__class__ }}",
    "{{ '{0.__class__}'.format_map({'0': 1}) }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_escapes_give_nothing(source: str) -> None:
    try:
        text = compile_template("{% for m in messages %}" + source + "{% endfor %}").render(messages=USER, tools=[{}])
    except Exception:
        return
    assert text == ""


def test_large_honest_conversations_fit(render: Any) -> None:
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 2000} for i in range(200)]
    assert len(render(QWEN3, messages)) > 2_000_000
    assert len(render(CHATML, [{"role": "user", "content": ""}] * 5000)) > 100_000
    assert len(render(CHATML, [{"role": "user", "content": "中🙂" * 1_500_000}])) > 3_000_000


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}", "{{ x", "{% for %}", "{{ x|nonsense }}", "{% generation %}", "{% unknown %}", "(" * 10 + "{{ ) }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    ],
)  # fmt: skip
def test_broken_template_is_a_model_error(source: str, render: Any) -> None:
    for _ in range(2):
        with pytest.raises(ModelError, match="does not compile"):
            render(source, USER)


def test_template_too_long() -> None:
    with pytest.raises(ModelError, match="longer"):
        ChatTemplate("x" * (MAX_TEMPLATE_CHARS + 1))


@pytest.mark.parametrize("variables", [{"x": object()}, {"x": "\ud800"}, {"x": {object(): 1}}])
def test_variables_that_are_not_json(variables: dict[str, Any]) -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    for values in (variables, {"x": cycle}):
        with pytest.raises(RequestError, match="JSON"):
            ChatTemplate("x").render({"messages": USER, **values})


@pytest.mark.parametrize("source", ["{{ '\\ud800' }}", "{{ '\\udfff' ~ messages[0].content }}"])
def test_a_template_that_writes_half_a_character(source: str, render: Any) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        render(source, USER)


def test_select_template() -> None:
    assert select_template(None) is None
    assert select_template("x") == "x"
    assert select_template({"default": "a", "rag": "b"}) == "a"
    named = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}]
    assert select_template(named) == "a"
    assert select_template(named, "tool_use") == "b"
    assert select_template("x", "tool_use") is None
    assert select_template([{"name": "rag", "template": "b"}]) is None


@pytest.mark.parametrize("value", [5, [{"name": []}], [{"name": {}, "template": "x"}], [5], [{}], {"default": 5}])
def test_select_template_of_nonsense(value: Any) -> None:
    with pytest.raises(ModelError):
        select_template(value)
