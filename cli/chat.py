"""``qkv-engine chat``: talk with a model in this process, in a terminal or through pipes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TextIO

from qkv_engine.errors import ConfigError

from . import common
from .chat_params import add_sampling_arguments, chat_params, sampling_overrides

if TYPE_CHECKING:
    from .chat_render import ThinkMode
    from .chat_session import Conversation, Reply


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``chat``."""
    parser.epilog = (
        "Without a terminal each line of stdin is a turn, and only answers go to stdout. "
        "Gated models take their token from HF_TOKEN."
    )
    common.add_model_arguments(parser)
    group = parser.add_argument_group("conversation")
    group.add_argument("--prompt", metavar="TEXT", help="answer this and exit; - reads it from stdin")
    group.add_argument("--system", metavar="TEXT", help="system prompt")
    group.add_argument("--stats", action="store_true", help="print the figures of each turn on stderr")
    thinking = group.add_mutually_exclusive_group()
    thinking.add_argument("--think", action="store_true", help="keep the thinking in sight, in pipes as well")
    thinking.add_argument("--no-think", action="store_true", help="never show the thinking")
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Chat as ``args`` say and return the exit code."""
    from .chat_session import Conversation

    question = _read_question(args.prompt)
    interactive = question is None and _is_terminal(sys.stdin) and _is_terminal(sys.stdout)
    if interactive:
        print(f"loading {args.model or 'the demo model'}…", file=sys.stderr)
    with common.open_engine(args) as engine:
        conversation = Conversation(engine, chat_params(engine, sampling_overrides(args)), args.system)
        if interactive:
            from .chat_shell import chat_in_terminal

            chat_in_terminal(conversation, _think_mode(args))
            return common.EXIT_OK
        questions = _lines_of_stdin() if question is None else [question]
        return _answer_all(conversation, questions, args)


def _answer_all(conversation: Conversation, questions: Iterable[str], args: argparse.Namespace) -> int:
    """Answer every question on stdout, and nothing else there."""
    for question in questions:
        turn = conversation.ask(question, _reply(args))
        if args.stats:
            print(turn.status(conversation.engine.max_model_len), file=sys.stderr)
        if turn.interrupted:
            return common.EXIT_INTERRUPTED
    return common.EXIT_OK


def _reply(args: argparse.Namespace) -> Reply:
    from .chat_render import PlainReply, TerminalReply

    if _is_terminal(sys.stdout):
        from .chat_shell import terminal_console

        return TerminalReply(terminal_console(), _think_mode(args))
    return PlainReply(sys.stdout, with_thinking=args.think)


def _think_mode(args: argparse.Namespace) -> ThinkMode:
    from .chat_render import ThinkMode

    return ThinkMode.SHOW if args.think else ThinkMode.HIDE if args.no_think else ThinkMode.FOLD


def _read_question(prompt: str | None) -> str | None:
    """The text of ``--prompt``, before a model is loaded for it in vain."""
    question = sys.stdin.read() if prompt == "-" else prompt
    if question is not None and not question.strip():
        raise ConfigError("nothing to answer", field="prompt", value=question)
    return question


def _lines_of_stdin() -> Iterator[str]:
    """Every line that says something, prompted for where someone types on a terminal too plain for more."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _is_terminal(file: TextIO) -> bool:
    """Whether ``file`` is a terminal that can move its cursor."""
    return file.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
