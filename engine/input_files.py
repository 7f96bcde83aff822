"""Files that a user names, which are read whole: regular ones of bounded size."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .errors import ConfigError
from .sizes import format_size


def read_input(path: str | Path, *, field: str, max_nbytes: int) -> bytes:
    """The bytes of the file at ``path``, in which ~ is the home folder.

    Raises ``ConfigError``, naming ``field``, for anything but a readable regular file of at most ``max_nbytes`` bytes.
    """
    problem, data = "", b""
    try:
        found = os.path.expanduser(path)
        if stat.S_ISREG(os.stat(found).st_mode):  # reading a pipe may wait for ever, a device never ends
            with open(found, "rb") as file:
                data = file.read(max_nbytes + 1)
        else:
            problem = "not a regular file"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except ValueError:  # a null character
        problem = "not a path"
    if len(data) > max_nbytes:
        problem = f"larger than {format_size(max_nbytes)}"
    if problem:
        remedy = f"Give the path of a file of at most {format_size(max_nbytes)}"
        raise ConfigError(problem, field=field, value=str(path), remedy=remedy)
    return data
