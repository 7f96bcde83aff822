"""Records the picture of a chat in README, ``docs/images/chat.svg``: ``python docs/record_chat.py``.

Types questions into ``qkv-engine chat`` in a terminal of its own and draws what the terminal showed, with its times.
Needs ``pip install termtosvg``, which no extra brings.
"""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COLUMNS, ROWS = 92, 30
COMMAND = ["qkv-engine", "chat", "--kv", "auto-2", "--kv-memory", "6MiB"]
LEDGER = (
    "Accounts: Tom 29, Gus 21, Van 18, Zoe 12, Eli 61. 1) Van pays 0. 2) Eli gives Van 5. 3) Tom earns 0. 4) Van "
    "pays 3. 5) Van gives Eli 2. 6) Van pays 8. 7) Gus gives Zoe 5. 8) Eli gives Van 1. 9) Eli pays 4. 10) Eli "
    "earns 6. 11) Zoe earns 3. 12) Tom gives Eli 1. 13) Van gives Zoe 6. 14) Gus gives Tom 7. 15) Zoe earns 5. "
    "16) Eli gives Van 9. 17) Van gives Tom 1. 18) Van pays 9. 19) Tom earns 2. 20) Tom gives Eli 6. 21) Van pays "
    "2. 22) Van gives Eli 1. 23) Zoe pays 9. 24) Tom earns 3. 25) Van earns 6. 26) Gus earns 0. 27) Zoe gives Gus "
    "6. 28) Van pays 1. 29) Gus gives Zoe 4. 30) Tom gives Eli 3. What are the balances?"
)
PICTURE = Path(__file__).parent / "images" / "chat.svg"


class Recording:
    """What a terminal showed since the start, as lines of an asciicast of version 2."""

    def __init__(self, terminal: int):
        self.terminal, self.start, self.text = terminal, time.monotonic(), ""
        self.lines = [json.dumps({"version": 2, "width": COLUMNS, "height": ROWS})]

    def watch(self, seconds: float, until: str | None = None) -> None:
        """Records for so long, or until ``until`` has been shown. Raises ``TimeoutError`` if it never was."""
        end, begin = time.monotonic() + seconds, len(self.text)
        while (left := end - time.monotonic()) > 0:
            if until is not None and until in self.text[begin:]:
                return
            if select.select([self.terminal], [], [], left)[0]:
                shown = os.read(self.terminal, 65536).decode(errors="replace")
                self.text += shown
                self.lines.append(json.dumps([time.monotonic() - self.start, "o", shown]))
        if until is not None:
            raise TimeoutError(f"{until!r} was not shown in {seconds} s")

    def type(self, text: str, pause: float) -> None:
        """Types ``text``, ``pause`` seconds a key, then the return key; a pause of 0 pastes it at once."""
        for key in text if pause else [f"\033[200~{text}\033[201~"]:
            os.write(self.terminal, key.encode())
            self.watch(pause or 1.0)
        self.watch(0.5)
        os.write(self.terminal, b"\r")


def record() -> Recording:
    """A chat: a sum, a ledger that outgrows the memory at 16 bits, and what the memory then holds."""
    process, terminal = pty.fork()
    if not process:
        os.environ |= {"COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm-256color"}
        os.execvp(COMMAND[0], COMMAND)
    recording = Recording(terminal)
    recording.watch(60.0, "/help lists")
    recording.watch(1.5)
    recording.type("What is 47*86?", 0.12)
    recording.watch(60.0, "tok/s")
    recording.watch(1.5)
    recording.type(LEDGER, 0)
    recording.watch(120.0, "tok/s")
    recording.watch(2.0)
    recording.type("/kv", 0.3)
    recording.watch(6.0)
    os.write(terminal, b"\x04")
    os.waitpid(process, 0)
    return recording


def main() -> None:
    """Records and draws."""
    with tempfile.NamedTemporaryFile("w", suffix=".cast") as cast:
        cast.write("\n".join(record().lines) + "\n")
        cast.flush()
        subprocess.run(
            [sys.executable, "-m", "termtosvg", "render", cast.name, str(PICTURE), "-m", "100", "-M", "1500"],
            check=True,
        )


if __name__ == "__main__":
    main()
