"""Fills ``docs/command_line.md`` from the parsers of the commands: ``python docs/make_commands.py``.

Sections from ``<!-- COMMAND -->`` to ``<!-- end -->`` are made of that command's parser; the rest is written by hand.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from qkv_engine.cli.main import build_parser, command_parsers

PAGE = Path(__file__).with_name("command_line.md")
SECTION = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(page: str) -> str:
    """``page`` with all sections made anew."""
    parsers = {parser.prog.split()[-1]: parser for parser in command_parsers(build_parser())}
    return SECTION.sub(lambda found: f"{found[1]}\n{reference(parsers[found[2]])}\n\n{found[3]}", page)


def reference(parser: argparse.ArgumentParser) -> str:
    """Usage and purpose, a table for each group of arguments, and the closing words of ``--help``."""
    positionals = [argument(action) for action in parser._actions if not action.option_strings]
    usage = " ".join([parser.prog, *positionals, "[OPTIONS]"])
    parts = [f"```text\n{usage}\n```", parser.description or ""]
    parts += [table for group in parser._action_groups for table in tables(group)]
    if parser.epilog:
        lines = [textwrap.fill(line, 110, break_on_hyphens=False) for line in parser.epilog.strip().splitlines()]
        parts.append("\n".join(["```text", *lines, "```"]))
    return "\n\n".join(parts)


def tables(group: argparse._ArgumentGroup) -> Iterator[str]:
    """The table of a group's visible arguments, and the group's description."""
    rows = [action for action in group._group_actions if action.help not in (None, argparse.SUPPRESS)]
    rows = [action for action in rows if not isinstance(action, argparse._HelpAction)]
    if rows:
        lines = [f"| `{argument(action)}` | {meaning(action)} |".replace("<", "&lt;") for action in rows]
        yield "\n".join([f"| {group.title} | meaning |", "|---|---|", *lines])
    if rows and group.description:
        yield f"{group.description[0].upper()}{group.description[1:]}."


def argument(action: argparse.Action) -> str:
    """The names of an argument and its value, as on a command line; bars escaped for a table."""
    choices = "{" + ",".join(action.choices) + "}" if action.choices else None
    value = str(action.metavar or choices or action.dest.upper()).replace("|", r"\|")
    if action.nargs == "?":
        value = f"[{value}]"
    names = ", ".join(action.option_strings)
    return f"{names} {value}" if names and action.nargs != 0 else names or value


def meaning(action: argparse.Action) -> str:
    """The help of an argument, with options as code and bars escaped for a table."""
    text = (action.help or "") % vars(action)
    return re.sub(r"(?<![^\s(])--[a-z][\w-]*", r"`\g<0>`", text).replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text()))
