"""A hostile template ends with a typed error in two seconds, and other threads render all the while."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from qkv_engine.errors import ModelError, QKVError, RequestError
from qkv_engine.text.chat_template import ChatTemplate

VARIABLES = {"messages": [{"role": "user", "content": "hi"}]}
# Two equal values of 2**60 leaves in 60 lists: whatever walks them never ends.
NEST = (
    "{% set ns = namespace(x=1, y=1) %}"
    "{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
TUPLES = NEST.replace("[ns.x, ns.x]", "(ns.x, ns.x)")
PASSES = "{%% for i in range(99999) %%}{%% for j in range(9999) %%}%s{%% endfor %%}{%% endfor %%}"
DOUBLE = "{%% set ns = namespace(s='ab') %%}{%% for i in range(60) %%}%s{%% endfor %%}{{ ns.s }}"


def kept(value: str, item: str) -> str:
    """A template that keeps one more ``item`` of the value ``s`` in each pass."""
    return "{% set ns = namespace(l=[]) %}{% set s = " + value + " %}" + PASSES % f"{{% set ns.l = ns.l + [{item}] %}}"


QUICK = {
    "raise": NEST + "{{ raise_exception(ns.x) }}",
    "kept slices": kept("'x' * 1000000", "s[1:]"),
    "range": PASSES % "{{ 9999.5 in range(10000) }}",
    "compile": "{{a}}" * 52_000,
    "multiply": "{{ 'a' * 10**10 }}",
    "constant": "{{ 9 ** (9 ** 9) }}",
    "double": DOUBLE % "{% set ns.s = ns.s ~ ns.s %}",
    "long text": "{{ 'a' * 16800000 }}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
}
MORE = {
    "split": kept("'x ' * 1000000", "s.split()"),
    "slices": "{% set s = 'x' * 1000000 %}" + PASSES % "{% set t = s[::-1] %}",
    "compare": NEST + "{{ ns.x == ns.y }}",
    "sort": NEST + "{{ [ns.x, ns.y] | sort | length }}",
    "hash": TUPLES + "{% set d = {ns.x: 1} %}",
    "text filter": NEST + "{{ ns.x | upper }}",
    "namespace repr": NEST + "{{ ns }}",
    "in": NEST + "{{ ns.x in [ns.y] }}",
    "is in": NEST + "{{ ns.x is in [ns.y] }}",
    "max": NEST + "{{ [ns.x, ns.y] | max | length }}",
    "min": NEST + "{{ [ns.x, ns.y] | min | length }}",
    "unique": TUPLES + "{{ [ns.x, ns.x] | unique | list | length }}",
    "groupby": NEST + "{{ [{'a': ns.x}, {'a': ns.y}] | groupby('a') | length }}",
    "dictsort": NEST + "{{ {'a': ns.x, 'b': ns.y} | dictsort(by='value') | length }}",
    "index": NEST + "{{ [ns.x].index(ns.y) }}",
    "count": NEST + "{{ [ns.x].count(ns.y) }}",
    "trim": NEST + "{{ ns.x | trim }}",
    "escape": NEST + "{{ ns.x | e }}",
    "write": NEST + "{{ ns.x }}",
    "values": NEST + "{{ {'a': ns.x}.values() }}",
    "items": NEST + "{{ {'a': ns.x}.items() }}",
    "string": NEST + "{{ ns.x | string }}",
    "tojson": NEST + "{{ ns.x | tojson }}",
    "pprint": NEST + "{{ ns.x | pprint }}",
    "copies": kept("range(99999) | list", "s.copy()"),
    "dicts": kept("dict.fromkeys(range(99999))", "dict(s)"),
    "fromkeys": PASSES % "{% set d = dict.fromkeys(range(10000)) %}",
    "list in": "{% set l = range(10000) | list %}" + PASSES % "{{ -1 in l }}",
    "list equals": "{% set l = range(10000) | list %}{% set m = range(10000) | list %}" + PASSES % "{{ l == m }}",
    "list count": "{% set l = range(10000) | list %}" + PASSES % "{{ l.count(-1) }}",
    "passes": PASSES % "",
    "text of passes": PASSES % "x",
    "compile joins": "{{ " + "~".join(["1"] * 120_000) + " }}",
    "multiply lists": "{{ [0] * 10**10 }}",
    "power": "{% set x = 9 %}{{ x ** (x ** x) }}",
    "long number": "{{ ((range(99999) | list | sum) ** 100000) | string }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "center": "{{ 'a' | center(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "indent": "{{ ('a\\n' * 9999) | indent(10**9) }}",
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "join": "{{ (range(9999) | list) | join('b' * 999999) }}",
    "batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "json indent": "{{ messages | tojson(indent=10**9) }}",
    "bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "lipsum": "{{ lipsum(99999) }}",
    "double list": DOUBLE % "{% set ns.s = [ns.s, ns.s] %}",
    "double block": DOUBLE % "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}",
    "double calls": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "recursive loop": "{% for c in [1, 2] recursive %}{{ loop([1, 2, 3]) }}{% endfor %}",
    "deep": "{% set ns = namespace(x=1) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
}


@pytest.fixture(scope="module")
def other_thread() -> Iterator[list[float]]:
    """Seconds that each render of an honest template took, in a thread that does nothing else."""
    seconds: list[float] = []
    stop = threading.Event()
    template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}")

    def run() -> None:
        while not stop.wait(0.01):
            begin = time.monotonic()
            assert template.render(VARIABLES) == "user: hi"
            seconds.append(time.monotonic() - begin)

    thread = threading.Thread(target=run)
    thread.start()
    yield seconds
    stop.set()
    thread.join()
    template.close()


def check(source: str, other_thread: list[float]) -> None:
    template, before = ChatTemplate(source), len(other_thread)
    begin = time.monotonic()
    with pytest.raises(QKVError) as caught:
        template.render(VARIABLES)
    assert time.monotonic() - begin < 2
    assert isinstance(caught.value, RequestError | ModelError) and len(str(caught.value)) < 700
    template.close()
    while len(other_thread) == before:  # a broken template can end sooner than one honest render
        time.sleep(0.01)
    assert max(other_thread[before:]) < 1


@pytest.mark.parametrize("name", QUICK)
def test_hostile_templates_end(name: str, other_thread: list[float]) -> None:
    check(QUICK[name], other_thread)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_hostile_templates_end(name: str, other_thread: list[float]) -> None:
    check(MORE[name], other_thread)


def test_a_slow_conversation_delays_the_next_one_for_a_moment() -> None:
    """One process renders one conversation at a time; who waits for a slow one waits for its limit at most."""
    template = ChatTemplate(
        "{% for a in range(messages | length ** 4) %}{% for b in range(9999) %}{% endfor %}{% endfor %}ok"
    )
    assert template.render(VARIABLES) == "ok"
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(template.render, {"messages": [{}] * 17})
        time.sleep(0.1)
        begin = time.monotonic()
        assert template.render(VARIABLES) == "ok"
        assert time.monotonic() - begin < 2
        assert isinstance(slow.exception(), RequestError)
    template.close()
