"""Forms that results are printed and saved in. Light: every command's help names them."""

from __future__ import annotations

from pathlib import Path

from qkv_engine.errors import ConfigError

FORMATS = ("table", "md", "csv", "json", "jsonl")
SUFFIXES = {".json": "json", ".jsonl": "jsonl", ".csv": "csv", ".md": "md", ".txt": "table"}


def format_of(path: Path, default: str) -> str:
    """The form that a file's suffix names, ``default`` without one. Raises ``ConfigError`` for an unknown suffix."""
    suffix = path.suffix.lower()
    if suffix and suffix not in SUFFIXES:
        remedy = f"Use {', '.join(SUFFIXES)}, or no suffix"
        raise ConfigError(f"{suffix} is no known form", field="output", value=str(path), remedy=remedy)
    return SUFFIXES.get(suffix, default)
