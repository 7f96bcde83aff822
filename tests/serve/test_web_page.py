"""The page at ``/``: its files and their headers, the figures it reads, who may call, and its work in Chromium."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from qkv_engine import Engine, EngineStats
from qkv_engine.serve.keys import Keys
from qkv_engine.serve.page import FOLDER

from . import chromium
from .page_steps import ENDLESS, ask, finished, last, needs_chromium
from .running import Running, running

KEY = "a-secret-key"


@pytest.fixture(scope="module")
def guarded(demo_engine: Engine) -> Iterator[Running]:
    with running(demo_engine, keys=Keys([("me", KEY)])) as found:
        yield found


def files(server: Running) -> dict[str, httpx.Response]:
    """The page and the files that it and its scripts name, by path."""
    found: dict[str, httpx.Response] = {}
    names = ["/"]
    while names:
        path = names.pop()
        found[path] = server.http.get(path)
        named = re.findall(r'(?:href|src)="static/([^"]+)"|from "\./([^"]+)"', found[path].text)
        names += {f"/static/{''.join(name)}" for name in named} - set(found)
    return found


def test_all_files_are_served_under_a_strict_policy(server: Running):
    found = files(server)
    assert len(found) == sum(path.suffix != ".py" for path in FOLDER.iterdir() if path.is_file())
    for path, response in found.items():
        assert response.status_code == 200, path
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
    assert found["/"].headers["content-type"] == "text/html; charset=utf-8"
    assert found["/static/page.js"].headers["content-type"].startswith("text/javascript")
    assert server.http.post("/").status_code == 405


def test_the_files_name_nothing_outside_and_make_no_markup_of_text():
    for path in FOLDER.iterdir():
        text = path.read_text() if path.is_file() else ""
        outside = set(re.findall(r"(?:https?:)?//[\w.-]+\.[\w/.-]+", text))
        assert outside <= {"http://www.w3.org/2000/svg"}, path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", text), path
        assert not re.search(r"""<script(?![^>]*src=)|\sstyle=["']|\son\w+=["']|javascript:""", text), path


def test_stats_are_those_of_the_engine(server: Running):
    long = [{"role": "user", "content": "What is 4000+42? " * 40}]  # of which a block stays in the prefix cache
    server.openai.chat.completions.create(model="demo", messages=long, max_tokens=4)
    stats = msgspec.json.decode(server.http.get("/stats").content, type=EngineStats)
    assert stats.model == "demo" and stats.kv_rungs == {"dense32": 32.0} and set(stats.kv_blocks) == {"dense32"}
    assert stats.kv_bytes_total == server.engine.stats().kv_bytes_total and stats.generation_tokens > 0


def test_the_page_needs_no_key_and_its_figures_do(guarded: Running):
    assert {response.status_code for response in files(guarded).values()} == {200}
    refused = guarded.http.get("/stats")
    assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
    assert guarded.http.get("/stats", headers={"authorization": f"Bearer {KEY}"}).status_code == 200


def test_without_the_page_its_paths_are_not_there(demo_engine: Engine):
    with running(demo_engine, page=False) as server:
        assert [server.http.get(path).status_code for path in ("/", "/static/page.js", "/stats")] == [404, 404, 200]
    with running(demo_engine, page=False, keys=Keys([("me", KEY)])) as server:
        assert server.http.get("/").status_code == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("localhost", 200), ("LOCALHOST:8000", 200), ("127.0.0.1:1", 200), ("[::1]:8000", 200), ("10.1.2.3", 200)),
        *(
            ("ours.example:80", 200),
            ("proxy.example", 200),
            ("theirs.example", 421),
            ("localhost.theirs.example", 421),
            ("", 421),
        ),
        *(("127.0.0.1.theirs.example", 421), ("localhost@theirs.example", 421), ("theirs.example/localhost", 421)),
        ("[", 421),
    ],
)
def test_without_keys_only_own_names_are_answered(named: Running, host: str, status: int):
    for path in ("/", "/health", "/stats", "/v1/models", "/static/page.js"):
        answer = named.http.get(path, headers={"host": host})
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["code"] == "unknown_host"


@pytest.fixture(scope="module")
def named(demo_engine: Engine) -> Iterator[Running]:
    with running(demo_engine, allow_hosts=["Ours.example", "proxy.example:8000", "::1"]) as found:
        yield found


@pytest.mark.parametrize("host", ["theirs.example", "x/health?", "x/health#"])
def test_with_keys_the_key_decides_whatever_the_host(guarded: Running, host: str):
    assert guarded.http.get("/v1/models", headers={"host": host}).status_code == 401
    headers = {"host": host, "authorization": f"Bearer {KEY}"}
    assert guarded.http.get("/v1/models", headers=headers).status_code == 200


@needs_chromium
def test_a_conversation_in_chromium(server: Running, tab: chromium.Tab):
    tab.show_as(1200, 800)
    tab.open(server.url)
    tab.wait("document.querySelector('#model').textContent === 'demo' && document.querySelector('#free').textContent")
    ask(tab, "What is 4000+42?")
    assert last(tab, ".text") == "4042"
    note = last(tab, "footer span")
    assert re.fullmatch(r"\d+ tokens · [\d.]+ tok/s · KV at 32 bits", note), note
    tab.run("document.querySelector('article:last-child .again').click()")
    finished(tab)
    assert last(tab, ".text") == "4042" and tab.run("document.querySelectorAll('article').length") == 2
    blocks = tab.wait(
        "document.querySelector('#rungs .figure').textContent !== '0' && document.querySelector('#rungs').innerText"
    )
    assert "dense32" in blocks and "32 bits" in blocks
    tab.run("document.querySelector('#new').click()")
    assert tab.run("document.querySelectorAll('article').length") == 0
    assert tab.complaints == []


@needs_chromium
def test_figures_are_read_out_in_words(server: Running, tab: chromium.Tab):
    server.openai.completions.create(model="demo", prompt="a " * 600, max_tokens=1)
    tab.open(server.url)
    label = tab.wait("document.querySelector('#memory').getAttribute('aria-label')")
    assert re.fullmatch(r"used: 0 B, cached: [\d.]+ [KM]iB, free: [\d.]+ MiB", label), label
    assert tab.run("document.querySelector('#holders').textContent") == "of cached prefixes; no request runs"


@needs_chromium
def test_a_tenant_beside_others_chats_without_their_figures(demo_engine: Engine, tab: chromium.Tab):
    with running(demo_engine, keys=Keys([("operator", KEY), ("bob", "bob-secret-22")])) as server:
        tab.open(server.url)
        tab.run("sessionStorage.setItem('key', 'bob-secret-22')")
        tab.open(server.url)
        tab.wait("document.querySelector('#live').hidden && document.querySelector('#model').textContent === 'demo'")
        ask(tab, "What is 4000+42?")
        assert last(tab, ".text") == "4042"


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_the_colours_of_its_reader(server: Running, tab: chromium.Tab, scheme: str):
    tab.show_as(360, 640, scheme)
    tab.open(server.url)
    tab.wait("document.querySelector('#free').textContent")
    ask(tab, "x" * 200)
    assert tab.run("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]") == [360, 640]
    assert not tab.run("document.querySelector('#live').open")
    ground = tab.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) > 600) == (scheme == "light")


@needs_chromium
def test_figures_are_read_only_while_the_page_is_seen(server: Running, tab: chromium.Tab):
    tab.open(server.url)
    tab.run("window.fetches = 0; window.fetch = ((old) => (...all) => (fetches++, old(...all)))(fetch); 1")
    hide = "Object.defineProperty(document, 'hidden', {{ value: {}, configurable: true }});"
    tab.run(hide.format("true") + "setTimeout(() => (fetches = 0), 200)")  # one may be under way
    time.sleep(1.4)
    assert tab.run("fetches") == 0
    tab.run(hide.format("false") + "document.dispatchEvent(new Event('visibilitychange'))")
    tab.wait("fetches >= 2")


@needs_chromium
def test_an_answer_is_stopped_and_an_error_shown(server: Running, tab: chromium.Tab):
    tab.open(server.url)
    tab.wait("document.querySelector('#free').textContent")
    tab.run("document.querySelector('#temperature').value = -1")
    ask(tab, "Hello")
    assert "temperature" in last(tab, ".error")
    tab.run("document.querySelector('#temperature').value = ''")
    tab.run(ENDLESS)
    ask(tab, "Hello", waits=False)
    tab.wait("document.querySelector('article:last-child .text').textContent.length > 20")
    tab.press("Escape", 27)
    finished(tab)
    assert last(tab, "footer span") == "stopped" and last(tab, ".text")
    server.wait_until_idle()


@needs_chromium
def test_a_key_is_asked_for_and_kept_in_the_tab(guarded: Running, tab: chromium.Tab):
    tab.open(guarded.url)
    for key in ("a-wrong-key", KEY):
        tab.wait("document.querySelector('#key-dialog').open && document.querySelector('#key').value === ''")
        tab.type(key)
        tab.press("Enter", 13, "\r")
        tab.wait(f"sessionStorage.key && sessionStorage.getItem('key') === {key!r}")
    ask(tab, "What is 4000+42?")
    assert last(tab, ".text") == "4042"
    assert tab.run("document.cookie") == "" and KEY not in tab.run("JSON.stringify(localStorage)")


@needs_chromium
def test_text_never_becomes_markup(server: Running, tab: chromium.Tab):
    tab.open(server.url)
    text = "# A <b>\n**bold** and *it* `a*b*c` 2*3*4 <img src=x onerror=alert(1)>\n\n- one\n  - two\n1. three\n\n"
    text += "```js\n<script>x</script>\n"
    shown = tab.run(
        "import('./static/markdown.js').then(({ show }) => { const div = document.createElement('div');"
        f" show(div, {json.dumps(text)}); return div.innerHTML; }})"
    )
    assert "<h3>A &lt;b&gt;</h3>" in shown and "<strong>bold</strong> and <em>it</em> <code>a*b*c</code> 2*3*4" in shown
    assert "&lt;img" in shown and "<img" not in shown and shown.count("<li") == 3
    assert shown.endswith('<pre data-language="js"><code>&lt;script&gt;x&lt;/script&gt;\n</code></pre>'), shown
    with pytest.raises(AssertionError, match="TrustedHTML"):
        tab.run("document.body.innerHTML = '<p>'")
