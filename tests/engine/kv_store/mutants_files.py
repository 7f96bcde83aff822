"""Seeded bugs of what is written into files, and of who may read it."""

from __future__ import annotations

from tests.sim.patch import Patch

RECORDS = (
    Patch(
        "signatures of records are not compared",
        "record",
        "RecordHeader.unpack",
        "if mac != signature(unsigned, secret):\n    raise StoreError('a header of a record was altered')",
        "",
    ),
    Patch("all stores sign alike", "record", "signature", "secret", "b'secret'"),
    Patch("a key is stored without the secret", "record", "key_digest", "secret", "b''"),
    Patch(
        "a key is stored in clear",
        "record",
        "key_digest",
        ("hashlib.blake2b(namespace + key, key=secret, digest_size=KEY_NBYTES, person=b'qkv store key').digest()"),
        "key",
    ),
    Patch("a key is stored without its namespace", "record", "key_digest", "namespace + key", "key"),
    Patch(
        "blocks follow each other without padding", "record", "aligned", "-(-nbytes // ALIGNMENT) * ALIGNMENT", "nbytes"
    ),
    Patch(
        "a record ends with its last block's bytes",
        "record",
        "RecordHeader.end",
        "self.offsets[-1]",
        "self.offsets[-2] + self.parts[-1].nbytes",
    ),
)
NAMESPACES = (
    Patch(
        "the model's name is part of the digest", "namespace", "Namespace.digest", "unnamed.encode()", "self.encode()"
    ),
    Patch(
        "weights are no part of the digest",
        "namespace",
        "Namespace.digest",
        "msgspec.structs.replace(self.model, name='')",
        "msgspec.structs.replace(self.model, name='', weights=None)",
    ),
    Patch(
        "the layout is no part of the digest",
        "namespace",
        "Namespace.digest",
        "msgspec.structs.replace(self, model=msgspec.structs.replace(self.model, name=''))",
        "msgspec.structs.replace(self, model=msgspec.structs.replace(self.model, name=''), layout='')",
    ),
    Patch(
        "slots have the sizes of rungs",
        "namespace",
        "StoredGroup.size",
        "(self.rungs, rung) if rung >= 0 else (self.slots, slot_rung(rung))",
        "(self.rungs, abs(rung))",
    ),
)
SEGMENTS = (
    Patch(
        "signatures of segments are not compared",
        "segment",
        "SegmentHeader.read",
        "if mac != signature(data[:_MAC.start] + bytes(16) + data[_MAC.stop:], secret):\n"
        "    raise StoreError('its header was altered, or the store has another secret')",
        "",
    ),
    Patch(
        "the walk ends at damage",
        "segment",
        "SegmentScan.records",
        "place = self._search(place + ALIGNMENT)",
        "place = self._nbytes",
    ),
    Patch(
        "the search begins two pages too late",
        "segment",
        "SegmentScan.records",
        "self._search(place + ALIGNMENT)",
        "self._search(place + 3 * ALIGNMENT)",
    ),
    Patch("records that are cut off are filed", "segment", "SegmentScan._read", "record.end <= self._nbytes", "True"),
    Patch(
        "copies of records elsewhere are filed",
        "segment",
        "SegmentScan._read",
        "(record.segment, record.offset) == (self._header.number, place)",
        "record.segment == self._header.number and record.offset >= place",
    ),
    Patch("the end is that of the file", "segment", "SegmentScan.tail_nbytes", "max(0, self._nbytes - self.end)", "0"),
    Patch(
        "the end is not moved on",
        "segment",
        "SegmentScan.records",
        "place = self.end = record.end",
        "place = record.end",
    ),
)
CONTENTS = (
    Patch(
        "signatures of tables are not compared",
        "contents",
        "Contents.read",
        "if mac != signature(page[:_MAC.start] + bytes(16) + page[_MAC.stop:] + table, secret):\n    return None",
        "",
    ),
    Patch("a table lacks the last record", "contents", "Contents.pack", "self.pieces", "self.pieces[:-1]"),
    Patch("a table is that of any segment", "contents", "Contents.read", "segment != number", "False"),
    Patch(
        "records of a table stand one page on",
        "contents",
        "_unpack",
        "pieces.append(StoredPiece(key, number, offset, num_tokens, parts))",
        "pieces.append(StoredPiece(key, number, offset + 4096, num_tokens, parts))",
    ),
    Patch("tables are not read", "contents", "Contents.read", "page[:8] != CONTENTS_MAGIC", "True"),
)
FOLDER = (
    Patch(
        "the lock is not taken",
        "folder",
        "StoreFolder._take_lock",
        "fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "None",
    ),
    Patch("the lock is shared", "folder", "StoreFolder._take_lock", "fcntl.LOCK_EX", "fcntl.LOCK_SH"),
    Patch(
        "the lock is kept",
        "folder",
        "StoreFolder.close",
        "for fd in (self._lock, self._fd):\n    if fd is not None and fd >= 0:\n        os.close(fd)",
        "if self._fd >= 0:\n    os.close(self._fd)",
    ),
    Patch(
        "links are followed",
        "folder",
        "",
        "os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK",
        "os.O_CLOEXEC | os.O_NONBLOCK",
    ),
    Patch(
        "links are counted",
        "folder",
        "StoreFolder.segments",
        "os.stat(name, dir_fd=self._fd, follow_symlinks=False)",
        "os.stat(name, dir_fd=self._fd)",
    ),
    Patch("pipes are segments", "folder", "StoreFolder.segments", "stat.S_ISREG(status.st_mode)", "True"),
    Patch("segments are open to all", "folder", "StoreFolder.add", "0o600", "0o666"),
    Patch("the folder is open to all", "folder", "StoreFolder._make", "0o700", "0o777"),
    Patch("folders that others see are taken", "folder", "StoreFolder._check_private", "0o077", "0"),
    Patch("folders that others may enter are taken", "folder", "StoreFolder._check_private", "0o077", "0o066"),
    Patch(
        "folders of others are taken", "folder", "StoreFolder._check_private", "status.st_uid != os.geteuid()", "False"
    ),
    Patch(
        "a torn secret is taken",
        "folder",
        "StoreFolder._read_secret",
        "secret if len(secret) == SECRET_NBYTES else None",
        "secret.ljust(32)[:32]",
    ),
    Patch(
        "the secret is always the same",
        "folder",
        "StoreFolder._make_secret",
        "secrets.token_bytes(SECRET_NBYTES)",
        "bytes(SECRET_NBYTES)",
    ),
    Patch(
        "the secret is not kept",
        "folder",
        "StoreFolder._make_secret",
        "os.rename(_DRAFT, _SECRET, src_dir_fd=self._fd, dst_dir_fd=self._fd)",
        "None",
    ),
    Patch(
        "other names are segments",
        "folder",
        "",
        "re.compile(r'([0-9a-f]{16})\\.kv', re.ASCII)",
        "re.compile(r'([0-9a-f]+)\\.kv', re.ASCII)",
    ),
    Patch("segments come in any order", "folder", "StoreFolder.segments", "sorted(found)", "sorted(found)[::-1]"),
)
FILES = (*RECORDS, *NAMESPACES, *SEGMENTS, *CONTENTS, *FOLDER)
