"""Cases of the simulator: how each changes drawn options, its seeds, and the kinds of events that have to come up."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from .options import LADDERS, Group, Options

# Slot sizes of many rungs, widest first: even and uneven steps, sizes that divide no slab, near neighbours.
LONG_LADDERS = (
    (48, 44, 38, 31, 22, 12), (64, 33, 17, 9, 5, 3), (30, 29, 28, 27, 26, 25),
    (96, 88, 80, 71, 64, 57, 49, 41, 32, 26, 19, 13), (40, 38, 36, 34, 32, 30, 28, 26, 24, 22, 20, 18),
)  # fmt: skip
STEPPING = tuple(sizes for sizes in LADDERS if len(sizes) > 1)
RATIOS = tuple(Fraction(text) for text in ("0.1", "0.2", "0.3", "0.5", "0.77", "0.99"))
KINDS = ("demotion", "idle", "replaced", "copy", "hit", "preempted", "recover", "refused", "end of")
RARE = ("preempted", "refused")
SHARING = ("idle", "replaced", "hit")  # what banks forbid


def with_slots(options: Options) -> Options:
    """The same options with one or two slots more, of any size up to a block's, and the slabs that they begin."""
    rng = random.Random(options.seed)
    slots = tuple(rng.choice((1, 3, *options.sizes)) for _ in range(rng.randint(1, 2)))
    return replace(options, other_slots=slots, slabs=options.slabs + len(slots))


def with_bank(options: Options) -> Options:
    """The same options with patterns and rungs to seal on, sometimes many, and the slabs that slots begin."""
    rng = random.Random(options.seed)
    sizes = rng.choice([*STEPPING, *LONG_LADDERS[:2]])
    slots = tuple(rng.choice((1, 3, *sizes)) for _ in range(rng.randint(1, 2)))
    least = 2 + len(sizes) + (options.sink > 0)
    num_windows = random.Random(f"windows {options.seed}").choice((0, 1, 3, 100))  # the other draws stay as they were
    return replace(
        options, sizes=sizes, slabs=max(options.slabs, least) + len(slots), other_slots=slots,
        has_bank=True, num_windows=num_windows, admit_at=rng.choice((len(sizes) - 1, rng.randrange(len(sizes)))),
        eager=rng.random() < 0.5,
    )  # fmt: skip


def many_rungs(options: Options) -> Options:
    """The same options with a ladder of 6 or 12 rungs, whose reserve is smaller than the number of narrower ones."""
    rng = random.Random(options.seed)
    sizes = rng.choice(LONG_LADDERS)
    return replace(
        options, sizes=sizes, slabs=max(options.slabs, 4 + (options.sink > 0)),
        admit_at=_admit_at(rng, sizes), eager=rng.random() < 0.2,
    )  # fmt: skip


def with_ratio(options: Options) -> Options:
    """The same options with a recent window that is a share of what is computed, and as many rungs that it matters.

    Half of them have no fixed tokens.
    """
    rng = random.Random(options.seed)
    sizes = rng.choice(STEPPING)
    return replace(
        options, sizes=sizes, slabs=max(options.slabs, 2 + len(sizes) + (options.sink > 0)),
        admit_at=_admit_at(rng, sizes), eager=rng.random() < 0.5,
        recent=rng.choice((0, options.recent)), recent_ratio=rng.choice(RATIOS),
    )  # fmt: skip


def with_scored(options: Options) -> Options:
    """The same options with scored requests and two rungs or more, mostly eager, half with a window by ratio."""
    rng = random.Random(options.seed)
    changed = with_ratio(options)
    ratio = rng.choice((options.recent_ratio, changed.recent_ratio))
    return replace(changed, scored=0.5, eager=rng.random() < 0.7, recent_ratio=ratio)


def with_pace(options: Options) -> Options:
    """The same options with few chunk tokens, half of them with scored requests."""
    rng = random.Random(options.seed)
    changed = with_scored(options) if rng.random() < 0.5 else options
    return replace(changed, chunk_tokens=rng.randint(1, max(1, min(options.budget, 3 * options.block))))


def with_turns(options: Options) -> Options:
    """The same options with tenants that take turns, in batches of few places and crowds that wait for them."""
    rng = random.Random(f"turns {options.seed}")
    return replace(
        options, takes_turns=True, tenants=rng.choice((2, 3)), quota=None, max_num_seqs=rng.choice((2, 3, 8, 9)),
        crowd=rng.choice((8, 20)), arrivals=1.0,
    )  # fmt: skip


def with_priorities(options: Options) -> Options:
    """The same options with three priorities."""
    return replace(options, priorities=3)


def with_groups(options: Options) -> Options:
    """The same options with a second group, of fewer rungs and other bytes, and windows in one of the groups or both.

    Half of them have slots, a window by ratio, priorities or scored requests, too.
    """
    rng = random.Random(f"groups {options.seed}")
    if rng.random() < 0.5:
        options = rng.choice((with_slots, with_ratio, with_priorities, with_scored))(options)
    block, sizes, ladder = options.block, options.sizes, rng.choice(LADDERS)
    number = rng.randint(1, min(len(ladder), len(sizes)))
    factor = rng.choice((1, 1, 2, 3))
    other = sizes[:number] if rng.random() < 0.25 else tuple(factor * size for size in ladder[:number])
    windows = [rng.choice((1, 2, block - 1, block, block + 1, 3 * block, rng.randint(1, 4 * block))) for _ in range(2)]
    kept = rng.choice(((), (0,), (1,), (1,), (0, 1)))  # groups with a window
    first, second = (window if index in kept else None for index, window in enumerate(windows))
    sink = max(1, other[0] * options.sink // block)
    more = Group(
        block, options.sink, other, _floors(rng, len(sizes), number),
        (sink,) * (options.sink > 0) + rng.choice(((), (), (1,), (other[-1],))),
        recent=rng.choice((0, 0, block, rng.randint(0, 3 * block), second or 0)), visible=second,
    )  # fmt: skip
    changed = replace(
        options, visible=first, more_groups=(more,),
        recent_ratio=options.recent_ratio if first is None else Fraction(0),
        slab_blocks=min(options.slab_blocks, 4),
    )  # fmt: skip
    return replace(changed, slabs=max(rng.choice((1, options.slabs)), _least_slabs(changed)))


def with_resizes(options: Options) -> Options:
    """The same options with changes of the memory's size in chunks, a quarter of them with two groups."""
    rng = random.Random(f"resizes {options.seed}")
    if rng.random() < 0.25:
        options = with_groups(options)
    chunk, slabs = rng.choice((1, 1, 3, options.sizes[0], 2 * options.slab_nbytes)), options.slabs + rng.choice((2, 6))
    return replace(options, resizes=rng.choice((0.05, 0.3)), chunk_nbytes=chunk, slabs=slabs)


def with_host(options: Options) -> Options:
    """The same options with a host tier, tiny or large, and a prefix cache; half with changes of other cases."""
    rng = random.Random(f"host {options.seed}")
    if rng.random() < 0.5:
        options = rng.choice((with_groups, with_groups, with_slots, with_resizes, many_rungs, with_priorities))(options)
    share = rng.choice((0.1, 0.5, 1, 3))
    return replace(
        options, prefix=True, copies=rng.choice((0.0, 0.5, 1.0)), returns=rng.choice((0.2, 0.9)),
        host_nbytes=max(1, round(share * rng.uniform(0.5, 1.5) * options.nbytes)),
    )  # fmt: skip


def with_states(options: Options) -> Options:
    """The same options with states of one to three layers and a prefix cache; half with changes of other cases.

    Requests go on from others' tokens more often, in larger memory: a checkpoint takes as much as a block or two.
    """
    rng = random.Random(f"states {options.seed}")
    if rng.random() < 0.5:
        options = rng.choice((with_groups, with_resizes, many_rungs, with_priorities, with_ratio, with_pace))(options)
    number = rng.randint(1, 3)
    sizes = rng.choice(((rng.choice((1, 3, *options.sizes)),) * number, options.sizes[:1] + (1, 3)[: number - 1]))
    more = rng.choice(((), (), (1,)))
    changed = replace(
        options, prefix=True, other_slots=(*sizes, *more), num_states=len(sizes), returns=rng.choice((0.2, 0.9)),
        slabs=options.slabs + len(sizes) + len(more) + rng.choice((0, 4, 12)),
    )  # fmt: skip
    return _with_steps(changed, rng) if len(changed.sizes) > 1 and not changed.eager else changed


def _with_steps(options: Options, rng: random.Random) -> Options:
    """The same options with states that step down, once or twice, and slabs for that.

    Half of them have states as large as several blocks, and many requests: then memory is theirs above all.
    """
    number, states, is_crowded = min(rng.choice((1, 1, 2)), len(options.sizes) - 1), [], rng.random() < 0.5
    for size in options.other_slots[: options.num_states]:
        most = max(size, number + 2) * (rng.choice((1, 2, 3)) if is_crowded else 1)
        sizes = sorted(rng.sample(range(1, most), number), reverse=True)
        states.append((most, *sizes))
    states = rng.choice((states, [states[0]] * len(states)))
    changed = replace(
        options, other_slots=(*(sizes[0] for sizes in states), *options.other_slots[len(states) :]),
        state_below=tuple(sizes[1:] for sizes in states), slabs=options.slabs + len(states) * rng.choice((0, 2, 4)),
        state_floors=_floors(rng, len(options.sizes), number + 1),
    )  # fmt: skip
    if not is_crowded:
        return changed
    return replace(
        changed, prefix=rng.random() < 0.5, arrivals=1.0, max_num_seqs=16, longest=max(1, options.longest // 3),
        crowd=8, budget=max(options.budget, 4 * options.block), open_ended=0.0,
    )  # fmt: skip


def with_disk(options: Options) -> Options:
    """The same options with a host tier and a disk behind it, which loses, tears or delays what it is given."""
    rng = random.Random(f"disk {options.seed}")
    changed = with_host(options)
    host_nbytes = rng.choice((1, 0.5, 0.2)) * min(changed.host_nbytes, changed.nbytes)
    return replace(
        changed, has_disk=True, disk_faults=rng.choice((0.0, 0.05, 0.3)), returns=rng.choice((0.5, 0.9)),
        host_nbytes=max(1, round(host_nbytes)), recoveries=rng.choice((changed.recoveries, 0.02, 0.05)),
    )  # fmt: skip


def with_doubts(options: Options) -> Options:
    """The same options with a disk, and values that turn bad while nobody looks."""
    rng = random.Random(f"doubts {options.seed}")
    changed = with_disk(options)
    return replace(
        changed, unseen=rng.choice((0.1, 0.4)), bad_blocks=rng.choice((0.0, 0.2)), faults=0.0, returns=0.9,
        eager=False, recoveries=0.0, copies=0.0, ahead=rng.random() < 0.7, num_prompts=1, salts=rng.choice((1, 2)),
    )  # fmt: skip


def with_hints(options: Options) -> Options:
    """The same options with hints of sessions and times, half with a host tier, some with a disk behind it."""
    rng = random.Random(f"hints {options.seed}")
    changed = rng.choice((with_host, with_disk, lambda same: same, with_groups))(options)
    return replace(changed, prefix=True, hints=rng.choice((0.3, 0.9)), returns=rng.choice((0.2, 0.9)))


def with_quotas(options: Options) -> Options:
    """The same options with small quotas of two or three tenants over prefixes, half of them on the host, too."""
    rng = random.Random(f"quotas {options.seed}")
    changed = rng.choice((with_host, with_disk, with_hints, with_groups, lambda same: same))(options)
    return replace(
        changed, prefix=True, quota=rng.choice((0.25, 0.4, 0.6)), tenants=rng.choice((2, 3)), returns=0.7, aborts=0.0,
    )  # fmt: skip


def _floors(rng: random.Random, num_rungs: int, number: int) -> tuple[int, ...]:
    """For each rung of a ladder one of ``number``, none wider than the one before: half of the time it is cut."""
    if rng.random() < 0.5:
        return tuple(min(rung, number - 1) for rung in range(num_rungs))
    return 0, *sorted(rng.randrange(number) for _ in range(num_rungs - 2)), *(number - 1,) * (num_rungs > 1)


def _least_slabs(options: Options) -> int:
    """The largest slabs that a lone request takes: its open block or its window, and some for each size beside."""
    slab, least = options.most_slab_nbytes, 2
    for group in options.groups:
        number = 1 if group.visible is None else group.visible // group.block + 2
        per_slab = slab // group.sizes[0]
        least += -(-number // per_slab) + 2 * len(group.sizes) - 1 + len(group.slots)
    return least


def _admit_at(rng: random.Random, sizes: tuple[int, ...]) -> int:
    """Mostly the last rung."""
    return rng.choice((len(sizes) - 1,) * 4 + (rng.randrange(len(sizes)),))


@dataclass(frozen=True)
class Case:
    """Options changed by ``change``, run with the seeds ``few``, of ``num_events`` each, or ``many``.

    Every kind of ``shows`` comes up in each of the two, and none of ``lacks``.
    """

    change: Callable[[Options], Options]
    few: range
    many: range
    shows: tuple[str, ...] = KINDS
    lacks: tuple[str, ...] = ()
    num_events: int = 240  # before all may finish; enough for all of ``shows``


CASES = {
    "slots": Case(with_slots, range(300, 311), range(400, 900)),
    "banks": Case(
        with_bank, range(629, 637), range(2000, 2500),
        ("mined", *(kind for kind in KINDS if kind not in SHARING)), SHARING, 400,
    ),
    "many rungs": Case(many_rungs, range(108, 122), range(650, 1150)),
    "ratios": Case(with_ratio, range(213, 223), range(1200, 1700)),
    "scored": Case(with_scored, range(3088, 3115), range(4000, 4500)),
    "paced": Case(with_pace, range(6100, 6110), range(7000, 7500), num_events=320),
    "groups": Case(
        with_groups, range(8003, 8019), range(8100, 8600),
        (*KINDS, "trim"),
    ),
    "resizes": Case(
        with_resizes, range(9000, 9006), range(9100, 9600),
        (*KINDS, "shrink", "growth"),
    ),
    "host": Case(
        with_host, range(11_045, 11_051), range(11_100, 11_600),
        (*(kind for kind in KINDS if kind != "refused"), "out", "written", "fetched", "parked"),
    ),
    "states": Case(
        with_states, range(12_002, 12_008), range(12_100, 12_600),
        (
            *(kind for kind in KINDS if kind not in RARE), "kept", "moved along", "restored", "given up",
            "checkpoint down", "state down",
        ),
        num_events=280,
    ),
    "disk": Case(
        with_disk, range(12_000, 12_009), range(12_100, 12_600),
        (*(kind for kind in KINDS if kind != "refused"), "out", "written", "fetched", "saved", "read", "torn"),
        num_events=280,
    ),
    "doubts": Case(
        with_doubts, range(14_002, 14_010), range(14_100, 14_400),
        ("demotion", "hit", "written", "saved", "unseen"),
    ),
    "quotas": Case(
        with_quotas, range(15_003, 15_013), range(15_100, 15_400),
        ("demotion", "idle", "hit", "out", "written", "over"),
        num_events=400,
    ),
    "hints": Case(
        with_hints, range(13_000, 13_016), range(13_100, 13_600),
        (*(kind for kind in KINDS if kind != "refused"), "done"),
    ),
    "turns": Case(
        with_turns, range(16_000, 16_012), range(16_100, 16_400), tuple(kind for kind in KINDS if kind != "refused")
    ),
    "priorities": Case(with_priorities, range(7100, 7110), range(7200, 7500)),
}  # fmt: skip
