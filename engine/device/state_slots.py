"""States as slots of a request: a rung for each of their formats, and which of them a rung of the ladder stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from qkv_engine.kernels.delta_net import StateSpec

from ..kv.spec import RequestSlot, RungSize

if TYPE_CHECKING:
    import torch

    from .layouts import LayerGroup


def with_states(
    groups: tuple[LayerGroup, ...], states: Sequence[StateSpec], dtype: torch.dtype
) -> tuple[LayerGroup, ...]:
    """``groups`` with a slot of each of ``states`` in the main group."""
    if not states:
        return groups
    main = next((number for number, group in enumerate(groups) if group.visible is None), 0)
    group, num_first = groups[main], groups[main].spec.num_token_slots
    slots = (*group.slots[:num_first], *(_state_slot(state, dtype) for state in states), *group.slots[num_first:])
    changed = replace(group, slots=slots, state_floors=_state_floors(group, states[0]))
    return (*groups[:main], changed, *groups[main + 1 :])


def _state_slot(state: StateSpec, dtype: torch.dtype) -> RequestSlot:
    """The slot of a state, whose rungs are its formats."""
    forms = [(form.format, form.nbytes(dtype)) for form in state.forms]
    rungs = tuple(RungSize(fmt.name, nbytes, fmt.bits, not fmt.has_scales) for fmt, nbytes in forms)
    return RequestSlot("state", 0, rungs[0].nbytes, 0, is_state=True, rungs=rungs)


def _state_floors(group: LayerGroup, state: StateSpec) -> tuple[int, ...]:
    """For each rung of the ladder the narrowest format of a state with as many bits, if states step down.

    The first on the first rung, and on the last rung the last.
    """
    last = len(state.narrower)
    if not last:
        return ()
    bits = [group.rungs[own].bits for own in group.floors[1:-1]]
    enough = (sum(form.format.bits >= least for form in state.forms) - 1 for least in bits)
    return 0, *(max(0, number) for number in enough), last
