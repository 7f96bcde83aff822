"""What the page's modules make of conversations: bodies of requests, answers out of deltas, entries of a storage."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qkv_engine.loading import demo_folder
from qkv_engine.serve.page import FOLDER

from . import node
from .running import Running
from .scripted import WEATHER, calling, seen

SETTINGS = {"system": "", "tools": "", "thinking": "", "temperature": "", "maxTokens": "", "floor": ""}
CARD = {"id": "demo", "max_model_len": 8192, "tools": True, "thinking_switch": True}
TOOL = {"name": "weather", "description": "Tells the weather.", "parameters": WEATHER}
BODIES = """
import { DIALECTS, untilQuestion } from "./bodies.js";
return Object.fromEntries(Object.values(DIALECTS).map(({ path, body }) => [
    `/${path}`, body({ ...chat, turns: whole ? chat.turns : untilQuestion(chat.turns) }, card)]));
"""


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return node.page_modules(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def tools_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with calling(tmp_path_factory.mktemp("model") / "calls", model=demo_folder()) as server:
        yield server


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, reasoning: str = "", *calls: dict[str, str]) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "reasoning": reasoning, "calls": calls, "note": [], "error": ""}


def call(number: int, arguments: str) -> dict[str, str]:
    return {"id": f"call_{number}", "name": "weather", "arguments": arguments}


def result(number: int, content: str) -> dict[str, str]:
    return {"role": "tool", "callId": f"call_{number}", "name": "weather", "content": content}


TURNS = [
    user("How is the weather?"),
    answer("", "", call(9, '{"city": "Pa')),  # stopped within a call
    user("In Paris and Rome?"),
    answer("I look.", "Two calls.", call(1, '{"city": "Paris"}'), call(2, '{"city":"Rome"}')),
    result(1, "rain"),
    result(2, "sun"),
    answer("Rain and sun.", "Done."),
    user("Thanks. And there?"),
    answer("", "", call(3, "")),
    result(3, '{"sky": "clear"}'),
    answer("Clear."),
]


@node.needs_node
def test_the_bodies_of_all_dialects_ask_the_model_the_same(
    modules: Path, tools_server: Running, monkeypatch: pytest.MonkeyPatch
):
    settings = SETTINGS | {"system": " Be brief. ", "tools": json.dumps([TOOL]), "maxTokens": "3", "thinking": "off"}
    chat = {"turns": TURNS, "settings": settings | {"temperature": "0.5", "floor": "dense32"}}
    bodies = node.run(modules, BODIES, chat=chat, card=CARD, whole=False)
    asked = seen(monkeypatch, tools_server)
    for path, body in bodies.items():
        sent = tools_server.post(body, path)
        assert sent.status_code == 200, (path, sent.text)
    first, *others = ({**each, "messages": [filled(message) for message in each["messages"]]} for each in asked)
    assert others == [first, first]
    assert [message["role"] for message in first["messages"]] == [
        *("system", "user", "assistant", "tool", "tool", "assistant", "user", "assistant", "tool")
    ]
    assert first["messages"][1]["content"] == "How is the weather?\n\nIn Paris and Rome?"
    assert first["messages"][2]["reasoning_content"] == "Two calls."
    assert first["messages"][7]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {}}
    assert first["kwargs"] == {"enable_thinking": False, "tools": [{"type": "function", "function": TOOL}]}
    params = first["params"]
    assert (params.temperature, params.max_tokens, params.kv_floor) == (0.5, 3, "dense32")
    tools_server.wait_until_idle()


def test_the_card_tells_what_the_template_knows(tools_server: Running, server: Running):
    cards = [each.http.get("/v1/models/demo").json() for each in (tools_server, server)]
    assert [(card["tools"], card["thinking_switch"], card["examples"]) for card in cards] == [
        (True, False, []),
        (False, False, []),
    ]


def filled(message: dict[str, Any]) -> dict[str, Any]:
    """A message without fields that are empty: an answer of calls alone has no content, or an empty one."""
    return {key: value for key, value in message.items() if value}


@node.needs_node
def test_a_whole_conversation_is_exported_with_its_last_answer(modules: Path, tools_server: Running):
    bodies = node.run(modules, BODIES, chat={"turns": TURNS, "settings": SETTINGS}, card=CARD, whole=True)
    parts = [bodies["/v1/chat/completions"]["messages"], bodies["/v1/responses"]["input"]]
    assert all(part[-1] == {"role": "assistant", "content": "Clear."} for part in parts)
    messages = bodies["/v1/messages"]["messages"]
    assert messages[-1] == {"role": "assistant", "content": [{"type": "text", "text": "Clear."}]}
    assert all(one["role"] != other["role"] for one, other in itertools.pairwise(messages))
    for part in (*parts, messages):
        part.append(user("Go on."))
    bodies["/v1/messages"]["max_tokens"] = bodies["/v1/chat/completions"]["max_tokens"] = 3
    bodies["/v1/responses"]["max_output_tokens"] = 3
    assert [tools_server.post(body, path).status_code for path, body in bodies.items()] == [200] * 3
    tools_server.wait_until_idle()


@node.needs_node
@pytest.mark.parametrize("whole", [True, False])
def test_what_is_exported_is_read_as_it_was(modules: Path, whole: bool):
    script = """
import { DIALECTS, untilQuestion } from "./bodies.js";
import { readConversation } from "./importing.js";
    const bodies = (chat) => Object.values(DIALECTS).map(({ body }) => body(chat, card));
    const own = bodies({ ...chat, turns: whole ? chat.turns : untilQuestion(chat.turns) });
    const read = own.map((body) => readConversation(JSON.stringify(body), card));
    return { own, again: read.map(bodies), turns: read.map(({ turns }) => turns) };"""
    given = SETTINGS | {"system": "Be brief.", "tools": json.dumps([TOOL]), "temperature": "0.5", "floor": "dense32"}
    for settings in ({"thinking": "on"}, {"thinking": "off", "maxTokens": "3"}, {"system": "", "tools": ""}):
        turns = json.loads(json.dumps(TURNS).replace('city\\": ', 'city\\":'))  # Messages keep no spaces of arguments
        chat = {"turns": turns, "settings": given | settings}
        found = node.run(modules, script, chat=chat, card=CARD, whole=whole)
        assert found["again"] == [found["own"]] * 3
        assert found["turns"][0] == found["turns"][1] == found["turns"][2]
        assert [turn["role"] for turn in found["turns"][0]][:5] == ["user", "assistant", "tool", "tool", "assistant"]
        assert found["turns"][0][2]["name"] == "weather"


@node.needs_node
def test_a_file_that_is_no_conversation_is_told_in_words(modules: Path):
    script = """import { readConversation } from "./importing.js";
    const read = (text) => readConversation(text, {}).turns;
    return texts.map((text) => { try { return read(text); } catch (error) { return error.message; } });"""
    image = {"type": "image_url", "image_url": {"url": "https://host/cat.png"}}
    lost = {"type": "function_call_output", "call_id": "x", "output": "3"}
    texts = {
        "{": "no JSON",
        "null": "no conversation",
        "[]": "no conversation",
        '{"messages": {}}': "no conversation",
        '{"messages": []}': "no turns",
        '{"messages": [{"role": "system", "content": "Hi"}]}': "no turns",
        '{"messages": [3]}': "has the role",
        '{"messages": [null]}': "has the role",
        '{"messages": [{"role": "critic", "content": "Hi"}]}': 'the role "critic"',
        json.dumps({"messages": [{"role": "user", "content": [image]}]}): "a part of type image_url",
        json.dumps({"messages": [{"role": "user", "content": 3}]}): "a part without text",
        json.dumps({"input": [lost]}): "result of a call that it does not have",
        json.dumps({"input": [{"type": "web_search_call"}]}): "an item of type web_search_call",
        json.dumps({"messages": [{"role": "assistant", "tool_calls": [{}]}]}): "names no function",
    }
    for words, expected in zip(node.run(modules, script, texts=list(texts)), texts.values(), strict=True):
        assert isinstance(words, str) and expected in words
    plain = {"input": "Hello", "instructions": "Be brief."}
    assert node.run(modules, script, texts=[json.dumps(plain)]) == [[user("Hello")]]


@node.needs_node
def test_settings_that_the_model_does_not_know_are_not_sent(modules: Path):
    settings = SETTINGS | {"tools": json.dumps([TOOL]), "thinking": "on"}
    chat = {"turns": [user("Hello")], "settings": settings}
    plain = node.run(modules, BODIES, chat=chat, card={"id": "demo", "max_model_len": 99}, whole=False)
    asked = {"model": "demo", "messages": [user("Hello")]}
    assert plain["/v1/chat/completions"] == asked
    assert plain["/v1/messages"] == {
        "model": "demo",
        "max_tokens": 99,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
    }
    thinks = node.run(modules, BODIES, chat=chat, card=CARD, whole=False)
    assert [body.get("chat_template_kwargs") for body in thinks.values()] == [{"enable_thinking": True}] * 2 + [None]
    assert thinks["/v1/messages"]["thinking"] == {"type": "adaptive"}


@node.needs_node
def test_tools_are_read_in_the_form_of_any_dialect(modules: Path):
    forms = [
        [{"type": "function", "function": TOOL}],
        [{"type": "function", **TOOL}],
        {"name": TOOL["name"], "description": TOOL["description"], "input_schema": WEATHER},
    ]
    script = 'import { readTools } from "./tools.js";\nreturn texts.map(readTools);'
    assert node.run(modules, script, texts=[json.dumps(form) for form in forms] + [" "]) == [[TOOL]] * 3 + [[]]
    script = """import { readTools } from "./tools.js";
    return texts.map((text) => { try { return readTools(text); } catch (error) { return error.message; } });"""
    broken = node.run(modules, script, texts=["[{", '[{"type": "function"}]', "3", "null"])
    assert "no JSON" in broken[0] and all("has no name" in words for words in broken[1:])


@node.needs_node
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_grows_by_whole_calls_and_by_fragments(modules: Path, size: int):
    texts = {0: '{"city": "Paris"}', 1: '{"city": "Rome"}'}
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm", "reasoning": "Hm"},
    ]
    for index, text in texts.items():
        head = {
            "index": index,
            "id": f"id-{index}",
            "type": "function",
            "function": {"name": "weather", "arguments": ""},
        }
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        deltas += [{"tool_calls": [head]}]
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": part}}]} for part in parts]
    script = """import { newAnswer, take, waitingCalls } from "./conversation.js";
    const answer = newAnswer(), waiting = [];
    for (const delta of deltas) {
        take(answer, delta);
        waiting.push(waitingCalls({ turns: [answer] }).length);
    }
    return { answer, waiting };"""
    found = node.run(modules, script, deltas=[*deltas, {"content": "Soon."}])
    calls = [{"id": f"id-{index}", "name": "weather", "arguments": text} for index, text in texts.items()]
    assert found["answer"] == answer("Soon.", "Hm") | {"calls": calls}
    assert found["waiting"][-1] == 2
    whole = {"index": 0, "id": "id-0", "type": "function", "function": {"name": "weather", "arguments": texts[0]}}
    assert node.run(modules, script, deltas=[{"tool_calls": [whole]}])["answer"]["calls"] == calls[:1]


# A storage of at most ``room`` characters.
STORAGE = """
import { Store } from "./store.js";
import { fresh } from "./conversation.js";
class Storage {
    items = new Map();
    get length() { return this.items.size; }
    key(number) { return [...this.items.keys()][number]; }
    getItem(key) { return this.items.get(key) ?? null; }
    removeItem(key) { this.items.delete(key); }
    setItem(key, value) {
        const others = [...this.items].filter(([name]) => name !== key).flat();
        if ([...others, key, value].join("").length > room) throw new Error("QuotaExceededError");
        this.items.set(key, value);
    }
}
const storage = new Storage(), store = new Store(storage);
const chat = (id, size) => ({ ...fresh(), id, at: id, turns: [{ role: "user", content: "x".repeat(size) }] });
const add = (id, size) => store.save(Object.assign(chat(id, size), { id: `chat-${id}` }));
const ids = () => store.list().map(({ id }) => id);
"""


@node.needs_node
def test_the_oldest_conversations_make_room(modules: Path):
    script = """
    const kept = [1, 2, 3].map((id) => add(id, 1000));
    const three = ids();
    kept.push(add(4, 1500));
    const others = ids();
    kept.push(add(5, 9000), add(4, 9000));
    return { kept, three, others, last: ids() };"""
    found = node.run(modules, STORAGE + script, room=4000)
    assert found["three"] == ["chat-3", "chat-2", "chat-1"] and found["others"] == ["chat-4", "chat-3"]
    assert found["kept"] == [True] * 4 + [False] * 2 and found["last"] == []
    many = "for (let id = 0; id < 203; id++) add(id, 1);\nreturn ids();"
    left = node.run(modules, STORAGE + many, room=10**6)
    assert len(left) == 200 and left[-1] == "chat-3"


@node.needs_node
def test_what_cannot_be_read_is_left_out_and_forgotten_with_the_rest(modules: Path):
    script = """
    const texts = ["", "{", "null", "3", "[]", '{"id": "a"}', '{"id": "b", "at": 1, "turns": 3}', "x".repeat(99)];
    texts.forEach((text, number) => storage.setItem(`qkv-engine/chat/1/${number}`, text));
    storage.setItem("qkv-engine/chat/0/old", "old");
    storage.setItem("theirs", "stays");
    storage.setItem("qkv-engine/chat/1/odd", JSON.stringify({ id: "odd", at: 1, settings: { system: 3 }, turns: [
        null, { role: "system" }, { role: "user", content: {} }, { role: "assistant", calls: [null, { name: 3 }] }] }));
    const found = [store.list(), store.load("1"), store.load("nowhere")];
    add(1, 1);
    store.clear();
    return [...found, [...storage.items.keys()]];"""
    listed, broken, missing, left = node.run(modules, STORAGE + script, room=10**6)
    assert broken is None and missing is None and left == ["theirs"]
    turns = [user(""), answer("") | {"calls": [{"id": "", "name": "", "arguments": ""}]}]
    assert listed == [{"id": "odd", "at": 1, "settings": SETTINGS, "turns": turns}]


@node.needs_node
def test_errors_say_what_to_do(modules: Path):
    script = """import { ServerError, broken, inWords, unreached } from "./errors.js";
    return [unreached(), broken(), ...errors.map((each) => new ServerError(...each))].map(inWords);"""
    errors = [
        [{"message": "too long", "code": "context_length_exceeded"}, 400],
        [{"message": "3 completions are under way."}, 429],
        [{"message": "odd"}],
    ]
    gone, broken, long, full, odd = node.run(modules, script, errors=errors)
    assert "See whether it runs" in gone and "Regenerate" in broken
    assert long.startswith("too long. Begin a new chat") and odd == "odd"
    assert full == "3 completions are under way. The server is full. Regenerate the answer in a moment."


def test_colours_have_enough_contrast():
    """Of text and its ground 4.5 to 1, of the edge of a field 3 to 1, in light and dark (WCAG 2.2)."""
    rules = (FOLDER / "page.css").read_text()
    colours = dict(re.findall(r"--([\w-]+): light-dark\((#\w{6}, #\w{6})\)", rules))
    for scheme in (0, 1):
        shade = {name: luminance(pair.split(", ")[scheme]) for name, pair in colours.items()}
        for ground in ("ground", "panel"):
            for name, least in {"text": 4.5, "quiet": 4.5, "accent": 4.5, "error": 4.5, "edge": 3.0}.items():
                assert contrast(shade[name], shade[ground]) >= least, (scheme, name, ground)
        assert contrast(shade["on-accent"], shade["accent"]) >= 4.5
        assert contrast(shade["text"], shade["line"]) >= 4.5


def luminance(colour: str) -> float:
    """The relative luminance of ``#rrggbb``, by WCAG."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)
