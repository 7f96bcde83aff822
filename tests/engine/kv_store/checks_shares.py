"""Checks of a store under a quota: whose records make room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .checks_folder import found, opened
from .code import Code
from .pieces import BOTH, blocks, piece, put, read

QUOTA = 0.4  # of ``SMALL``: 12 records of both blocks
MANY = range(100, 160)
FEW = range(6)


def put_for(store: Any, number: int, tenant: str) -> bool:
    own = piece(number)._replace(tenant=tenant)
    taken = bool(store.put(own, blocks(own.key)))
    assert store.flush()
    return taken


def bytes_of(store: Any) -> dict[str, int]:
    """What the store counts for each tenant; checked against its pieces."""
    index = store._index
    found = dict[str, int]()
    for key, tenant in index._tenants.items():
        found[tenant] = found.get(tenant, 0) + index._pieces[key].nbytes
    assert found == +index._shares._nbytes, "bytes are miscounted"
    return found


def check_a_tenant_over_its_share_gives_up_its_own_first(code: Code, path: Path) -> None:
    """Those of others that stand among its records are written again, used or not."""
    for every in (1, 4):  # the others' come first, or one between four
        with opened(code, path.with_name(f"store{every}"), quota=QUOTA) as store:
            for number in MANY:
                if (number - MANY.start) % every == 0 and (number - MANY.start) // every in FEW:
                    assert put_for(store, (number - MANY.start) // every, "few")
                if every > 1 or number - MANY.start >= len(FEW):
                    assert put_for(store, number, "many")
                bytes_of(store)
            assert found(store, FEW) == list(FEW), "who is within his share lost records"
            has = found(store, MANY)
            assert has == list(range(has[0], MANY.stop))
            counted = bytes_of(store)
            assert set(counted) == {"few", "many"} and counted["many"] > counted["few"]
            files = path.with_name(f"store{every}").glob("*.kv")
            assert sum(file.stat().st_size for file in files) <= store.stats().max_nbytes


def check_a_record_counts_for_who_had_it_written_or_used_it_first(code: Code, path: Path) -> None:
    """After a restart for nobody until somebody uses it."""
    with opened(code, path, quota=QUOTA) as store:
        assert put_for(store, 0, "a") and put_for(store, 1, "a")
        assert not put_for(store, 0, "b"), "it is there"
        (nbytes,) = {store.find(piece(n).key).nbytes for n in (0, 1)}
        assert bytes_of(store) == {"a": 2 * nbytes}
        store.take_out(piece(1).key)
        assert bytes_of(store) == {"a": nbytes}
    with opened(code, path, quota=QUOTA) as store:
        assert bytes_of(store) == {}
        own = piece(0)._replace(tenant="b")
        assert read(store, own) == dict(BOTH)
        assert bytes_of(store) == {"b": nbytes}
        put(store, 0)
        assert bytes_of(store) == {"b": nbytes}


def check_without_a_quota_the_oldest_go(code: Code, path: Path) -> None:
    with opened(code, path) as store:
        for number in FEW:
            assert put_for(store, number, "few")
        for number in MANY:
            assert put_for(store, number, "many")
        assert found(store, FEW) == [] and bytes_of(store) == {}
