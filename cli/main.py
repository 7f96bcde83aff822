"""The ``qkv-engine`` command: a table of sub-commands, each in a module imported when it is chosen."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from qkv_engine import __version__
from qkv_engine.errors import QKVError

from .common import add_common_arguments, guarded, name_options, nearest, prepare_streams
from .log import configure_logging

COMMANDS = {
    "chat": "talk with a model in the terminal",
    "bench": "measure throughput, latency and KV memory over batch sizes",
    "eval": "measure how many answers are right with each way to store the KV cache",
    "plan": "choose formats layer by layer for a model, and write them to a file that --kv takes",
    "serve": "answer requests over HTTP, in the form of OpenAI's API",
    "fit": "show which formats of weights and KV fit a memory together, best first",
    "store": "list, verify and prune a folder of stored KV blocks",
    "env": "show versions, the device, and how many tokens fit",
    "completion": "print the script that makes a shell complete this command",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the program's own) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    is_stdout_open = prepare_streams()
    return guarded(lambda: _dispatch(words, is_stdout_open), debug="--debug" in words)


def _dispatch(words: list[str], is_stdout_open: bool) -> int:
    if not is_stdout_open:
        raise QKVError("stdout is closed", remedy="Redirect it to a file, or to /dev/null")
    args = _parse(words)
    configure_logging(args)
    try:
        code: int = args.run(args)
    except QKVError as error:
        raise name_options(error, args.options) from error
    return code


def _parse(words: list[str]) -> argparse.Namespace:
    """The arguments in ``words``. Leaves with code 2 and the usage on stderr where they are wrong."""
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    parser = build_parser()
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        parser.error(f"there is no command {words[0]!r}. {nearest(words[0], COMMANDS, 'See qkv-engine --help')}")
    return parser.parse_args(words or ["--help"])


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; those of the commands are empty until they are used."""
    parser = argparse.ArgumentParser(
        prog="qkv-engine",
        description="LLM inference that lowers the precision of live KV blocks when memory runs short.",
        epilog="qkv-engine help COMMAND lists the options of a command.",
        allow_abbrev=False,
    )
    parser.add_argument("-V", "--version", action="version", version=f"qkv-engine {__version__}")
    commands = parser.add_subparsers(
        title="commands", dest="command", required=True, metavar="COMMAND", parser_class=CommandParser
    )
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", command=name)
    return parser


def command_parsers(parser: argparse.ArgumentParser) -> list[CommandParser]:
    """The parsers of all commands, with their arguments."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for command in commands.choices.values():
        command.read_module()
    return list(commands.choices.values())


class CommandParser(argparse.ArgumentParser):
    """The parser of one sub-command; its module adds the arguments when the command is first parsed."""

    def __init__(self, *, command: str, **options: Any):
        super().__init__(allow_abbrev=False, **options)
        self._command = command

    def read_module(self) -> None:
        """Import the command's module and take over its arguments."""
        module = import_module(f".{self._command}", __package__)
        module.add_arguments(self)
        add_common_arguments(self)
        self.set_defaults(run=module.run, options={action.dest: _name(action) for action in self._actions})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The arguments in ``args``, all of which must be known: only here it is known what might be meant."""
        self.read_module()
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._explain(unknown, args))
        return found, unknown

    def _explain(self, unknown: list[str], words: list[str]) -> str:
        option = next((word for word in unknown if word.startswith("-")), None)
        if option is None:
            return f"unexpected argument {unknown[0]!r}. A text of several words needs quotes"
        name, _, value = option.partition("=")
        following = words[words.index(option) + 1 :][:1]
        if not value and following and not following[0].startswith("-"):
            value = following[0]
        names = [string for action in self._actions for string in action.option_strings]
        hint = nearest(name, names, f"See {self.prog} --help", value)
        return f"unknown option {f'{name} {value}'.rstrip()}. {hint}"


def _name(action: argparse.Action) -> str:
    """The name under which a user knows an argument: its long option, or the word in the usage."""
    if not action.option_strings:
        return str(action.metavar or action.dest)
    return next((string for string in action.option_strings if string.startswith("--")), action.option_strings[0])


if __name__ == "__main__":
    sys.exit(main())
