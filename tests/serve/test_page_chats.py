"""The page's conversations in Chromium: kept, chosen, changed and forgotten, by mouse and by keyboard."""

from __future__ import annotations

import json

import pytest

from qkv_engine import Engine
from qkv_engine.cli.demo_questions import QUESTIONS

from . import chromium
from .page_steps import ENDLESS, SENT, TURNS, ask, finished, last, needs_chromium
from .running import Running, running

pytestmark = needs_chromium
NUM_TURNS = "document.querySelectorAll('article').length"
TITLES = "[...document.querySelectorAll('#list .open')].map((each) => each.textContent)"
FOCUS = "(({ id, className, tagName }) => id || className || tagName)(document.activeElement)"


@pytest.fixture
def page(server: Running, tab: chromium.Tab) -> chromium.Tab:
    """The page in a wide window, without conversations."""
    tab.show_as(1280, 800)
    tab.open_anew(server.url)
    tab.wait("document.querySelector('#model').textContent")
    return tab


def click(tab: chromium.Tab, selector: str) -> None:
    tab.run(f"document.querySelector({json.dumps(selector)}).click()")


def roles(tab: chromium.Tab) -> list[str]:
    return tab.run("[...document.querySelectorAll('article')].map((each) => each.classList[0])")


def test_conversations_outlive_a_reload_and_are_chosen(server: Running, page: chromium.Tab):
    page.run(
        "document.querySelector('#system').value = 'Be brief.'; document.querySelector('#temperature').value = '0'"
    )
    ask(page, "What is 4000+42?")
    before = page.run(TURNS)
    click(page, "#new")
    settings = "['#system', '#temperature'].map((each) => document.querySelector(each).value)"
    assert page.run(settings) == ["", "0"] and page.run(NUM_TURNS) == 0
    ask(page, "Sort: 3 1 2")
    assert page.run(TITLES) == ["Sort: 3 1 2", "What is 4000+42?"]
    page.open(server.url)
    page.wait(f"{NUM_TURNS} === 2")
    assert page.run(TITLES) == ["Sort: 3 1 2", "What is 4000+42?"] and last(page, ".text") == "1 2 3"
    click(page, "li:last-child .open")
    assert page.run(TURNS) == before and page.run(settings) == ["Be brief.", "0"]
    assert page.run("document.querySelector('[aria-current]').textContent") == "What is 4000+42?"
    assert page.complaints == []


def test_an_answer_that_was_left_is_kept_as_far_as_it_came(server: Running, page: chromium.Tab):
    page.run(ENDLESS)
    ask(page, "Hello", waits=False)
    page.wait("document.querySelector('article:last-child .text').textContent.length > 20")
    page.open(server.url)
    page.wait(f"{NUM_TURNS} === 2")
    assert len(last(page, ".text")) > 20 and last(page, "footer span") == "stopped"
    server.wait_until_idle()
    page.run(ENDLESS)
    click(page, ".again")
    page.wait("document.querySelector('article:last-child .text').textContent.length > 20")
    click(page, "#new")
    assert page.run(NUM_TURNS) == 0 and page.run("document.querySelector('#stop').hidden")
    server.wait_until_idle()
    click(page, "#list .open")
    assert last(page, "footer span") == "stopped"


def test_turns_are_edited_in_their_place(page: chromium.Tab):
    for question in ("Sort: 3 1 2", "Sort: 9 8"):
        ask(page, question)
    page.run(SENT)
    click(page, "article.user .edit")
    assert page.run("document.querySelector('.editor p').textContent") == "Sending it drops the 3 turns below."
    page.press("Escape", 27)
    assert page.run(NUM_TURNS) == 4 and page.run(FOCUS) == "edit" and page.run("sent") == []
    click(page, "article.user .edit")
    page.run("document.activeElement.select()")
    page.type("What is 2+2?")
    page.press("Enter", 13, "\r")
    page.wait(f"{NUM_TURNS} === 2")
    finished(page)
    assert last(page, ".text") == "4"
    (body,) = (json.loads(each) for each in page.run("sent"))
    assert body["messages"] == [{"role": "user", "content": "What is 2+2?"}]
    click(page, "article.assistant .edit")
    page.run("document.activeElement.value = 'Four.'")
    click(page, ".editor [type=submit]")
    page.wait("document.querySelector('article.assistant .text').innerText === 'Four.'")
    page.run("navigator.clipboard.writeText = async (text) => (window.copied = text)")
    click(page, "article.assistant .copy")
    assert page.wait("window.copied") == "Four." and page.run("sent.length") == 1
    ask(page, "And 3+3?")
    assert json.loads(page.run("sent.at(-1)"))["messages"][1]["content"] == "Four."


def test_any_answer_is_made_anew(page: chromium.Tab):
    for question in ("Sort: 3 1 2", "Sort: 9 8"):
        ask(page, question)
    click(page, "article.assistant .again")
    assert page.wait("document.querySelector('#asked').textContent") == "This drops the 2 turns below."
    page.press("Enter", 13, "\r")  # on Cancel, which has the focus
    page.wait("!document.querySelector('#confirm').open")
    assert page.run(NUM_TURNS) == 4
    click(page, "article.assistant .again")
    click(page, "#confirm [value=yes]")
    page.wait(f"{NUM_TURNS} === 2")
    finished(page)
    assert last(page, ".text") == "1 2 3" and roles(page) == ["user", "assistant"]
    assert page.run(FOCUS) == "chat"


def test_conversations_are_deleted_and_forgotten_by_keyboard(server: Running, page: chromium.Tab):
    for question in ("Sort: 2 1", "Sort: 4 3", "Sort: 6 5"):
        click(page, "#new")
        ask(page, question)
    page.run("localStorage.setItem('theirs', 'stays'); document.querySelector('li:last-child .delete').focus()")
    assert page.run("document.activeElement.ariaLabel") == "Delete Sort: 2 1"
    for button in ("Enter", "Tab", "Enter"):  # the button, from Cancel on to Delete, and that
        page.press(button, {"Enter": 13, "Tab": 9}[button], "\r" if button == "Enter" else "", shift=button == "Tab")
    page.wait(f"{TITLES}.length === 2")
    assert page.run(NUM_TURNS) == 2 and page.run(FOCUS) == "open"
    page.run("document.querySelector('#forget').focus()")
    page.press(" ", 32, " ")
    page.press("Escape", 27)
    page.wait("!document.querySelector('#confirm').open")
    assert page.run(f"{TITLES}.length") == 2
    page.press(" ", 32, " ")
    page.press("Tab", 9, shift=True)
    page.press("Enter", 13, "\r")
    page.wait(f"{TITLES}.length === 0")
    assert page.run(NUM_TURNS) == 0 and page.run("Object.keys(localStorage)") == ["theirs"]
    assert page.run("document.querySelector('#forget').disabled")


def test_storage_that_is_broken_or_changed_elsewhere_is_followed(server: Running, page: chromium.Tab):
    page.run("localStorage.setItem('qkv-engine/chat/1/odd', '{')")
    page.open(server.url)
    ask(page, "What is 4000+42?")
    assert page.run(TITLES) == ["What is 4000+42?"] and page.complaints == []
    key = "Object.keys(localStorage).find((key) => !key.endsWith('odd'))"
    tell = "dispatchEvent(new StorageEvent('storage', {{ key: {} }}))"
    page.run(
        f"(() => {{ const key = {key}, chat = JSON.parse(localStorage.getItem(key)); chat.turns[1].content = '<b>no';"
        f" localStorage.setItem(key, JSON.stringify(chat)); {tell.format('key')}; }})()"
    )
    assert last(page, ".text") == "<b>no"
    page.run(f"localStorage.clear(); {tell.format('null')}")
    assert page.run(NUM_TURNS) == 0 and page.run(TITLES) == [] and page.run("localStorage.length") == 0


def test_the_page_is_used_by_keyboard_alone(page: chromium.Tab):
    ask(page, "What is 12+30?")
    page.run("document.querySelector('#new').focus()")
    seen = []
    while page.run("document.activeElement !== document.body") and len(seen) < 40:
        seen.append(page.run(FOCUS))
        assert page.run("getComputedStyle(document.activeElement).outlineStyle") != "none", seen
        page.press("Tab", 9)
    order = ["new", "open", "delete", "export-chat", "import-chat", "forget", "chat", "copy", "edit", "SUMMARY"]
    assert seen == [*order, "copy", "again", "edit", "question", "send", "SUMMARY", "SUMMARY"]
    page.run("document.querySelector('#question').focus()")
    page.type("one")
    page.press("Enter", 13, "\r", shift=True)
    page.type("two")
    assert page.run("document.querySelector('#question').value") == "one\ntwo" and page.run(NUM_TURNS) == 2
    assert page.run("document.querySelector('#said').textContent").strip() == "42"


def test_a_drawer_of_conversations_on_a_phone(page: chromium.Tab):
    page.run("document.querySelector('#max-tokens').value = 3")
    ask(page, "What is " + "47*86+" * 30 + "1?")
    page.show_as(360, 640)
    page.run("document.querySelector('#show-chats').focus()")
    assert not page.run("document.querySelector('#chats').checkVisibility()")
    page.press("Enter", 13, "\r")
    assert page.wait("document.querySelector('#chats').checkVisibility()")
    assert page.run("document.documentElement.scrollWidth") == 360
    page.press("Escape", 27)
    page.wait("!document.querySelector('#chats').checkVisibility()")
    assert page.run(FOCUS) == "show-chats"


def test_what_to_ask_is_the_servers_to_say(server: Running, page: chromium.Tab, demo_engine: Engine):
    offered = "[...document.querySelectorAll('#examples button')].map((each) => each.textContent)"
    assert page.run(offered) == [] and page.run("document.querySelector('#such').hidden")
    with running(demo_engine, examples=QUESTIONS) as other:
        page.open(other.url)
        page.wait("document.querySelector('#examples button') !== null")
        assert page.run(offered) == list(QUESTIONS)
        click(page, "li:last-child > button")
        finished(page)
        assert last(page, ".text") == "Ann 23, Bob 10, Cid 29"


def test_an_earlier_turn_may_be_sent_anew_while_the_model_answers(server: Running, page: chromium.Tab):
    ask(page, "Sort: 2 1")
    page.run(ENDLESS)
    ask(page, "Hello", waits=False)
    page.wait("document.querySelector('article:last-child .text').textContent.length > 20")
    page.run("document.querySelector('#max-tokens').value = 2")
    click(page, ".again")
    click(page, "#confirm [value=yes]")
    page.wait(f"{NUM_TURNS} === 2")
    finished(page)
    assert roles(page) == ["user", "assistant"] and "2 tokens" in last(page, "footer span")
    server.wait_until_idle()


def test_a_server_that_is_gone_is_an_error_in_words(page: chromium.Tab):
    page.run("window.fetch = async () => { throw new TypeError('Failed to fetch'); }")
    ask(page, "Hello")
    words = "The server cannot be reached. See whether it runs, then regenerate the answer."
    assert last(page, ".error") == words == page.run("document.querySelector('#said').textContent")
    page.wait("document.querySelector('#brief').textContent === 'The server cannot be reached.'")
