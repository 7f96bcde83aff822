"""Seeded bugs of the store, each of which a check or a random walk has to find.

A surviving bug shows a missing check. Bugs without any visible effect are not in the list.
"""

from __future__ import annotations

from tests.sim.patch import Patch

from .mutants_files import FILES

INDEX = (
    Patch(
        "any other rungs are worth more",
        "index",
        "StoredPiece.lacks",
        "rungs != mine and all(group in rungs and rungs[group] <= rung for group, rung in mine.items())",
        "rungs != mine",
    ),
    Patch(
        "groups may be lost",
        "index",
        "StoredPiece.lacks",
        "group in rungs and rungs[group] <= rung",
        "rungs.get(group, 0) <= rung",
    ),
    Patch("nothing is worth more", "index", "StoredPiece.lacks", "rungs != mine", "False"),
    Patch(
        "an older record stays",
        "index",
        "PieceIndex.add",
        "self.discard(piece.key)",
        "if piece.key in self._pieces:\n    return",
    ),
    Patch("pieces outlive their segment", "index", "PieceIndex.drop_segment", "del self._pieces[key]", ""),
    Patch(
        "a piece that moved goes with its old segment",
        "index",
        "PieceIndex.discard",
        "self._of_segment[piece.segment].discard(key)",
        "",
    ),
    Patch("uses are not noted", "index", "PieceIndex.use", "self._used[key] = self._newest", ""),
    Patch(
        "old uses come first",
        "index",
        "PieceIndex.used_of",
        "(-self._used[piece.key], piece.offset)",
        "(self._used[piece.key], piece.offset)",
    ),
    Patch(
        "the end of a prefix comes first",
        "index",
        "PieceIndex.used_of",
        "(-self._used[piece.key], piece.offset)",
        "(-self._used[piece.key], -piece.offset)",
    ),
    Patch("a use is for ever", "index", "PieceIndex.discard", "self._used.pop(key, None)", ""),
)
READER = (
    Patch(
        "checksums are not compared",
        "reader",
        "read_blocks",
        "read_checked(fd, offset, buffer) != part.checksum",
        "not read_checked(fd, offset, buffer)",
    ),
    Patch(
        "tokens are not compared",
        "reader",
        "read_blocks",
        "(header.parent, header.tokens) != (parent, tokens)",
        "header.parent != parent",
    ),
    Patch(
        "parents are not compared",
        "reader",
        "read_blocks",
        "(header.parent, header.tokens) != (parent, tokens)",
        "header.tokens != tokens",
    ),
    Patch(
        "records are not compared with the index",
        "reader",
        "read_header",
        "if StoredPiece.of(header) != piece:\n    raise StoreError('another record stands in its place')",
        "",
    ),
    Patch("a short read is the end", "reader", "read_checked", "done += number", "done = len(chunk)"),
    Patch(
        "only the last chunk is summed",
        "reader",
        "read_checked",
        "zlib.crc32(chunk, checksum)",
        "zlib.crc32(chunk[:1], checksum)",
    ),
)
LOG = (
    Patch("each segment is complained of again", "log", "SegmentLog.complain", "self._complained.add(number)", ""),
    Patch(
        "copies of segments are read",
        "log",
        "SegmentLog._index_segment",
        "if header.number != number:\n    raise StoreError(f'a copy of {segment_name(header.number)}')",
        "",
    ),
    Patch(
        "other namespaces are read",
        "log",
        "SegmentLog._index_segment",
        "header.namespace.digest() != self._digest",
        "False",
    ),
    Patch("gaps are not told", "log", "SegmentLog._index_segment", "scan.num_gaps", "0"),
    Patch(
        "readers cut segments",
        "log",
        "SegmentLog._index_segment",
        "scan.tail_nbytes and self._folder.is_owner",
        "scan.tail_nbytes",
    ),
    Patch("torn ends stay", "log", "SegmentLog._index_segment", "self._folder.truncate(number, scan.end)", ""),
    Patch(
        "segments that grow are not read again",
        "log",
        "SegmentLog.refresh",
        "nbytes != self._sizes.get(number, 0)",
        "number not in self._sizes",
    ),
    Patch(
        "a segment is read again from its beginning",
        "log",
        "SegmentLog._index_segment",
        "SegmentScan(fd, header, self._folder.secret, nbytes, self._ends.get(number))",
        "SegmentScan(fd, header, self._folder.secret, nbytes, header.nbytes + 4096)",
    ),
    Patch("segments have no limit", "log", "SegmentLog.append", "not self._fits(record)", "False"),
    Patch("a table is not counted", "log", "SegmentLog._fits", "contents_nbytes(table_nbytes)", "0"),
    Patch(
        "a table has entries of the one before",
        "log",
        "SegmentLog.close",
        "self._written, self._table_nbytes = [], 0",
        "self._table_nbytes = 0",
    ),
    Patch(
        "a record is placed by the old tip",
        "log",
        "SegmentLog.append",
        "self._begin()\nrecord = self._place(draft, parts)",
        "self._begin()",
    ),
    Patch("a torn write stays", "log", "_write_or_cut", "os.ftruncate(fd, offset)", "None"),
    Patch(
        "the end of the tip is not moved on",
        "log",
        "SegmentLog.append",
        "self._sizes[self._tip.number] = self._ends[self._tip.number] = record.end",
        "self._sizes[self._tip.number] = record.end",
    ),
    Patch("the limit is not kept at the start", "log", "SegmentLog.shrink", "self._give_up(victim)", "break"),
    Patch(
        "no room is left for the tip", "log", "SegmentLog._begin", "max_nbytes - segment_nbytes * 3 // 2", "max_nbytes"
    ),
    Patch(
        "no room is left for what is handed on",
        "log",
        "SegmentLog._begin",
        "max_nbytes - segment_nbytes * 3 // 2",
        "max_nbytes - segment_nbytes // 2",
    ),
    Patch(
        "half of the store is given up at once",
        "log",
        "SegmentLog._begin",
        "max_nbytes - segment_nbytes * 3 // 2",
        "max_nbytes // 4",
    ),
    Patch("nothing is handed on", "log", "SegmentLog._begin", "self._hand_on(victim, room)", "0"),
    Patch(
        "all is handed on",
        "log",
        "SegmentLog._hand_on",
        "self._index.handed_on(number)",
        "[p for p in self._index._pieces.values() if p.segment == number]",
    ),
    Patch(
        "what is handed on may fill the segment", "log", "SegmentLog._hand_on", "taken + piece.nbytes > room", "False"
    ),
    Patch(
        "records are handed on unchecked",
        "log",
        "SegmentLog._read_again",
        "read_checked(fd, offset, data) != part.checksum",
        "not read_checked(fd, offset, data)",
    ),
    Patch(
        "the newest goes first",
        "log",
        "SegmentLog._victim",
        "(n not in self._unusable, bool(over) and n not in over, n)",
        "(n not in self._unusable, bool(over) and n not in over, -n)",
    ),
    Patch(
        "unusable segments go last",
        "log",
        "SegmentLog._victim",
        "n not in self._unusable",
        "n in self._unusable",
    ),
    Patch("files of old segments stay", "log", "SegmentLog._give_up", "self._folder.remove(number)", ""),
    Patch("a short write is the end", "log", "_write", "left[0] = left[0][done:]", "left.pop(0)"),
    Patch(
        "a strange file ends the store",
        "log",
        "SegmentLog._create",
        "suppress(FileExistsError)",
        "suppress(FileNotFoundError)",
    ),
    Patch("a tip that failed stays", "log", "SegmentLog._create", "self._folder.remove(self._last)", "None"),
)
STORE = (
    Patch(
        "a full queue takes more",
        "writer",
        "WriterThread.put",
        "self._closing or is_full",
        "self._closing",
    ),
    Patch(
        "a queue is full with one block",
        "writer",
        "WriterThread.has_room",
        "self._nbytes == 0 or self._nbytes + nbytes <= self._max_nbytes",
        "self._nbytes + nbytes <= self._max_nbytes",
    ),
    Patch(
        "a sync waits for room",
        "writer",
        "WriterThread.put",
        "job.nbytes > 0 and not self.has_room(job.nbytes)",
        "not self.has_room(job.nbytes)",
    ),
    Patch("the queue never empties", "writer", "WriterThread._run", "self._nbytes -= job.nbytes", ""),
    Patch(
        "closing drops what waits", "writer", "WriterThread._run", "not self._jobs", "self._closing or not self._jobs"
    ),
    Patch(
        "a call that raises ends the thread",
        "writer",
        "WriterThread._run",
        "logger.exception('KV store: a job failed')",
        "return",
    ),
    Patch("a piece is written twice", "store", "KVStore.put", "self._pending.add(key)", ""),
    Patch("a piece waits for ever", "store", "KVStore._write", "self._pending.discard(draft.key)", ""),
    Patch("callers are not told", "store", "KVStore._write", "done is not None", "False"),
    Patch(
        "callers are told of good writes alone",
        "store",
        "KVStore._write",
        "done is not None",
        "done is not None and not self._problem",
    ),
    Patch(
        "a full disk is tried again and again",
        "store",
        "KVStore._fail",
        "self._problem or f'{type(error).__name__}: {error}'",
        "''",
    ),
    Patch(
        "known pieces are written again",
        "store",
        "KVStore.put",
        "known is not None and (not known.lacks(rungs))",
        "False",
    ),
    Patch("offers of known pieces are no use", "store", "KVStore.put", "self._index.use(key)", ""),
    Patch("reads are no use", "store", "KVStore.read", "self._index.use(stored.key)", ""),
    Patch(
        "readers may write",
        "store",
        "KVStore.__init__",
        "WriterThread(max_queued_nbytes) if self._folder.is_owner else None",
        "WriterThread(max_queued_nbytes)",
    ),
    Patch(
        "a closed store is searched",
        "store",
        "KVStore.find",
        "None if self._is_closed else self._index.get(digest)",
        "self._index.get(digest)",
    ),
    Patch(
        "another key's record is read",
        "store",
        "KVStore.read",
        "self._is_closed or stored.key != self._key(piece.key)",
        "self._is_closed",
    ),
    Patch("an error of the disk comes out", "store", "KVStore.read", "(OSError, StoreError)", "StoreError"),
    Patch("damage comes out", "store", "KVStore.read", "(OSError, StoreError)", "OSError"),
    Patch(
        "blocks of other sizes are taken",
        "store",
        "KVStore._check",
        "nbytes != len(block.data) or block.data.itemsize != 1",
        "False",
    ),
    Patch("any limit is taken", "store", "limits_of", "max_nbytes < LEAST_SEGMENTS * least", "False"),
    Patch(
        "segments hold fewer records",
        "store",
        "limits_of",
        "RECORDS * namespace.largest_record",
        "namespace.largest_record",
    ),
)
SHARES = (
    Patch("nobody is over a share", "log", "SegmentLog._victim", "bool(over) and n not in over", "False"),
    Patch("whoever is over a share goes last", "log", "SegmentLog._victim", "n not in over", "n in over"),
    Patch("what others have beside it goes, too", "index", "PieceIndex.handed_on", "(*used, *rest)", "(*used,)"),
    Patch(
        "what goes for a share is handed on",
        "index",
        "PieceIndex.handed_on",
        "self._tenants.get(key) not in self._shares.over",
        "True",
    ),
    Patch(
        "who uses a record takes it over",
        "index",
        "PieceIndex.own",
        "self._shares.is_kept and key in self._pieces and key not in self._tenants",
        "self._shares.is_kept and key in self._pieces",
    ),
    Patch(
        "records that are gone count still",
        "index",
        "PieceIndex.drop_segment",
        "self._disown(key)",
        "",
    ),
    Patch(
        "what was taken out counts still",
        "index",
        "PieceIndex.discard",
        "self._disown(key)",
        "self._tenants.pop(key, None)",
    ),
    Patch(
        "a record that is handed on counts for nobody",
        "log",
        "SegmentLog._read_again",
        "self._index.tenant_of(piece.key)",
        "None",
    ),
    Patch(
        "a record counts for nobody",
        "store",
        "KVStore.put",
        "Draft(key, self._key(piece.parent), pack_tokens(piece.tokens), blocks, piece.tenant)",
        "Draft(key, self._key(piece.parent), pack_tokens(piece.tokens), blocks)",
    ),
    Patch("who reads a record has none", "store", "KVStore.read", "self._index.own(stored.key, piece.tenant)", ""),
)
MUTANTS = {patch.name: patch for patch in (*FILES, *INDEX, *READER, *LOG, *STORE, *SHARES)}
QUICK = (  # tried by make test
    "signatures of records are not compared",
    "checksums are not compared",
    "the lock is not taken",
    "nothing is handed on",
)
