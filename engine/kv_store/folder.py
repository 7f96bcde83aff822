"""The folder of a store: its lock, its secret, and its segment files. Nothing in it is reached through a link.

Files are opened relative to the folder, which is opened once. Only the owner, who holds the lock, changes anything.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from ..closable import Closable
from ..errors import ConfigError, StoreError

OPTION: Final = "kv_store"  # the engine's option that names the folder
SIZE_OPTION: Final = "kv_store_size"  # and the one that bounds it
MAX_NUMBER: Final = 2**63 - 1  # of a segment
SECRET_NBYTES: Final = 32
_LOCK, _SECRET, _DRAFT = "lock", "secret", "secret.draft"
_SEGMENT = re.compile(r"([0-9a-f]{16})\.kv", re.ASCII)
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe would wait for ever
_NEW = os.O_CREAT | os.O_EXCL | os.O_RDWR


class SegmentFile(NamedTuple):
    """The name of a segment's file, as a number, and its size."""

    number: int
    nbytes: int


class StoreFolder(Closable):
    """An open folder. ``is_owner``: whether this process may write in it."""

    def __init__(self, path: str | Path, *, read_only: bool = False):
        """Opens the folder at ``path``; the owner makes it if there is none.

        Raises ``ConfigError`` for a folder that others may look into or that cannot be read.
        """
        self.path = Path(path).expanduser()
        self._lock: int | None = None
        try:
            if not read_only:
                self._make()
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise self._refusal(f"cannot be opened: {_reason(error)}") from error
        try:
            self._check_private()
            if not read_only:
                self._take_lock()
            self.secret = self._read_secret() or self._make_secret()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise self._refusal(f"cannot be used: {_reason(error)}") from error
            raise

    @staticmethod
    def is_store(path: str | Path) -> bool:
        """Whether there is a store at ``path``."""
        return (Path(path).expanduser() / _SECRET).is_file()

    @property
    def is_owner(self) -> bool:
        """Whether this process holds the lock."""
        return self._lock is not None

    def owner(self) -> int | None:
        """The id of the process that took the lock last, as it says itself."""
        with suppress(OSError, ValueError), self._opened(_LOCK, os.O_RDONLY) as fd:
            return int(os.pread(fd, 20, 0))
        return None

    def close(self) -> None:
        """Gives the lock back."""
        for fd in (self._lock, self._fd):
            if fd is not None and fd >= 0:
                os.close(fd)
        self._lock, self._fd = None, -1

    # ---- segments

    def segments(self) -> list[SegmentFile]:
        """Regular files with names of segments, by number. Raises ``OSError``."""
        found = list[SegmentFile]()
        for name in os.listdir(self._fd):
            match = _SEGMENT.fullmatch(name)
            if match is None or int(match[1], 16) > MAX_NUMBER:
                continue
            with suppress(FileNotFoundError):  # its owner gave it up
                status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    found.append(SegmentFile(int(match[1], 16), status.st_size))
        return sorted(found)

    @contextmanager
    def opened(self, number: int, *, writable: bool = False) -> Iterator[int]:
        """The descriptor of a segment's file in the block. Raises ``OSError``, and ``StoreError`` for no file."""
        with self._opened(segment_name(number), os.O_RDWR if writable else os.O_RDONLY) as fd:
            yield fd

    def add(self, number: int) -> int:
        """The descriptor of a new segment file, which the caller closes. Raises ``OSError``."""
        return os.open(segment_name(number), _NEW | _SAFE, 0o600, dir_fd=self._fd)

    def remove(self, number: int) -> None:
        """Deletes a segment's file if it is there. Raises ``OSError``."""
        with suppress(FileNotFoundError):
            os.unlink(segment_name(number), dir_fd=self._fd)

    def truncate(self, number: int, nbytes: int) -> None:
        """Cuts a segment's file off behind ``nbytes``. Raises ``OSError``."""
        with self.opened(number, writable=True) as fd:
            os.ftruncate(fd, nbytes)

    def sync(self) -> None:
        """Has names of new files reach the disk. Raises ``OSError``."""
        os.fsync(self._fd)

    # ---- opening

    def _make(self) -> None:
        with suppress(FileExistsError):
            os.mkdir(self.path, 0o700)

    def _check_private(self) -> None:
        status = os.fstat(self._fd)
        if status.st_uid != os.geteuid():
            raise self._refusal("belongs to another user", "Name a folder that is not there yet")
        if stat.S_IMODE(status.st_mode) & 0o077:
            why = f"others may look into it (mode {stat.S_IMODE(status.st_mode):o}); it holds prompts and their KV"
            raise self._refusal(why, "Run chmod 700 on it, or name a folder that is not there yet")

    def _take_lock(self) -> None:
        """Becomes the owner if there is none. The lock ends with the process."""
        fd = os.open(_LOCK, os.O_CREAT | os.O_RDWR | _SAFE, 0o600, dir_fd=self._fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return
        except BaseException:
            os.close(fd)
            raise
        self._lock = fd
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)

    def _read_secret(self) -> bytes | None:
        """The folder's secret; None if there is none, or none that could be one."""
        try:
            with self._opened(_SECRET, os.O_RDONLY) as fd:
                secret = os.pread(fd, SECRET_NBYTES + 1, 0)
        except (FileNotFoundError, StoreError):
            return None
        return secret if len(secret) == SECRET_NBYTES else None

    def _make_secret(self) -> bytes:
        """A new secret, which the owner leaves in the folder; segments under another one are not read any more."""
        secret = secrets.token_bytes(SECRET_NBYTES)
        if self.is_owner:
            with suppress(FileNotFoundError):
                os.unlink(_DRAFT, dir_fd=self._fd)
            fd = os.open(_DRAFT, _NEW | _SAFE, 0o600, dir_fd=self._fd)
            try:
                os.write(fd, secret)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(_DRAFT, _SECRET, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            self.sync()
        return secret

    @contextmanager
    def _opened(self, name: str, flags: int) -> Iterator[int]:
        fd = os.open(name, flags | _SAFE, dir_fd=self._fd)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise StoreError("not a regular file")
            yield fd
        finally:
            os.close(fd)

    def _refusal(self, why: str, remedy: str | None = None) -> ConfigError:
        remedy = remedy or "Name a folder of your own, or one that is not there yet"
        return ConfigError(why, field=OPTION, value=str(self.path), remedy=remedy)


def segment_name(number: int) -> str:
    """The name of a segment's file."""
    return f"{number:016x}.kv"


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
