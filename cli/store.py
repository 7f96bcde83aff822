"""``qkv-engine store``: what a folder of stored KV blocks holds, whether it is intact, and less of it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from qkv_engine.errors import ConfigError, QKVError
from qkv_engine.sizes import format_size, parse_size

from . import common, results
from .text import count

if TYPE_CHECKING:
    from qkv_engine.bench.table import Table
    from qkv_engine.kv_store.folder import StoreFolder
    from qkv_engine.kv_store.survey import SegmentRow

    from .progress import ProgressBar

ACTIONS = ("list", "prune", "verify")
EPILOG = """\
  list    the segments, oldest first, as their tables of contents say; an
          engine may be using the folder
  verify  the same, with each record's header and each block's checksum. Exit
          code 1: something was altered. An engine ignores it, whatever it is
  prune   delete segments that no engine can use, and with --max-size the
          oldest until the rest is no larger; cut torn ends off. No engine may
          be using the folder

status of a segment:
  ok        nothing is wrong
  cut off   its end is torn, after a crash or while it is written; the records
            before are intact
  damaged   some records were altered; the others are intact
  unusable  no segment of this folder, or of another release
  removed   by prune
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``store``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS))
    parser.add_argument("folder", metavar="FOLDER", help="the folder that an engine keeps blocks in")
    parser.add_argument(
        "--max-size", metavar="SIZE", help='prune: the most that may be left, such as "20GiB" (default: no limit)'
    )
    results.add_arguments(parser.add_argument_group("output").add_argument)


def run(args: argparse.Namespace) -> int:
    """Do what ``args`` ask and return the exit code."""
    from qkv_engine.kv_store.survey import DAMAGED, UNUSABLE, prune, survey

    results.check_targets(args)
    if args.max_size is not None and args.action != "prune":
        raise ConfigError("only prune deletes anything", field="max_size", value=args.max_size)
    max_nbytes = None if args.max_size is None else parse_size(args.max_size, field="max_size", free=None)
    with _opened(args) as folder:
        before = _total(folder)
        if args.action == "prune":
            rows = prune(folder, max_nbytes)
            left = _total(folder)
            _deliver(args, rows, f"{format_size(before - left)} freed, {format_size(left)} left")
            return common.EXIT_OK
        files = folder.segments()
        if args.action == "list":
            rows = list(survey(folder, files))
        else:
            rows = _verified(folder, len(files), survey(folder, files, verify=True))
        _deliver(args, rows, f"{count(len(rows), 'segment')}, {format_size(before)}")
    is_bad = args.action == "verify" and any(row.status in (DAMAGED, UNUSABLE) for row in rows)
    return common.EXIT_FAILURE if is_bad else common.EXIT_OK


def _opened(args: argparse.Namespace) -> StoreFolder:
    from qkv_engine.kv_store.survey import open_store

    try:
        return open_store(args.folder, read_only=args.action != "prune")
    except QKVError as error:
        raise error.renamed("folder") from error


def _verified(folder: StoreFolder, total: int, rows: Iterable[SegmentRow]) -> list[SegmentRow]:
    """Rows as they come, under a bar."""

    def measure(bar: ProgressBar) -> Iterable[SegmentRow]:
        bar.begin(f"verifying {folder.path}")
        return rows

    return results.collect(total, measure, lambda rows: None)


def _total(folder: StoreFolder) -> int:
    return sum(file.nbytes for file in folder.segments())


def _deliver(args: argparse.Namespace, rows: Sequence[SegmentRow], total: str) -> None:
    results.deliver_rows(args, rows, [_table(rows, args.folder, total)])


def _table(rows: Sequence[SegmentRow], folder: str, total: str) -> Table:
    from qkv_engine.bench.report import size
    from qkv_engine.bench.table import Column, from_rows, joined

    columns: list[Column[SegmentRow]] = [
        Column("segment", lambda row: row.file),
        Column("status", lambda row: row.status, is_text=True),
        Column("model", lambda row: row.model, spare=5, is_text=True),
        Column("KV", lambda row: row.kv, spare=4, is_text=True),
        Column("records", lambda row: f"{row.num_records:,}"),
        Column("tokens", lambda row: f"{row.num_tokens:,}", spare=3),
        Column("size", lambda row: size(row.nbytes)),
        Column("written", lambda row: row.written, spare=2),
        Column("what is wrong", lambda row: row.detail, spare=1, is_text=True),
    ]
    return from_rows(joined("KV store", folder), rows, columns, [total])._replace(group=None)
