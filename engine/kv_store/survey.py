"""Segments of a store as rows, for people: what they hold, whether it is intact, and which may go."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from ..errors import ConfigError, QKVError, StoreError
from .contents import Contents
from .folder import OPTION, SegmentFile, StoreFolder, segment_name
from .reader import read_checked
from .record import RecordHeader
from .segment import SegmentHeader, SegmentScan

OK: Final = "ok"
CUT: Final = "cut off"  # after a crash, or while it is written: the records before are intact
DAMAGED: Final = "damaged"  # some records were altered; the others are intact
UNUSABLE: Final = "unusable"
REMOVED: Final = "removed"


@dataclass(frozen=True)
class SegmentRow:
    """A segment: its file, its state, the namespace and number of its records, and when it was last written.

    ``nbytes``: of the file. ``num_damaged``: records whose blocks were altered, None if they were not read.
    """

    file: str
    status: str
    model: str
    kv: str
    num_records: int
    num_tokens: int
    nbytes: int
    num_damaged: int | None
    written: str
    detail: str


def open_store(path: str, *, read_only: bool) -> StoreFolder:
    """The folder of a store. Raises ``ConfigError`` if there is none, and ``QKVError`` if another process owns it."""
    if not StoreFolder.is_store(path):
        raise ConfigError("no KV store", field=OPTION, value=path, remedy="Give the folder that an engine wrote")
    folder = StoreFolder(path, read_only=read_only)
    if not read_only and not folder.is_owner:
        owner = folder.owner()
        folder.close()
        raise QKVError(f"process {owner} uses it", field=OPTION, value=path, remedy="End that process first")
    return folder


def survey(folder: StoreFolder, files: Sequence[SegmentFile], *, verify: bool = False) -> Iterator[SegmentRow]:
    """The rows of segments, of those that are still there. ``verify``: read all blocks, too."""
    for file in files:
        row = _row(folder, file, verify)
        if row is not None:
            yield row


def prune(folder: StoreFolder, max_nbytes: int | None) -> list[SegmentRow]:
    """Deletes unusable segments, and the oldest ones until ``max_nbytes`` are left; cuts torn ends off.

    Returns the rows of what was changed. Raises ``OSError``.
    """
    files, changed = folder.segments(), list[SegmentRow]()
    rows = {file.number: row for file in files if (row := _row(folder, file, verify=False)) is not None}
    total = sum(row.nbytes for row in rows.values())
    for number, row in sorted(rows.items(), key=lambda item: (item[1].status != UNUSABLE, item[0])):
        if row.status == UNUSABLE or (max_nbytes is not None and total > max_nbytes):
            folder.remove(number)
            total -= row.nbytes
            changed.append(replace(row, status=REMOVED))
        elif row.status == CUT:
            folder.truncate(number, _intact_nbytes(folder, SegmentFile(number, row.nbytes)))
            changed.append(row)
    return changed


def _row(folder: StoreFolder, file: SegmentFile, verify: bool) -> SegmentRow | None:
    """The row of a segment; None for one that was given up meanwhile."""
    row = SegmentRow(segment_name(file.number), UNUSABLE, "", "", 0, 0, file.nbytes, None, "", "")
    try:
        with folder.opened(file.number) as fd:
            written = datetime.fromtimestamp(os.fstat(fd).st_mtime, UTC).isoformat(timespec="seconds")
            row = replace(row, written=written)
            return _read(fd, folder, file, row, verify)
    except FileNotFoundError:
        return None
    except (OSError, StoreError) as error:
        return replace(row, detail=str(error))


def _read(fd: int, folder: StoreFolder, file: SegmentFile, row: SegmentRow, verify: bool) -> SegmentRow:
    header = SegmentHeader.read(fd, folder.secret)
    if header.number != file.number:
        raise StoreError(f"a copy of {segment_name(header.number)}")
    contents = Contents.read(fd, file.number, file.nbytes, folder.secret)
    scan = SegmentScan(fd, header, folder.secret, file.nbytes if contents is None else contents.end)
    num_records = num_tokens = num_damaged = 0
    for record in scan.records() if verify or contents is None else contents.pieces:
        num_records += 1
        num_tokens += record.num_tokens
        num_damaged += verify and isinstance(record, RecordHeader) and not _is_intact(fd, record)
    if contents is not None:
        num_damaged += len(contents.pieces) - num_records
    status, detail = OK, ""
    if contents is None and scan.tail_nbytes:
        status, detail = CUT, f"{scan.tail_nbytes:,} bytes at its end are no records"
    if num_damaged or scan.num_gaps:
        status, detail = DAMAGED, f"altered records: {num_damaged}, stretches without records: {scan.num_gaps}"
    return replace(
        row,
        status=status,
        model=header.namespace.model.name,
        kv=header.namespace.ladder,
        num_records=num_records,
        num_tokens=num_tokens,
        num_damaged=num_damaged if verify else None,
        detail=detail,
    )


def _is_intact(fd: int, record: RecordHeader) -> bool:
    """Whether the blocks of a record have their checksums."""
    try:
        return all(
            read_checked(fd, offset, memoryview(bytearray(part.nbytes))) == part.checksum
            for part, offset in zip(record.parts, record.offsets, strict=False)
        )
    except (OSError, StoreError):
        return False


def _intact_nbytes(folder: StoreFolder, file: SegmentFile) -> int:
    """Where the last record of a segment ends."""
    with folder.opened(file.number) as fd:
        scan = SegmentScan(fd, SegmentHeader.read(fd, folder.secret), folder.secret, file.nbytes)
        for _ in scan.records():
            pass
    return scan.end
