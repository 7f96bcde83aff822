"""The ``qkv-engine`` command: a table of sub-commands, each in a module imported when it is chosen."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from qkv_engine import __version__

from .common import add_common_arguments, configure_logging, guarded, replace_undecodable

COMMANDS = {
    "chat": "talk with a model in the terminal",
    "bench": "measure throughput, latency and KV memory over batch sizes",
    "eval": "measure how many answers are right with each way to store the KV cache",
    "env": "show versions, the device, and how many tokens fit",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the program's own) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    replace_undecodable()
    return guarded(lambda: _dispatch(words), debug="--debug" in words)


def _dispatch(words: list[str]) -> int:
    args = _build_parser().parse_args(words)
    configure_logging(args)
    code: int = args.run(args)
    return code


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qkv-engine",
        description="LLM inference that lowers the precision of live KV blocks when memory runs short.",
        epilog="qkv-engine COMMAND --help lists the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"qkv-engine {__version__}")
    commands = parser.add_subparsers(
        title="commands", dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser
    )
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", command=name)
    return parser


class _CommandParser(argparse.ArgumentParser):
    """The parser of one sub-command; its module adds the arguments when the command is first parsed."""

    def __init__(self, *, command: str, **options: Any):
        super().__init__(allow_abbrev=False, **options)
        self._command = command

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        module = import_module(f".{self._command}", __package__)
        module.add_arguments(self)
        add_common_arguments(self)
        self.set_defaults(run=module.run)
        return super().parse_known_args(args, namespace)


if __name__ == "__main__":
    sys.exit(main())
