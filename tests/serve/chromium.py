"""Headless Chromium, driven through a pipe by the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium")
_OPTIONS = (
    *("--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"),
)


class Tab:
    """A tab. ``complaints`` are the messages of its console, those of violated policies among them.

    A field that asks for a file gets none but that of ``give_file``.
    """

    def __init__(self, send: int, receive: int):
        self._out, self._in = os.fdopen(send, "wb", buffering=0), os.fdopen(receive, "rb")
        self._session: str | None = None
        self._number, self._rest = 0, b""
        self.complaints: list[str] = []
        self._choosers: list[int] = []  # fields that ask for a file
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.setInterceptFileChooserDialog", enabled=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the tab, awaited."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 20.0) -> Any:
        """The value of an expression once it is true."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, (script, self.complaints, self.run("document.body.innerText"))
            time.sleep(0.02)
        return value

    def open(self, url: str) -> None:
        """Loads a page; what tests before it provoked is forgotten."""
        self.call("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")
        self.complaints.clear()

    def open_anew(self, url: str) -> None:
        """The same for somebody who has never been there: nothing is stored."""
        self.open(url)
        self.run("localStorage.clear(); sessionStorage.clear()")
        self.open(url)

    def press(self, key: str, code: int, text: str = "", *, shift: bool = False) -> None:
        """A key, by its name, its code and the text that it makes, with the Shift key or without."""
        fields = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **fields)
        self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def give_file(self, path: Path, seconds: float = 20.0) -> None:
        """Chooses a file for the field that has asked for one."""
        deadline = time.monotonic() + seconds
        while not self._choosers:
            assert time.monotonic() < deadline, "no field asks for a file"
            self.run("0")
        self.call("DOM.setFileInputFiles", files=[str(path)], backendNodeId=self._choosers.pop())

    def show_as(self, width: int, height: int, scheme: str = "light") -> None:
        """A window of CSS pixels, in the colours that the reader prefers."""
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self) -> bytes:
        """The window as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def close(self) -> None:
        self._out.close()
        self._in.close()

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = self._in.read1(1 << 16)
            assert part, "chromium has ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.complaints.append(str(params["args"]))
            case "Page.fileChooserOpened":
                self._choosers.append(params["backendNodeId"])
            case "Log.entryAdded":
                self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


@contextmanager
def chromium() -> Iterator[Tab]:
    """A tab of a browser of its own, which knows no names and keeps nothing."""
    commands, send = os.pipe()
    receive, answers = os.pipe()
    with ExitStack() as ending:
        profile = ending.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        script = f'exec "$@" 3<&{commands} 4>&{answers}'  # the protocol's descriptors
        words = ["bash", "-c", script, "bash", str(PROGRAM), *_OPTIONS, f"--user-data-dir={profile}"]
        browser = subprocess.Popen(
            words, pass_fds=(commands, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        ending.callback(browser.wait, 30)
        ending.callback(browser.terminate)
        os.close(commands)
        os.close(answers)
        tab = Tab(send, receive)
        ending.callback(tab.close)
        yield tab
