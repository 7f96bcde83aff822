"""Download of a model from the Hugging Face Hub into its cache, which is then read like a local folder."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

from qkv_engine.errors import ModelError

logger = logging.getLogger("qkv_engine")

REPO_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*/[A-Za-z0-9][A-Za-z0-9_.\-]*")
CONFIG_FILES = ["config.json"]
TEXT_FILES = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
]
_CLASS_NAMES = re.compile(r"(?:Got: )?\b(?:[\w.]+(?:Error|Exception|Timeout): )+|\[Errno -?\d+\] ")
WEIGHT_FILES = ["model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"]


def download(
    repo_id: str,
    *,
    revision: str | None,
    token: str | None,
    weights: bool,
    check: Callable[[Path], object],
) -> Path:
    """The folder in the Hub's cache with the model's files; files already there are not fetched again.

    ``check`` sees the folder when it has only ``config.json``, so that a model we cannot run costs no
    download. All files come from the one commit that ``revision`` (branch, tag or commit) named at the start.
    Raises ``ModelError``.
    """
    folder = _fetch(repo_id, revision, token, CONFIG_FILES)
    check(folder)
    commit = folder.name
    logger.info("%s is at commit %s", repo_id, commit)
    return _fetch(repo_id, commit, token, CONFIG_FILES + TEXT_FILES + (WEIGHT_FILES if weights else []))


def _fetch(repo_id: str, revision: str | None, token: str | None, patterns: list[str]) -> Path:
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(repo_id, revision=revision, token=token, allow_patterns=patterns)
    # The library raises its own errors, its HTTP client's and OSError, with no common base below Exception.
    except Exception as error:
        raise ModelError(f"{repo_id} could not be downloaded: {_reason(error)}", remedy=_remedy(error)) from error
    return Path(folder)


def _reason(error: Exception) -> str:
    """The first line of a library's message without the names of its classes; of an empty one the class."""
    from huggingface_hub import errors

    if _is_offline(error):
        return "it is not in the cache, and HF_HUB_OFFLINE forbids to fetch it"
    line = str(error).strip().partition("\n")[0]
    reason = _CLASS_NAMES.sub("", line)[:300].rstrip(". ") or type(error).__name__
    return f"the Hub cannot be reached: {reason}" if isinstance(error, errors.LocalEntryNotFoundError) else reason


def _is_offline(error: Exception) -> bool:
    from huggingface_hub import errors

    return isinstance(error, errors.OfflineModeIsEnabled) or isinstance(error.__cause__, errors.OfflineModeIsEnabled)


def _remedy(error: Exception) -> str:
    from huggingface_hub import errors

    if _is_offline(error):
        return "Unset HF_HUB_OFFLINE, or pass the path of a local folder"
    if isinstance(error, errors.GatedRepoError):
        return "Accept the model's licence on its page and pass token=... or set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "Check the name; a private model needs token=... or HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return "Check revision: a branch, a tag or a commit of this model"
    return "Check the network, or pass the path of a local folder"
