"""What a user of the page does in a tab, and what the tests watch there."""

from __future__ import annotations

import pytest

from . import chromium

needs_chromium = pytest.mark.skipif(chromium.PROGRAM is None, reason="needs chromium")
TURNS = "[...document.querySelectorAll('article')].map((each) => each.innerText)"

# Each request of the tab asks for more than any answer has, so that there is time to stop it.
ENDLESS = """(() => { const fetch_ = fetch; window.fetch = (url, options) => fetch_(url, options?.body
    ? { ...options, body: JSON.stringify({ ...JSON.parse(options.body), ignore_eos: true }) } : options); })()"""


# The bodies of the tab's requests.
SENT = """window.sent = []; (() => { const fetch_ = fetch; window.fetch = (url, options) => {
    if (options?.body) sent.push(options.body); return fetch_(url, options); }; })()"""


def ask(tab: chromium.Tab, question: str, *, waits: bool = True) -> None:
    """Types a question, and waits for the end of its answer."""
    tab.run("document.querySelector('#question').focus()")
    tab.type(question)
    tab.press("Enter", 13, "\r")
    if waits:
        finished(tab)


def finished(tab: chromium.Tab) -> None:
    tab.wait("document.querySelector('article.assistant:last-child:not(.running)') && true")


def last(tab: chromium.Tab, selector: str) -> str:
    return tab.run(f"document.querySelector('article:last-child {selector}')?.innerText ?? ''")
