"""What is on the screen in the end is what was committed, and only lines that changed are written."""

import io
import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from qkv_engine.cli.chat.live_tail import LiveTail, render_lines
from qkv_engine.cli.chat.log import HeldLog
from qkv_engine.cli.chat.render import ChatMarkdown, RawReply, TerminalReply, ThinkMode


def terminal(width: int = 60, height: int = 20) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        height=height,
        color_system=None,
        _environ={},
        highlight=False,
    )


def screen(written: str) -> list[str]:
    """The lines a terminal without end shows; the few codes a tail uses, and nothing else."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[\d*[AJK]|\r|\n)", written):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part.endswith("A") and part.startswith("\x1b"):
            row -= int(part[2:-1])
        elif part == "\x1b[J":
            assert row > 0, "tmux would keep what is erased in its history"
            del lines[row + 1 :]
            lines[row] = ""
        elif part == "\x1b[K":
            lines[row] = ""
        elif part != "\r":
            lines[row] += re.sub(r"\x1b\[[\d;]*m", "", part)
    assert not any(lines[row + 1 :])
    return lines[: row + 1]


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


LINES = st.lists(st.sampled_from(["a", "b", "c"]), max_size=6)


@given(st.lists(st.tuples(st.booleans(), LINES), max_size=8))
def test_the_screen_shows_what_was_committed_and_the_last_drawing(steps: list[tuple[bool, list[str]]]):
    console = terminal()
    tail, kept, drawn = LiveTail(console), [], []
    for is_final, lines in steps:
        if is_final:
            tail.commit(lines)
            kept, drawn = kept + lines, []
        else:
            tail.draw(lines)
            drawn = lines
        assert screen(written(console)) == [*kept, *drawn, ""]


def test_a_line_that_stays_is_not_written_again():
    console = terminal()
    tail = LiveTail(console)
    tail.draw(["same", "old"])
    tail.draw(["same", "new"])
    assert written(console).count("same") == 1


def test_a_tail_taller_than_the_screen_shows_its_end_and_is_committed_whole():
    console = terminal(height=6)
    tail = LiveTail(console)
    lines = [str(n) for n in range(10)]
    tail.draw(lines)
    assert screen(written(console)) == ["6", "7", "8", "9", ""]
    tail.commit(lines)
    assert screen(written(console)) == [*lines, ""]


@pytest.mark.parametrize(("width", "rows"), [(80, 4), (60, 4), (30, 7), (31, 6), (7, 19)])
def test_after_a_resize_the_drawing_is_erased_as_the_terminal_has_wrapped_it(width: int, rows: int):
    console = terminal(width=60)
    tail = LiveTail(console)
    tail.draw(["\x1b[1m" + "a" * 60 + "\x1b[0m", "", "b" * 31, "漢" * 30])
    console.width = width
    tail.commit(["c"])
    assert written(console).endswith(f"\x1b[{rows}A\r\x1b[Kc\n\x1b[J")


def test_while_the_width_changes_nothing_is_drawn():
    console, times = terminal(), iter([0.0, 0.2, 0.4, 0.8])
    tail = LiveTail(console, clock=lambda: next(times))
    tail.draw(["first"])
    for width in (50, 40, 40):
        console.width = width
        tail.draw(["second"])
        assert "second" not in written(console)
    tail.draw(["third"])
    assert screen(written(console)) == ["third", ""]


def test_a_line_put_in_stays_above_what_is_drawn():
    console = terminal()
    tail = LiveTail(console)
    tail.draw(["one", "two"])
    tail.insert(["log"])
    assert screen(written(console)) == ["log", "one", "two", ""]
    tail.commit(["three"])
    assert screen(written(console)) == ["log", "three", ""]


def test_a_streamed_answer_ends_as_the_whole_would_be_rendered():
    text = "# T\n\nSome *text*.\nNext line.\n\n```python\nx = 1\n\ny = 2\n```\n\n- a\n- b\n\n<b>tag</b>\n"
    console, ticks = terminal(), iter(range(10**6))
    reply = TerminalReply(console, ThinkMode.FOLD, clock=lambda: next(ticks))
    reply.start()
    for character in text:
        reply.answer(character)
    reply.end()
    shown = [line for line in screen(written(console)) if line]
    assert shown == ["T", "Some text.", "Next line.", "  x = 1", "  y = 2", " • a", " • b", "<b>tag</b>"]


def test_thinking_folds_stays_or_hides():
    shown = {}
    for mode in ThinkMode:
        console, ticks = terminal(), iter(range(10**6))
        reply = TerminalReply(console, mode, clock=lambda ticks=ticks: next(ticks))
        reply.start()
        reply.think("first\nsec", 3)
        reply.think("ond", 4)
        reply.think_end(1.23, 4)
        reply.answer("42")
        reply.end()
        shown[mode] = screen(written(console))
    assert shown[ThinkMode.SHOW] == ["first", "second", "thought for 1.2 s, 4 tokens", "", "42", ""]
    assert shown[ThinkMode.FOLD] == ["thought for 1.2 s, 4 tokens", "", "42", ""]
    assert shown[ThinkMode.HIDE] == shown[ThinkMode.OFF] == ["42", ""]


def test_log_lines_go_above_the_reply_and_none_is_lost():
    console, ticks, log = terminal(), iter(range(10**6)), HeldLog()
    logger = logging.Logger("test")
    logger.addHandler(log)
    reply = TerminalReply(console, ThinkMode.FOLD, log, clock=lambda: next(ticks) // 2)
    reply.start()
    for number in range(3):
        logger.info("step %d", number)
        reply.think(f"thought {number} ", number)
    reply.think_end(1.0, 3)
    logger.info("late")
    reply.answer("42")
    logger.info("last")
    reply.end()
    shown = screen(written(console))
    assert shown == ["step 0", "step 1", "step 2", "thought for 1.0 s, 3 tokens", "", "late", "42", "last", ""]


def test_a_rule_is_a_line():
    assert render_lines(terminal(width=8), ChatMarkdown("a\n\n---\n\nb")) == ["a", "", "─" * 8, "", "b"]


def test_no_markup_brings_an_escape_sequence_back():
    console = terminal()
    lines = render_lines(console, ChatMarkdown("&#27;[31m &#x9b;2J [x](javascript:1) ![i](http://h/p.png) `&#27;`"))
    assert not re.search(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x80-\x9f]|\x1b[^\[]|\x1b\[[\d;]*[^m\d;]", "\n".join(lines))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("4712*6: 2*6+0=12 1*6+1=7", "4712*6: 2*6+0=12 1*6+1=7"),
        ("a*b*c, (a+b)*(c+d)*(e), x[1]*y*z", "a*b*c, (a+b)*(c+d)*(e), x[1]*y*z"),
        ("2**10 and 3**2 are 1024 and 9", "2**10 and 3**2 are 1024 and 9"),
        ("src/*.py, a*.txt, *.md,b*.md", "src/*.py, a*.txt, *.md,b*.md"),
        ("*so* **S**upport **28**, 这是**重要**的", "so Support 28, 这是重要的"),
        ("[4*5*6](http://h/4*5*6) `4*5*6`", "4*5*6 (http://h/4*5*6) 4*5*6"),
        ("snake_case_name", "snake_case_name"),
    ],
)
def test_products_and_names_of_files_are_no_emphasis(text: str, shown: str):
    console = Console(width=80, color_system=None, force_terminal=False, file=io.StringIO())
    assert render_lines(console, ChatMarkdown(text)) == [shown]


def test_a_raw_answer_is_shown_as_it_is():
    console = terminal(width=30)
    reply = RawReply(console, ThinkMode.FOLD, clock=lambda: 0.0)
    reply.start()
    reply.think("hmm", 1)
    reply.think_end(1.0, 1)
    for part in ("# A line that is not wrapped: 2*6", "+0=12 1*6+1=7\n\n\n  *s", "o*\n\n"):
        reply.answer(part)
    reply.end()
    answer = ["# A line that is not wrapped: 2*6+0=12 1*6+1=7", "", "", "  *so*", ""]
    assert screen(written(console)) == ["thought for 1.0 s, 1 tokens", "", *answer]


def test_a_raw_reply_that_is_stopped_before_its_answer_leaves_no_line():
    console = terminal()
    reply = RawReply(console, ThinkMode.FOLD)
    reply.start()
    reply.end()
    assert screen(written(console)) == [""]
