"""``qkv-engine chat``: talk with a model in this process, in a terminal or through pipes."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from qkv_engine.errors import ConfigError

from .. import common
from .params import add_sampling_arguments, chat_params, sampling_overrides
from .question import read_question

if TYPE_CHECKING:
    from .render import ThinkMode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``chat``."""
    parser.epilog = (
        "Without a terminal each line of stdin is a turn or a /command, and only answers go to stdout; "
        "/help lists the commands. Gated models take their token from HF_TOKEN."
    )
    common.add_model_arguments(parser, caches_prefixes=True)
    common.add_fit_arguments(parser)
    group = parser.add_argument_group("conversation")
    group.add_argument(
        "-p",
        "--prompt",
        metavar="TEXT",
        help="answer this and exit; text piped into stdin is added to it, and - is that text alone",
    )
    group.add_argument("--system", metavar="TEXT", help="system prompt")
    group.add_argument("--stats", action="store_true", help="print the figures of each turn on stderr")
    group.add_argument(
        "--raw", action="store_true", help="on a terminal, show answers as the model writes them, not as Markdown"
    )
    thinking = group.add_mutually_exclusive_group()
    thinking.add_argument(
        "--think",
        action="store_true",
        help="show the model's thinking and leave it on screen; also write it to pipes",
    )
    thinking.add_argument(
        "--no-think",
        action="store_true",
        help="never show the thinking, and ask for none where the model's chat template can (enable_thinking)",
    )
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Chat as ``args`` say and return the exit code."""
    from .session import Conversation

    _refuse_question(args.model)
    question = read_question(args.prompt)
    is_dialog = question is None and _is_terminal(sys.stdin) and _is_terminal(sys.stdout)
    if question is None and sys.stdin.isatty():
        print(f"loading {args.model or 'the demo model'}…", file=sys.stderr)
    overrides = sampling_overrides(args)
    with common.open_engine(args) as engine:
        from . import modes as chat_modes

        talk = Conversation(engine, chat_params(engine, overrides), args.system)
        if is_dialog:
            return chat_modes.chat_on_screen(talk, _think_mode(args), raw=args.raw)
        if question is None and sys.stdin.isatty():
            return chat_modes.chat_in_lines(talk, _think_mode(args), with_figures=args.stats)
        on_screen, options = _is_terminal(sys.stdout), {"raw": args.raw, "with_figures": args.stats}
        with chat_modes.one_way(talk, _think_mode(args), on_screen, **options) as shell:
            return chat_modes.answer_question(shell, question) if question else chat_modes.answer_lines(shell)


def _think_mode(args: argparse.Namespace) -> ThinkMode:
    from .render import ThinkMode

    return ThinkMode.SHOW if args.think else ThinkMode.OFF if args.no_think else ThinkMode.FOLD


def _refuse_question(model: str | None) -> None:
    """Raise ``ConfigError`` for a question in the place of MODEL."""
    if model is not None and len(model.split()) > 1 and not Path(model).expanduser().exists():
        remedy = "To ask a question: qkv-engine chat --prompt TEXT"
        raise ConfigError("not a model", field="model", value=model, remedy=remedy)


def _is_terminal(file: TextIO) -> bool:
    """Whether ``file`` is a terminal that can move its cursor."""
    return file.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
