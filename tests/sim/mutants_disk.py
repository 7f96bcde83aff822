"""Bugs put into what moves between host memory and the disk on purpose, each with a seed that shows it."""

from __future__ import annotations

from .mutants_cases import Bug


def _bug(name: str, where: str, old: str, new: str, seed: int) -> Bug:
    """``where``: "module Class.method"."""
    file, function = where.split()
    return Bug(name, file, function, old, new, case="disk", seed=seed)


DISK_BUGS = (
    _bug("a slot is free while it is written", "disk_traffic DiskTraffic.save", "self._tier.hold(slots)", "", 12000),
    _bug(
        "a slot that was written is kept",
        "disk_traffic DiskTraffic.begin_step",
        "self._tier.let_go(writing.slots)",
        "",
        12000,
    ),
    _bug(
        "a slot is free while the disk fills it",
        "host_tier HostTier.receive",
        "self.hold(copy.slot for copy in found.held())",
        "",
        12000,
    ),
    _bug("half a copy is written", "host_tier HostTier.is_there", "copy.command <= self.num_ended", "True", 12002),
    _bug("torn bytes are taken for good", "disk_traffic DiskTraffic.begin_step", "reading.job.has_come", "True", 12018),
    _bug("what comes is never filed", "host_tier HostTier.land", "self._put(own, copy)", "", 12000),
    _bug("what came is as old as before", "host_tier HostTier.land", "self.touch([key])", "", 12026),
    _bug(
        "nobody waits for the disk",
        "host_traffic HostTraffic.begin_fetching",
        "self.disk is not None and self.disk.read(request, places, found)",
        "self.disk is not None and self.disk.read(request, places, found) and False",
        12000,
    ),
    _bug(
        "everybody waits for the disk for ever",
        "disk_traffic _Reading.is_overdue",
        "self.job is not None and self.job.is_overdue",
        "False",
        12008,
    ),
    _bug(
        "a piece is read though memory has it",
        "disk_traffic DiskTraffic.read",
        "not _serves(found[index][group], self._most(limits[group], index))",
        "True",
        12000,
    ),
    _bug("a block in use is saved", "disk_traffic DiskTraffic._copy", "block.refs == 1", "True", 12000),
    _bug(
        "a piece is read again and again",
        "disk_traffic DiskTraffic.read",
        "request.num_read_pieces = max(request.num_read_pieces, number)",
        "",
        12018,
    ),
    _bug(
        "a piece that comes is read once more",
        "disk_traffic DiskTraffic.read",
        "self._tier.coming(places[index].key) is None and (not self._begin(request, places[index]))",
        "not self._begin(request, places[index])",
        12000,
    ),
    _bug("a piece is written twice", "disk_traffic DiskTraffic.save", "key in being_written", "False", 12010),
    _bug(
        "a read for who was aborted never ends",
        "disk_traffic DiskTraffic.begin_step",
        "reading.job is not None and reading.job.is_over",
        "reading.job is not None and reading.job.is_over and (not reading.request.is_finished)",
        12000,
    ),
    _bug(
        "a place that is given up is free under the disk",
        "host_tier HostTier._release",
        "slot in self._busy or slot in self._held",
        "slot in self._busy",
        12020,
    ),
)


DOUBT_BUGS = tuple(
    Bug(name, file, function, old, new, case="doubts", seed=seed)
    for name, file, function, old, new, seed in (
        (
            "bad values stay on the disk",
            "host_traffic",
            "HostTraffic.purge",
            "if self.disk is not None:\n    self.disk.forget(key)",
            "",
            14002,
        ),
        ("copies of a bad block stay", "host_traffic", "HostTraffic.purge", "self.tier.purge(key)", "", 14002),
        (
            "a block that stepped down leaves as it was",
            "host_tier",
            "HostTier.move_out",
            "copy.rung != block.rung",
            "False",
            14021,
        ),
    )
)


def _hint(name: str, where: str, old: str, new: str, seed: int) -> Bug:
    file, function = where.split()
    return Bug(name, file, function, old, new, case="hints", seed=seed)


HINT_BUGS = (
    _hint(
        "retained pieces yield like others",
        "hints Hints.rank",
        "RETAINED if key in self._lives else PLAIN",
        "PLAIN",
        13000,
    ),
    _hint("a life never ends", "hints Hints.expire", "self._end(key)", "", 13000),
    _hint(
        "a shorter time takes the place of a longer one",
        "hints Hints._retain",
        "before is not None and before.until >= life.until",
        "False",
        13000,
    ),
    _hint(
        "anything may be retained",
        "hints Hints._retain",
        "total > self._most_nbytes or own > self._tenant_nbytes",
        "False",
        13004,
    ),
    _hint(
        "the bytes of a life that ended count on",
        "hints Hints._end",
        "self._nbytes[life.tenant] -= life.nbytes",
        "",
        13000,
    ),
    _hint("what other sessions have is done", "hints Hints._leave", "not self._num_sessions[key]", "True", 13003),
    _hint("who is done stays in its place", "prefix PrefixCache.done", "self._refile(keys)", "", 13005),
    _hint(
        "retained pieces count for nobody",
        "hints Hints.note",
        "_Life(until, tenant, nbytes)",
        "_Life(until, '', nbytes)",
        13000,
    ),
    _hint("who is done is retained still", "hints Hints.done", "self._end(key)", "", 13004),
    _hint(
        "what expired stays in its place",
        "prefix PrefixCache.expire",
        "self._refile(self.hints.expire())",
        "self.hints.expire()",
        13005,
    ),
)
