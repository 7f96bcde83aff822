"""The page in Chromium beside a model that thinks and calls tools: calls, results, exports, the switch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from qkv_engine.loading import demo_folder

from . import chromium
from .page_steps import SENT, ask, finished, last, needs_chromium
from .running import Running
from .scripted import WEATHER, call_text, calling, say

pytestmark = needs_chromium
TOOLS = json.dumps([{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}])
SHOWN = "[...document.querySelectorAll('article :is(h2, h3, .text)')].map((each) => each.innerText)"
ROLES = "[...document.querySelectorAll('article')].map((each) => each.classList[0])"


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with calling(
        tmp_path_factory.mktemp("model") / "calls", before="{#- enable_thinking -#}", model=demo_folder()
    ) as server:
        yield server


@pytest.fixture
def page(calls: Running, tab: chromium.Tab) -> chromium.Tab:
    """The page in a wide window, with a tool, and the bodies of its requests in ``sent``."""
    tab.show_as(1280, 800)
    tab.open_anew(calls.url)
    tab.wait("document.querySelector('#model').textContent && !document.querySelector('#tools').parentElement.hidden")
    tab.run(f"document.querySelector('#tools').value = {json.dumps(TOOLS)}")
    tab.run(SENT)
    return tab


def sent(tab: chromium.Tab) -> dict:
    return json.loads(tab.run("sent.at(-1)"))


def ask_weather(tab: chromium.Tab, monkeypatch: pytest.MonkeyPatch, server: Running) -> None:
    """Asks for the weather; the model calls for that of two cities."""
    with monkeypatch.context() as patch:
        say(patch, server, f"I look.\n{call_text('weather', city='Paris')}\n{call_text('weather', city='Rome')}")
        ask(tab, "How is the weather?")


def test_results_of_calls_are_sent(calls: Running, page: chromium.Tab, monkeypatch: pytest.MonkeyPatch):
    ask_weather(page, monkeypatch, calls)
    tool = {"name": "weather", "description": "", "parameters": WEATHER}
    assert sent(page)["tools"] == [{"type": "function", "function": tool}]
    assert page.run("[...document.querySelectorAll('.call')].map((each) => each.innerText.replace(/\\s+/g, ' '))") == [
        'Calls weather { "city": "Paris" }',
        'Calls weather { "city": "Rome" }',
    ]
    page.run("document.querySelector('.results textarea').focus()")
    page.type('{"sky":"clear"}')
    page.press("Enter", 13, "\r")  # one is missing still
    assert page.run(ROLES) == ["user", "assistant"]
    page.press("Tab", 9)
    page.type("rain")
    page.run("document.querySelector('#max-tokens').value = 1")
    page.press("Enter", 13, "\r")
    page.wait(f"{ROLES}.length === 5")
    finished(page)
    shown = page.run("[...document.querySelectorAll('article.tool')].map((each) => each.innerText)")
    assert shown[0].startswith('Result of weather\n{\n  "sky": "clear"\n}') and "rain" in shown[1]
    roles = [(message["role"], message["content"].strip()) for message in sent(page)["messages"]]
    assert roles[1:] == [("assistant", "I look."), ("tool", '{"sky":"clear"}'), ("tool", "rain")]
    ids = [call["id"] for call in sent(page)["messages"][1]["tool_calls"]]
    assert ids == [message["tool_call_id"] for message in sent(page)["messages"][2:]]
    calls.wait_until_idle()


def test_a_question_goes_on_without_results(calls: Running, page: chromium.Tab, monkeypatch: pytest.MonkeyPatch):
    ask_weather(page, monkeypatch, calls)
    page.run("document.querySelector('#max-tokens').value = 1")
    ask(page, "Never mind.")
    assert page.run(ROLES) == ["user", "assistant", "tool", "tool", "user", "assistant"]
    assert sent(page)["messages"][2]["content"] == "The tool was not run."
    calls.wait_until_idle()


def test_what_is_exported_is_answered(
    calls: Running, page: chromium.Tab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    ask_weather(page, monkeypatch, calls)
    page.run("document.querySelector('#max-tokens').value = 1")
    ask(page, "What is 4000+42?")
    page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.run("document.querySelector('#export-chat').click()")
    for dialect, path in {"chat": "chat/completions", "responses": "responses", "messages": "messages"}.items():
        page.run(f"document.querySelector('#dialect').value = '{dialect}'")
        page.run("document.querySelector('#dialect').dispatchEvent(new Event('change'))")
        assert page.run("document.querySelector('#export-path').textContent") == f"POST {calls.url}/v1/{path}"
        text = page.run("document.querySelector('#exported').value")
        assert calls.http.post(f"/v1/{path}", content=text).status_code == 200, text
        file = tmp_path / f"how-is-the-weather.{dialect}.json"
        page.run("document.querySelector('#download').click()")
        wait_for(page, file)
        assert file.read_text() == text
    page.press("Escape", 27)
    page.wait("!document.querySelector('#export').open")
    assert page.complaints == []
    calls.wait_until_idle()


@pytest.mark.parametrize("width", [1280, 360])
def test_what_was_exported_is_imported_by_keyboard(
    calls: Running, page: chromium.Tab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, width: int
):
    page.run("document.querySelector('#system').value = 'Be brief.'")
    ask_weather(page, monkeypatch, calls)
    page.run("document.querySelector('#max-tokens').value = 1")
    ask(page, "What is 4000+42?")
    asked, before = sent(page), page.run(SHOWN)
    page.run("document.querySelector('#export-chat').click()")
    for dialect in ("chat", "responses", "messages"):
        page.run(f"document.querySelector('#dialect').value = '{dialect}'")
        page.run("document.querySelector('#dialect').dispatchEvent(new Event('change'))")
        (tmp_path / f"{dialect}.json").write_text(page.run("document.querySelector('#exported').value"))
    page.run("document.querySelector('#export').close()")
    (tmp_path / "other.json").write_text('{"dataset": []}')
    page.show_as(width, 720)
    for number, dialect in enumerate(("chat", "responses", "messages"), 1):
        page.run("document.querySelector('#new').click()")
        page.run("document.querySelector('#tools').value = ''")
        import_file(page, tmp_path / "other.json", is_drawer=width < 800)
        problem = page.wait("document.querySelector('#problem').checkVisibility() && problem.innerText")
        assert problem.startswith("This file is no conversation") and page.run(ROLES) == []
        assert page.run("document.documentElement.scrollWidth") == width
        page.run("document.querySelector('#import-chat').focus()")
        page.press("Enter", 13, "\r")
        page.give_file(tmp_path / f"{dialect}.json")
        page.wait(f"{ROLES}.length === 6")
        finished(page)  # the question at its end is answered
        assert sent(page) == asked
        assert page.run(SHOWN) == before
        assert page.run("document.activeElement.id") == "question" and page.run("problem.hidden")
        assert page.run("document.querySelectorAll('#list li').length") == 1 + number
        assert page.run("getComputedStyle(document.querySelector('#chats')).position") == (
            "static" if width == 1280 else "fixed"
        )
    assert page.complaints == []
    calls.wait_until_idle()


def import_file(tab: chromium.Tab, path: Path, *, is_drawer: bool) -> None:
    """Opens the drawer where the list is one, and gives the page a file, by keyboard."""
    if is_drawer:
        tab.run("document.querySelector('#show-chats').focus()")
        tab.press("Enter", 13, "\r")
        tab.wait("document.querySelector('#import-chat').checkVisibility()")
    tab.run("document.querySelector('#import-chat').focus()")
    tab.press("Enter", 13, "\r")
    tab.give_file(path)


def wait_for(tab: chromium.Tab, file: Path) -> None:
    for _ in range(200):
        if file.exists():
            return
        tab.run("new Promise((resolve) => setTimeout(resolve, 20))")
    raise AssertionError(f"{file.name} is not there")


def test_tools_that_cannot_be_read_are_an_error_in_words(page: chromium.Tab):
    page.run("document.querySelector('#tools').value = '[{'")
    ask(page, "Hello")
    assert "no JSON" in last(page, ".error") and page.run("sent.length") == 0
    page.run("document.querySelector('#export-chat').click()")
    assert "no JSON" in page.run("document.querySelector('#export-path').textContent")
    page.run("document.querySelector('#export').close()")


def test_thinking_is_switched_where_the_template_knows_it(calls: Running, page: chromium.Tab, server: Running):
    page.run("document.querySelector('#tools').value = ''")
    ask(page, "What is 12+30?")
    assert "chat_template_kwargs" not in sent(page)
    assert not page.run("document.querySelector('.assistant .reasoning').open") and last(page, ".reasoning p") == ""
    assert "12+30" in page.run("document.querySelector('.assistant .reasoning p').textContent")
    for choice, value in {"on": True, "off": False}.items():
        page.run("document.querySelector('#max-tokens').value = 1")
        page.run(f"document.querySelector('#thinking').value = '{choice}'")
        ask(page, "What is 1+1?")
        assert sent(page)["chat_template_kwargs"] == {"enable_thinking": value}
    calls.wait_until_idle()
    page.open(server.url)
    page.wait("document.querySelector('#model').textContent")
    fields = "['#thinking', '#tools'].map((each) => document.querySelector(each).parentElement.hidden)"
    assert page.run(fields) == [True, True]
