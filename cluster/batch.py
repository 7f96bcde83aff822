"""A data set of prompts through engines on a Ray cluster, with checkpoints."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import pyarrow
import ray.data
from ray.data import ActorPoolStrategy, Dataset
from ray.data.checkpoint import CheckpointConfig

from qkv_engine import Engine, RequestError, RequestOutput, RequestOutputKind, RequestStream
from qkv_engine.errors import ConfigError, EngineDeadError

from .placement import checked_options, resources_of

logger = logging.getLogger("qkv_engine")

ANSWERS, DONE = "answers", "done"  # folders of an output: its rows, and the ids of rows whose part is complete
PART_ROWS = 1024  # rows of one part: those that a lost worker computes again
PARTS_AT_ONCE = 2  # of a worker: the second fills the engine while the last requests of the first end
ID = "id"
_COLUMNS = {
    "generated_text": pyarrow.string(),
    "generated_tokens": pyarrow.list_(pyarrow.int32()),
    "kv_bits": pyarrow.float32(),
    "finish_reason": pyarrow.string(),
    "error": pyarrow.string(),
}


def batch(
    prompts: str | os.PathLike[str] | Dataset,
    output: str | os.PathLike[str],
    *,
    options: Mapping[str, Any] | None = None,
    params: Mapping[str, Any] | None = None,
    replicas: int = 1,
    part_rows: int = PART_ROWS,
) -> Dataset:
    """Completes every prompt that has no answer in the folder ``output`` yet, and returns the rows of all answers.

    ``prompts`` is a JSON-lines file, a Parquet file or folder, or a data set that was read from files. Its rows have an
    ``id``, unique, and ``prompt`` or ``messages``. Answers are these rows with ``generated_text``,
    ``generated_tokens``, ``kv_bits``, the fewest bits that a code of the row's KV had, ``finish_reason``, and ``error``
    for a row that was refused or failed, in Parquet files of up to ``part_rows`` rows each. ``output`` is on a file
    system that all machines share, and ends as one call left it: a second call does what is missing.

    ``replicas`` engines have the ``options`` of ``Engine`` each; ``params`` are those of ``Engine.params``. A worker
    that is lost is replaced, and its parts are computed again. Raises ``ConfigError``.
    """
    options = checked_options(options or {})
    for name, value in {"replicas": replicas, "part_rows": part_rows}.items():
        if value < 1:
            raise ConfigError("out of range", field=name, value=value, remedy="Give 1 or more")
    rows = _read(prompts)
    folder = os.path.abspath(output)
    rows.context.checkpoint_config = CheckpointConfig(ID, f"{folder}/{DONE}", delete_checkpoint_on_success=False)
    answers = rows.repartition(target_num_rows_per_block=part_rows).map_batches(
        _Predictor,
        fn_constructor_args=(options, dict(params or {})),
        batch_size=part_rows,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(
            size=replicas, max_concurrent_calls_per_actor=PARTS_AT_ONCE, enable_true_multi_threading=True
        ),
        **resources_of(options),
    )
    answers.write_parquet(f"{folder}/{ANSWERS}")
    return ray.data.read_parquet(f"{folder}/{ANSWERS}")


class _Predictor:
    """An engine that completes parts. Ray calls it in several threads."""

    def __init__(self, options: Mapping[str, Any], params: Mapping[str, Any]):
        self._engine = Engine(**options)
        self._params = self._engine.params(**params, output_kind=RequestOutputKind.FINAL_ONLY)

    def __call__(self, part: pyarrow.Table) -> pyarrow.Table:
        """``part`` with the columns of its answers. Ends the process if the engine has stopped: Ray starts another."""
        try:
            begun = [self._begin(row) for row in part.to_pylist()]
            answers = [one if isinstance(one, dict) else answer_of(next(one)) for one in begun]
        except EngineDeadError:
            logger.exception("the engine has stopped, and its worker ends")
            os._exit(1)
        for name, kind in _COLUMNS.items():
            column = pyarrow.array([answer[name] for answer in answers], kind)
            part = part.append_column(name, column)
        return part

    def _begin(self, row: Mapping[str, Any]) -> RequestStream | dict[str, Any]:
        """The request of a row, or the answer of a row that is refused."""
        try:
            return self._engine.stream(prompt_of(row), self._params)
        except RequestError as error:
            return refused(error)


def prompt_of(row: Mapping[str, Any]) -> Any:
    """The prompt or the conversation of a row, without the fields that Arrow fills up. Raises ``RequestError``."""
    if row.get("messages") is not None:
        return [{name: value for name, value in message.items() if value is not None} for message in row["messages"]]
    if row.get("prompt") is None:
        raise RequestError("a row without a prompt", field=ID, value=row[ID], remedy="Give prompt or messages")
    return row["prompt"]


def answer_of(output: RequestOutput) -> dict[str, Any]:
    """The columns of a finished request."""
    return {
        "generated_text": output.text,
        "generated_tokens": output.outputs[0].token_ids,
        "kv_bits": output.kv.lowest_bits,
        "finish_reason": output.finish_reason,
        "error": output.error,
    }


def refused(error: RequestError) -> dict[str, Any]:
    """The columns of a row that never ran."""
    return dict.fromkeys(_COLUMNS) | {"finish_reason": "error", "error": str(error)}


def _read(prompts: str | os.PathLike[str] | Dataset) -> Dataset:
    """The rows of a file or a data set. Raises ``ConfigError`` for rows without ids, or not from files."""
    if isinstance(prompts, str | os.PathLike):
        is_json = PurePath(prompts).suffix in (".json", ".jsonl")
        path = os.fspath(prompts)
        prompts = ray.data.read_json(path) if is_json else ray.data.read_parquet(path)
    if ID not in prompts.schema().names:
        raise ConfigError("a column is missing", field=ID, remedy="Give every row an id of its own")
    return prompts
