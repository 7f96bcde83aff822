"""Files are written whole or not at all, and refused before a run if they cannot be written after it."""

import os
import stat
from pathlib import Path

import pytest

from qkv_engine.bench.files import check_writable, write_file
from qkv_engine.errors import ConfigError


def test_a_file_is_replaced_and_no_draft_is_left(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("old")
    write_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0o666 & ~_umask() & 0o077


def test_a_failed_write_leaves_the_old_file_and_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    path.write_text("old")

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match=r"No space.*rows.json'$"):
        write_file(path, b"new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_file(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_a_full_device_is_an_error_and_stays_a_device() -> None:
    with pytest.raises(OSError, match="No space left"):
        write_file(Path("/dev/full"), b"x")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("", "is a folder"), ("no/such/rows.csv", "no such folder"), ("file/rows.csv", "no such folder")],
)
def test_what_can_never_be_written_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"^output=.*{reason}") as caught:
        check_writable(tmp_path / name, "output")
    assert caught.value.value == str(tmp_path / name)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_folder_that_only_looks_writable_is_refused_under_the_name_given() -> None:
    with pytest.raises(ConfigError, match=r"plot='/proc/x.png': cannot be written"):
        check_writable(Path("/proc/x.png"), "plot")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ConfigError, match="cannot be written"):
            check_writable(tmp_path / "rows.csv", "output")
    finally:
        tmp_path.chmod(0o700)


def test_a_check_leaves_no_trace_and_waits_for_no_reader(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    os.mkfifo(tmp_path / "pipe")
    for name in ("old", "new", "pipe"):
        check_writable(tmp_path / name, "output")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "pipe"]
    assert (tmp_path / "old").read_text() == "old"
    check_writable(Path("/dev/null"), "output")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
