"""The log on stderr: lines for people, or one JSON object a line."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from datetime import UTC, datetime

from .text import one_line

TEXT, JSON = "text", "json"


def configure_logging(args: argparse.Namespace) -> None:
    """Sends the package's log to stderr, one line a record; with times where the command has ``--log-format``."""
    log_format = getattr(args, "log_format", None)
    time = "" if log_format is None else "%(asctime)s "
    handler = logging.StreamHandler(sys.stderr)
    line = _OneLineFormatter(f"qkv-engine: {time}%(levelname)s: %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == JSON else line)
    logger = logging.getLogger("qkv_engine")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.DEBUG if args.debug else logging.INFO if args.verbose else logging.WARNING)


def note(line: str, level: int = logging.INFO) -> None:
    """Says ``line`` on stderr, if there is one, whatever the log's level: as a record where the log is JSON."""
    logger = logging.getLogger("qkv_engine")
    if any(isinstance(handler.formatter, JsonFormatter) for handler in logger.handlers):
        logger.handle(logger.makeRecord(logger.name, level, "", 0, line, (), None))
    elif sys.stderr is not None:  # ``print`` would take stdout in its place
        word = "error: " if level >= logging.ERROR else ""
        print(f"qkv-engine: {word}{one_line(line)}", file=sys.stderr, flush=True)


class JsonFormatter(logging.Formatter):
    """A record as an object: ``time``, ``level``, ``logger``, ``message``, the record's ``fields``, ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        found = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, default=str)


class _OneLineFormatter(logging.Formatter):
    """Keeps a message on one line, so that nothing logged can pose as another record."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _time(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.levelname = record.levelname.lower()
        record.message = one_line(record.message)
        return super().formatMessage(record)


def _time(record: logging.LogRecord) -> str:
    """When a record was made, in UTC, as ISO 8601 to the millisecond."""
    return f"{datetime.fromtimestamp(record.created, UTC).replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"
