"""XQuant's accuracy on the demo model: ``python -m studies.xquant_accuracy --samples 200``.

``--parts`` are tables. "calibration": the presets and the same without calibration, at equal bits. "eta": the largest
preset for every pair of ``--etas1`` and ``--etas2``, at 1 and at 2 bits. "sides": one side calibrated at a time, the
other plain, all layers alike, which shows where calibration helps. "sharing": shared codes of V against narrower
layers with codes of their own, in the same bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from itertools import product

import torch

from qkv_engine.bench.sizing import make_ladder
from qkv_engine.bench.table import as_markdown
from qkv_engine.config import BLOCK_TOKENS, DENSE16, KVConfig, RungConfig
from qkv_engine.kernels.formats.uniform.presets import XQUANT, XQUANT_ETAS, xquant_rung
from qkv_engine.models.config import ModelConfig
from qkv_engine.models.shapes import SHAPES

from .accuracy import add_options, as_table, result, run

PLAIN = ("0", "0")
# Wide layers of K and of V and the layers of V with codes of their own, of the demo model's 8: presets, then without
# sharing in the same bytes, one layer of 2 bits less for each 2 bits that sharing saves.
SHARING = {
    "xquant": ((6, 2, 4), (6, 0, 8), (4, 2, 8)),
    "xquant-1.28": ((8, 0, 2), (5, 0, 8)),
    "xquant-1.16": ((6, 0, 2), (3, 0, 8)),
}


def ladder(name: str, rung: RungConfig, sink: int) -> KVConfig:
    return KVConfig(name=name, rungs=(DENSE16, rung), sink=sink, recent=BLOCK_TOKENS, eager=True)


def calibration(args: argparse.Namespace) -> Iterable[KVConfig]:
    """Every preset with and without calibration."""
    for (name, extents), group in product(XQUANT.items(), args.group):
        for etas in (XQUANT_ETAS[group], PLAIN):
            rung = xquant_rung("xquant", extents, group, etas)
            yield ladder(f"{name}, groups of {group}, eta {etas[0]} {etas[1]}", rung, args.sink)


def eta(args: argparse.Namespace) -> Iterable[KVConfig]:
    """The largest preset with every pair of etas."""
    for group, *etas in product(args.group, args.etas1, args.etas2):
        rung = xquant_rung("xquant", XQUANT["xquant"], group, (etas[0], etas[1]))
        yield ladder(f"groups of {group}, eta {etas[0]} {etas[1]}", rung, args.sink)


def sides(args: argparse.Namespace) -> Iterable[KVConfig]:
    """K or V calibrated beside the other without: both at 2 bits; then 1 bit beside 4."""
    for group in args.group:
        for k_bits, v_bits, etas in ((2, 2, args.etas2), (4, 1, args.etas1), (1, 4, args.etas1)):
            least = min(k_bits, v_bits)
            for name, value in product("KV", etas):
                bits = k_bits if name == "K" else v_bits
                if bits > least or (name == "V" and k_bits == v_bits and value == "0"):
                    continue  # wider than the widths studied, or listed already
                k, v = (f"-{group}" + (f"-eta{value}" if name == s and value != "0" else "") for s in "KV")
                rung = RungConfig("x", f"int{k_bits}-channel{k}", f"int{v_bits}-token{v}")
                yield ladder(f"K{k_bits} V{v_bits}, groups of {group}, eta of {name} {value}", rung, args.sink)


def sharing(args: argparse.Namespace) -> Iterable[KVConfig]:
    """Shared codes and none in the same bytes; names have the bytes a token."""
    for group, (name, settings) in product(args.group, SHARING.items()):
        for extents in settings:
            config = ladder("x", layers(*extents, group), args.sink)
            shape = make_ladder(config, ModelConfig.from_hf(SHAPES["demo"]), torch.bfloat16)
            nbytes = f"{shape.narrowest.token_nbytes:,.0f} bytes a token"
            label = f"{name} {extents}, groups of {group}, {nbytes}"
            yield ladder(label[:64], config.rungs[1], args.sink)


def layers(num_wide_k: int, num_wide_v: int, num_single_v: int, group: int, num_layers: int = 8) -> RungConfig:
    """XQuant's formats, any number of wide layers."""
    (one, two), numbers = XQUANT_ETAS[group], range(num_layers)
    names = {1: f"{group}-eta{one}", 2: f"{group}-eta{two}"}
    k, v = ([2 if i < wide else 1 for i in numbers] for wide in (num_wide_k, num_wide_v))
    shared = ["-subordinate" if i % 2 and i >= num_single_v else "" for i in numbers]
    return RungConfig(
        "xquant",
        tuple(f"int{bits}-channel-{names[bits]}" for bits in k),
        tuple(f"int{bits}-token-{names[bits]}{suffix}" for bits, suffix in zip(v, shared, strict=True)),
    )


PARTS: dict[str, Callable[[argparse.Namespace], Iterable[KVConfig]]] = {
    "calibration": calibration,
    "eta": eta,
    "sides": sides,
    "sharing": sharing,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="tables (default: %(default)s)")
    parser.add_argument("--etas1", default="0,1/12,1/6,0.2,1/4,1/3", help="at 1 bit (default: %(default)s)")
    parser.add_argument("--etas2", default="0,0.0225,0.045,0.09", help="at 2 bits (default: %(default)s)")
    parser.add_argument("--group", nargs="+", type=int, choices=sorted(XQUANT_ETAS), default=sorted(XQUANT_ETAS))
    parser.add_argument("--sink", type=int, default=0)
    add_options(parser)
    args = parser.parse_args()
    args.etas1, args.etas2 = args.etas1.split(","), args.etas2.split(",")
    for part in args.parts.split(","):
        ladders = {config.name: config for config in PARTS[part](args)}
        rows = run(ladders, args)
        title = f"{part}: demo, {args.samples} samples a task, greedy"
        print(as_markdown(as_table([result(name, rows[name]) for name in ladders], title)), flush=True)


if __name__ == "__main__":
    main()
