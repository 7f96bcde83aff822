"""Checks of a store's folder: who may look into it and write, which files count, what a limit deletes."""

from __future__ import annotations

import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from qkv_engine.errors import ConfigError
from qkv_engine.kv_store.namespace import Namespace, StoredGroup, StoredRung
from qkv_engine.kv_store.record import RecordHeader

from .code import Code
from .logs import warnings
from .pieces import MODEL, NAMESPACE, SMALL, WINDOW, blocks, piece, put, read


def opened(code: Code, path: Path, namespace: Namespace = NAMESPACE, **options: Any) -> Any:
    options = {"max_nbytes": SMALL} | options
    return code.store.KVStore(path, namespace=code.copy_of(namespace), **options)


def filled(code: Code, path: Path, numbers: range = range(9)) -> None:
    with opened(code, path) as store:
        for number in numbers:
            assert put(store, number)
            assert store.flush()


def found(store: Any, numbers: range = range(9)) -> list[int]:
    return [number for number in numbers if read(store, piece(number)) is not None]


def refused(call: Callable[[], Any]) -> str:
    """The text of the ``ConfigError`` that ``call`` raises."""
    try:
        call().close()
    except ConfigError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def check_files_are_private_and_keys_are_not_in_them(code: Code, path: Path) -> None:
    mask = os.umask(0)
    try:
        filled(code, path)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for file in path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
        data = file.read_bytes()
        assert not any(piece(number).key in data for number in range(9)), "a key that tells a salt"
        assert file.name == "secret" or (path / "secret").read_bytes() not in data


def check_one_process_writes_and_others_read(code: Code, path: Path) -> None:
    with opened(code, path) as owner:
        put(owner, 1)
        owner.flush()
        with opened(code, path) as other:
            assert found(other) == [1] and not other.stats().is_writable and str(os.getpid()) in other.stats().problem
            assert not put(other, 2) and other.flush() and other.stats().num_dropped == 1
            assert put(owner, 2) and owner.flush() and found(other) == [1]
            other.refresh()
            assert found(other) == [1, 2]
            for number in range(3, 60):
                put(owner, number)
                owner.flush()
            assert 59 not in found(other, range(60))
            other.refresh()
            assert found(other, range(60)) == found(owner, range(60)) and 59 in found(other, range(60))
            assert other.stats().num_segments == owner.stats().num_segments
            assert other.stats().nbytes == owner.stats().nbytes
    with opened(code, path) as store:
        assert store.stats().is_writable and put(store, 100)


def check_a_reader_makes_and_changes_nothing(code: Code, path: Path) -> None:
    assert "No such file" in refused(lambda: opened(code, path, read_only=True)) and not path.exists()
    filled(code, path)
    with (path / "0000000000000001.kv").open("ab") as file:
        file.write(b"torn")
    (path / "0000000000000077.kv").write_bytes(b"foreign")
    before = {file: file.read_bytes() for file in path.iterdir()}
    with opened(code, path, read_only=True) as store:
        assert found(store) == list(range(9))
    assert {file: file.read_bytes() for file in path.iterdir()} == before


def check_a_folder_that_others_see_is_refused(code: Code, path: Path) -> None:
    for mode in (0o755, 0o770, 0o701):
        path.mkdir(mode=0o700, exist_ok=True)
        path.chmod(mode)
        assert "chmod 700" in refused(lambda: opened(code, path))
    path.chmod(0o700)
    opened(code, path).close()
    assert "Not a directory" in refused(lambda: opened(code, path / "lock"))
    assert "No such file" in refused(lambda: opened(code, path / "no" / "folder"))
    assert "null" in refused(lambda: opened(code, Path("a\0b")))


def check_a_folder_of_another_user_is_refused(code: Code, path: Path) -> None:
    filled(code, path)
    own = os.geteuid
    try:
        os.geteuid = lambda: own() + 1
        assert "another user" in refused(lambda: opened(code, path))
    finally:
        os.geteuid = own
    with opened(code, path) as store:
        assert store.stats().is_writable, "the lock of a folder that was refused is held"


def check_nothing_is_reached_through_a_link(code: Code, path: Path) -> None:
    filled(code, path)
    first = path / "0000000000000001.kv"
    elsewhere = path.with_name("elsewhere")
    first.rename(elsewhere)
    first.symlink_to(elsewhere)
    with opened(code, path) as store:
        lost = set(range(9)) - set(found(store))
        assert lost and store.stats().num_segments == len(list(path.glob("*.kv"))) - 1
    assert elsewhere.exists() and first.is_symlink()
    for name in ("lock", "secret"):
        target = path.with_name(f"its-{name}")
        (path / name).rename(target)
        (path / name).symlink_to(target)
        before = target.read_bytes()
        refused(lambda: opened(code, path))
        assert target.read_bytes() == before
        (path / name).unlink()
        target.rename(path / name)


def check_a_segment_that_becomes_a_link_is_a_miss(code: Code, path: Path) -> None:
    filled(code, path)
    with opened(code, path) as store, warnings() as told:
        for file in sorted(path.glob("*.kv")):
            target = path.with_name(file.name)
            file.rename(target)
            file.symlink_to(target)
        assert found(store) == [] and len(told) == len(list(path.glob("*.kv")))


def check_other_names_are_left_alone(code: Code, path: Path) -> None:
    filled(code, path)
    names = ["notes.txt", "1.kv", "000000000000000A.kv", "0000000000000001.kv.bak", "ffffffffffffffff.kv", "-1.kv"]
    for name in names:
        (path / name).write_bytes(bytes(SMALL))
    (path / "0000000000000042.kv").mkdir()
    os.mkfifo(path / "0000000000000043.kv")
    with opened(code, path) as store:
        assert found(store) == list(range(9)) and store.stats().num_damaged == 0
        for number in range(100, 200):
            put(store, number)
            assert store.flush() and store.stats().is_writable
    assert all((path / name).stat().st_size == SMALL for name in names)
    assert (path / "0000000000000042.kv").is_dir() and stat.S_ISFIFO((path / "0000000000000043.kv").stat().st_mode)


def check_segments_under_another_secret_are_ignored(code: Code, path: Path) -> None:
    for secret in (bytes(32), b"torn", b"", bytes(33)):
        filled(code, path)
        number = len(list(path.glob("*.kv")))
        (path / "secret").write_bytes(secret)
        with warnings() as told, opened(code, path) as store:
            assert found(store) == []
            assert len(told) == number and all(re.search(r"another secret; it is ignored", line) for line in told)
            put(store, 50)
            store.flush()
            assert found(store, range(60)) == [50]
        assert len((path / "secret").read_bytes()) == 32
        with opened(code, path) as store:
            assert found(store, range(60)) == [50]
        for file in path.glob("*.kv"):
            file.unlink()


def check_what_is_unusable_goes_first(code: Code, path: Path) -> None:
    filled(code, path)
    foreign = path / "0000000000000999.kv"
    foreign.write_bytes(bytes(SMALL // 4))
    with opened(code, path) as store:
        for number in range(100, 108):
            put(store, number)
            store.flush()
        assert foreign.exists()
        number = 108
        while foreign.exists():
            assert found(store) == list(range(9)), "a good segment went first"
            put(store, number)
            assert store.flush() and number < 150
            number += 1


def check_namespaces_share_a_folder_and_no_blocks(code: Code, path: Path) -> None:
    change = msgspec.structs.replace
    others = [
        change(NAMESPACE, model=change(MODEL, weights="ef" * 32)),
        change(NAMESPACE, model=change(MODEL, weights=None)),
        change(NAMESPACE, model=change(MODEL, hidden_size=17)),
        change(NAMESPACE, ladder="other"),
        change(NAMESPACE, layout="ab" * 32),
        change(NAMESPACE, groups=(NAMESPACE.groups[0], StoredGroup((StoredRung("fp32", 4096),), WINDOW.slots))),
    ]
    filled(code, path)
    for other in others:
        with opened(code, path, other) as store:
            assert found(store) == [] and store.stats().num_pieces == 0
            assert put(store, 3) and store.flush() and found(store) == [3]
    with opened(code, path, others[1]) as store:
        assert found(store) == [3]
    with opened(code, path, change(NAMESPACE, model=change(MODEL, name="another name"))) as store:
        assert found(store) == list(range(9))


def check_keys_in_files_differ_by_folder_and_namespace(code: Code, path: Path) -> None:
    """So nothing can be said of a salt without the folder's secret."""
    spaces, keys = (NAMESPACE, msgspec.structs.replace(NAMESPACE, ladder="other")), set()
    for folder in (path, path.with_name("another")):
        for namespace in spaces:
            with opened(code, folder, namespace) as store:
                assert put(store, 3) and store.flush()
                keys.add(store.find(piece(3).key).key)
    assert len(keys) == 4


def check_a_lower_limit_deletes_the_oldest(code: Code, path: Path) -> None:
    with opened(code, path, max_nbytes=4 * SMALL) as store:
        for number in range(100):
            put(store, number)
            store.flush()
        had = found(store, range(100))
    with opened(code, path) as store:
        assert store.flush()
        has = found(store, range(100))
        assert has and has == had[-len(has) :] and sum(file.stat().st_size for file in path.glob("*.kv")) <= SMALL


def check_a_limit_that_is_too_low_is_refused_with_one_that_works(code: Code, path: Path) -> None:
    said = refused(lambda: opened(code, path, max_nbytes=100_000))
    (size,) = re.findall(r"kv_store_size=100000: .*at least ([\d.]+) KiB", said)
    assert not path.exists()
    with opened(code, path, max_nbytes=int(float(size) * 1024)) as store:
        for number in range(60):
            put(store, number)
            store.flush()
            assert found(store, range(60))[-1:] == [number]
            assert sum(file.stat().st_size for file in path.glob("*.kv")) <= float(size) * 1024


def check_any_limit_is_kept(code: Code, path: Path) -> None:
    """While records in use are handed on."""
    least = code.store.limits_of(SMALL, code.copy_of(NAMESPACE)).segment_nbytes
    for fifths in range(20, 30):
        limit, folder = least * fifths // 5, path.with_name(f"limit-{fifths}")
        with opened(code, folder, max_nbytes=limit) as store:
            for number in range(40):
                put(store, number)
                assert store.flush()
                for each in range(number - 3, number + 1):
                    read(store, piece(each))
                assert sum(file.stat().st_size for file in folder.glob("*.kv")) <= limit


def check_a_copy_of_a_segment_is_ignored(code: Code, path: Path) -> None:
    filled(code, path)
    data = (path / "0000000000000001.kv").read_bytes()
    (path / "0000000000000123.kv").write_bytes(data)
    with warnings() as told, opened(code, path) as store:
        assert found(store) == list(range(9)) and len(told) == 1 and "a copy of" in told[0]
    (path / "0000000000000001.kv").unlink()
    with opened(code, path) as store:
        assert 0 not in found(store)
    (path / "0000000000000123.kv").unlink()
    assert blocks(piece(0).key)[0].data.tobytes() in data, "the bytes of a block stand in the file in one piece"


def check_forged_records_are_ignored(code: Code, path: Path) -> None:
    """Records that say the right key and tokens, signed by somebody who has not the secret."""
    filled(code, path)
    with opened(code, path) as store:
        places = [store.find(piece(number).key) for number in range(9)]
    for place in places:
        file = path / f"{place.segment:016x}.kv"
        data = bytearray(file.read_bytes())
        secret = (path / "secret").read_bytes()
        header = RecordHeader.unpack(bytes(data[place.offset :]), secret)
        start, nbytes = header.offsets[0], header.parts[0].nbytes
        data[start : start + nbytes] = bytes(nbytes)
        parts = (header.parts[0]._replace(checksum=zlib.crc32(bytes(nbytes))), *header.parts[1:])
        data[place.offset : place.offset + header.header_nbytes] = replace(header, parts=parts).pack(b"x" * 32)
        file.write_bytes(data)
    with opened(code, path) as store:
        assert found(store) == []


def check_an_altered_header_loses_one_record(code: Code, path: Path) -> None:
    small = ((1, 0),)
    with opened(code, path) as store:
        for number in range(6):
            assert put(store, number, small) and store.flush()
        places = [store.find(piece(number).key) for number in range(6)]
    for number, place in enumerate(places):
        file = path / f"{place.segment:016x}.kv"
        sound = file.read_bytes()
        for offset in (place.offset, place.offset + 9, place.offset + 60, place.offset + 120):
            data = bytearray(sound)
            data[offset] ^= 64
            file.write_bytes(data)
            with warnings() as told, opened(code, path) as store:
                assert found(store, range(6)) == [n for n in range(6) if n != number]
                assert len(told) == 1 and store.stats().num_damaged == 1
            file.write_bytes(sound)


def check_an_altered_header_after_a_crash_loses_one_record(code: Code, path: Path) -> None:
    """Without a table of contents the walk goes on behind it, and tells."""
    with opened(code, path) as store:
        for number in range(4):
            assert put(store, number) and store.flush()
        place = store.find(piece(1).key)
        copy = Path(shutil.copytree(path, path.with_name("copy")))
    file = copy / f"{place.segment:016x}.kv"
    data = bytearray(file.read_bytes())
    data[place.offset + 50] ^= 1
    file.write_bytes(data)
    for _ in range(2):
        with warnings() as told, opened(code, copy) as store:
            assert found(store, range(4)) == [0, 2, 3] and store.stats().num_pieces == 3
            assert len(told) == 1 and "some records were altered" in told[0]


def check_a_record_in_the_place_of_another_is_none(code: Code, path: Path) -> None:
    filled(code, path)
    with opened(code, path) as store:
        first, *_, last = [place for n in range(9) if (place := store.find(piece(n).key)).segment == 1]
    file = path / f"{1:016x}.kv"
    data = bytearray(file.read_bytes())
    data[first.offset : first.offset + first.nbytes] = data[last.offset : last.offset + last.nbytes]
    file.write_bytes(data[:-4096])  # without a table of contents
    with opened(code, path) as store:
        assert found(store) == list(range(1, 9))


def check_a_record_that_is_cut_off_is_none(code: Code, path: Path) -> None:
    filled(code, path)
    with opened(code, path) as store:
        last = store.find(piece(8).key)
    file = path / f"{last.segment:016x}.kv"
    for nbytes in (last.nbytes - 1, last.nbytes // 2, 4096, 4095, 1):
        file.write_bytes(file.read_bytes()[: last.offset + nbytes])
        with warnings() as told, opened(code, path) as store:
            assert store.find(piece(8).key) is None and found(store) == list(range(8))
            assert len(told) == 1 and "its end is cut off" in told[0]
            assert (
                file.stat().st_size
                == last.offset
                == store.stats().nbytes - sum(other.stat().st_size for other in path.glob("*.kv") if other != file)
            )
            assert put(store, 8)
        with warnings() as told, opened(code, path) as store:
            assert told == []
            last = store.find(piece(8).key)
        file = path / f"{last.segment:016x}.kv"


def check_a_table_of_another_segment_is_none(code: Code, path: Path) -> None:
    filled(code, path)
    files = [path / f"{number:016x}.kv" for number in (1, 2)]
    first, second = (file.read_bytes() for file in files)
    assert len(first) == len(second)
    files[0].write_bytes(first[:-8192] + second[-8192:])
    files[1].write_bytes(second[:-8192] + first[-8192:])
    with warnings() as told, opened(code, path) as store:
        assert found(store) == list(range(9)) and len(told) == 2
