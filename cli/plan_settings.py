"""The options of ``qkv-engine plan`` that choose formats: one group a method, checked against ``--method``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from qkv_engine.errors import ConfigError
from qkv_engine.planner.kvmix import KVmix

if TYPE_CHECKING:
    from qkv_engine.planner.plan import Settings

BUDGETED = ("budget", "context", "requests")
RANKED = ("share", "k_bits", "v_bits", "low_bits", "group", "recent_ratio", "random")
WINDOWS = ("sink", "recent")
OPTIONS = {  # by method
    "mixed": (*BUDGETED, "least_bits", "rungs", "eager", *WINDOWS),
    "spectral": (*BUDGETED, "shrink", "eager", *WINDOWS),
    "pm-kvq": (*BUDGETED, "least_bits", "most_bits", *WINDOWS),
    "kvmix": (*RANKED, *WINDOWS),
}
METHODS = tuple(OPTIONS)
SCALED = {"pm-kvq"}  # methods that divide K by scales unless told not to
DEFAULT_BUDGET = "3bits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A group of options for each method. None of them has a default here, so that a wrong one is noticed."""
    add = parser.add_argument_group("mixed, spectral and pm-kvq").add_argument
    add("--budget", metavar="BITS|SIZE", help=f'memory at the floor: "2.5bits", "6GiB" (default: {DEFAULT_BUDGET})')
    add("--context", type=int, metavar="N", help="tokens of a request in the budget (default: the model's context)")
    add("--requests", type=int, metavar="N", help="requests that a budget of bytes holds at once (default: 1)")
    add = parser.add_argument_group("mixed and pm-kvq").add_argument
    add("--least-bits", type=int, metavar="N", help="fewest bits of any layer's codes (default: 1, with pm-kvq 2)")
    add = parser.add_argument_group("mixed and spectral").add_argument
    add("--eager", action="store_const", const=True, help="go to the floor as soon as a block is full")
    add = parser.add_argument_group("mixed").add_argument
    add("--rungs", type=int, metavar="N", help="rungs of the ladder, 2 to 12 (default: 8)")
    add = parser.add_argument_group("spectral").add_argument
    add("--shrink", type=float, help="0 to 1, how far bases ignore what queries ask (default: 0.3)")
    add = parser.add_argument_group("pm-kvq").add_argument
    add("--most-bits", type=int, metavar="N", help="most bits of any layer at the floor: 16, 8, 4, 2 (default: 16)")
    add = parser.add_argument_group("all methods").add_argument
    add("--sink", type=int, metavar="N", help="first tokens that stay dense (default: 32; pm-kvq 1, kvmix 0)")
    add("--recent", type=int, metavar="N", help="newest tokens that stay dense (default: 128; kvmix 0)")
    _add_kvmix(parser.add_argument_group("kvmix").add_argument)


def _add_kvmix(add: Any) -> None:
    usual = KVmix()
    add("--share", type=float, help=f"share of layers with more bits (default: {usual.share})")
    add("--k-bits", type=int, metavar="N", help=f"bits of their K (default: {usual.k_bits})")
    add("--v-bits", type=int, metavar="N", help=f"bits of their V (default: {usual.v_bits})")
    add("--low-bits", type=int, metavar="N", help=f"bits of the others (default: {usual.low_bits})")
    add("--group", type=int, metavar="N", help=f"elements of a group (default: {usual.group})")
    help_ratio = f"share of the context, the newest, that stays dense (default: {usual.recent_ratio})"
    add("--recent-ratio", type=float, metavar="RATIO", help=help_ratio)
    help_random = "draw the layers at random, whatever their scores: the control"
    add("--random", action="store_const", const=True, help=help_random)


def settings(args: argparse.Namespace, context: int) -> Settings:
    """The settings of ``--method``; ``context`` in tokens is the usual one of its budget.

    Raises ``ConfigError`` for a value out of range, and for an option of another method.
    """
    given = _given(args)
    if args.method == "kvmix":
        random_seed = args.seed if given.pop("random", False) else None
        return KVmix(**given, random_seed=random_seed)
    from qkv_engine.planner.mixed import Mixed
    from qkv_engine.planner.pm_kvq import PMKVQ
    from qkv_engine.planner.spectral import Spectral

    budgeted: dict[str, Callable[..., Settings]] = {"mixed": Mixed, "spectral": Spectral, "pm-kvq": PMKVQ}
    return budgeted[args.method](**{"budget": DEFAULT_BUDGET, "context": context} | given)


def wants_key_scale(args: argparse.Namespace) -> bool:
    """Whether a new profile is taken with K divided by scales."""
    return args.method in SCALED if args.key_scale is None else bool(args.key_scale)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the method that were given, by name."""
    mine = OPTIONS[args.method]
    for method, names in OPTIONS.items():
        for name in names:
            if name not in mine and getattr(args, name) is not None:
                message = f"no option of --method {args.method}"
                raise ConfigError(message, field=name, value=getattr(args, name), remedy=f"Use --method {method}")
    return {name: getattr(args, name) for name in mine if getattr(args, name) is not None}
