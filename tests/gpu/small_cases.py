"""Child of ``test_sanitizer``: a tiny launch of every kernel; prints which it left out."""

from __future__ import annotations

import importlib
import math
import pkgutil
from itertools import cycle

import torch
from triton.runtime.jit import JITFunction

import qkv_engine.kernels
from qkv_engine.kernels.delta_net.formats import FLOAT32, INT8, INT16
from qkv_engine.kernels.demote import demote
from qkv_engine.kernels.dequant import dequant_reference
from qkv_engine.kernels.formats import BlockLayout, PageShape
from qkv_engine.kernels.linear import integer
from qkv_engine.kernels.moe import SoftmaxOver
from qkv_engine.kernels.sample import sample
from qkv_engine.kernels.seal import seal
from studies.kernels.inputs import dense_page, make_case, uniform_page

from ..kernels import (
    block_tables_cases,
    delta_net_cases,
    fused_cases,
    linear_cases,
    linear_codes_cases,
    moe_cases,
    moe_codes_cases,
    sample_cases,
    triton_decode_cases,
    triton_prefill_cases,
    window_cases,
)
from ..kernels.format_pages import all_sides, make_blocks

BF16, HEADS, DIM = torch.bfloat16, 1, 64


def attention() -> None:
    """Decode on all kinds of rungs, and a prefill whose history is dense and staged."""
    pages = [dense_page(BF16, HEADS, DIM), *(uniform_page(bits, HEADS, DIM) for bits in (8, 4, 2))]
    pages.append(uniform_page(3, HEADS, DIM, group=32))
    case = make_case(pages, [1, 700, 900], group=3, sink_tokens=20, lookahead=1, device="cuda")
    assert triton_decode_cases.attend(case, triton_decode_cases.plan(case)).isfinite().all()
    chunks = [(0, 40), (331, 70)]
    case, q, counts = triton_prefill_cases.build([pages[0], pages[2]], chunks, 3, 20, BF16, device="cuda")
    assert triton_prefill_cases.attend(case, q, counts).isfinite().all()
    wide = [dense_page(BF16, HEADS, 256), uniform_page(4, HEADS, 256)]  # in large tiles, of a kernel of Hopper's
    case, q, counts = triton_prefill_cases.build(wide, chunks, 3, 20, BF16, device="cuda")
    assert triton_prefill_cases.attend(case, q, counts).isfinite().all()


def windows() -> None:
    """Decode and prefill over dense and sealed pages with a window, a soft cap and null logits."""
    pages = [dense_page(BF16, HEADS, DIM), uniform_page(8, HEADS, DIM)]
    rule = {"softcap": 30.0, "nulls": torch.randn(3 * HEADS, device="cuda")}
    case = make_case(pages, [1, 140, 700], group=3, sink_tokens=20, lookahead=0, device="cuda")
    assert window_cases.decode_error(case, 150, **rule) < 3e-3
    case, q, counts = triton_prefill_cases.build(pages, [(0, 40), (531, 70)], 3, 20, BF16, device="cuda")
    assert window_cases.prefill_error(case, q, counts, 300, **rule) < 3e-3


def page_formats() -> None:
    """Both axes, small groups and large, K and V; 4 bits and 3; one step down."""
    shape = PageShape(HEADS, 128, 80)
    for old, new in ((4, 2), (3, 3)):
        blocks = make_blocks(all_sides(old, shape)[::3], shape, num_blocks=2)
        target = BlockLayout.stack(all_sides(new, shape)[::3])
        memory, (src, dst, following) = blocks.memory.cuda(), (x.cuda() for x in (blocks.src, blocks.dst, blocks.next))
        assert seal(memory, src, dst, blocks.source, blocks.target).all()
        demote(memory, dst, following, blocks.target, target)
        for page in target.pages:
            k, v = dequant_reference(memory.cpu(), following.cpu(), page)
            assert k.isfinite().all() and v.isfinite().all()


def fused() -> None:
    with torch.device("cuda"):
        for size in (7, 300):
            fused_cases.rms_norm(size, 5, BF16)
            fused_cases.add_rms_norm(size, 5, BF16)
        fused_cases.swiglu(1025, 3, BF16)
        fused_cases.sigmoid_gate(1025, 3, BF16)
        fused_cases.rope_kv_write(6, 2, 80, BF16, BF16, True)
        fused_cases.rope_kv_write(3, 1, 64, BF16, BF16, False)
        fused_cases.rope_kv_write(4, 2, 80, BF16, BF16, True, 20, basis=True)
        fused_cases.cos_sin(64, has_scale=True)


def products() -> None:
    """Sums and tiles, a last program that is not full, columns behind the last one."""
    with torch.device("cuda"):
        for num_rows in (1, 2, 5, 8):
            linear_cases.product(num_rows, 1104, 37, BF16, True)
            linear_cases.gated(num_rows, 19)


def steady_products() -> None:
    """Rows and columns that leave a tile part empty."""
    with torch.device("cuda"):
        for num_rows in (1, 70):
            assert math.isfinite(linear_cases.steady(num_rows, 104, 37, BF16, True))


def delta_nets() -> None:
    """Steps and chunks in each format, states rewritten in a narrower one, the norm behind them."""
    cases = delta_net_cases
    with torch.device("cuda"):
        for spec in (cases.SPECS["odd"], cases.SPECS["odd"]._replace(k_dim=128, v_dim=128)):
            for form in (FLOAT32, INT16, INT8):
                for whole in (False, True):
                    assert math.isfinite(cases.step(spec._replace(format=form), BF16, [0, 5, -1], whole=whole))
                assert math.isfinite(cases.chunks(spec._replace(format=form), BF16, [0, 9], [70, 3]))
            for new in (INT16, INT8):
                assert not cases.narrowing(spec, BF16, FLOAT32, new)
        assert math.isfinite(cases.norm(BF16, 5, 3, 35))


def quantized_products(device: str = "cuda") -> None:
    """One row, few and many, parts of the columns, weights written out; rows quantized."""
    codes = linear_codes_cases
    with torch.device(device):
        weights = [codes.integer_weight(38, 256, bits, group, BF16) for bits, group in ((4, 32), (8, 256))]
        for weight in (*weights, codes.float8_weight(38, 256)):
            for num_rows in (1, 3, 40):
                assert math.isfinite(codes.product(weight, num_rows, BF16, codes.linear_codes, True))
            assert math.isfinite(codes.gated(weight, 3) + codes.written_out(weight, BF16))
        for name, tuning in codes.FLOAT8.items():
            assert math.isfinite(codes.scaled(19, tuning, gated=name == "splits"))
        bulk, weight = integer.BULK_TUNINGS[4][64], codes.integer_weight(166, 512, 4, 128, BF16, zeros=True)
        assert math.isfinite(codes.product(weight, 35, BF16, codes.linear_codes, True, tuning=bulk))
        assert math.isfinite(codes.copied_rows(83, 35, True))
        assert not codes.normed_rows(300, 3, True) and not codes.gated_rows(4100, 3)


def experts() -> None:
    """Routers, plans, and both kinds of products with both activations, and a last program that is not full."""
    with torch.device("cuda"):
        for over in SoftmaxOver:
            assert moe_cases.routing_error(moe_cases.odd_logits(5, 60), 3, over) < 1e-5
        assert not moe_cases.plan(33, 16, 4, 8)
        for tuning in moe_cases.TUNINGS.values():
            for activation in (moe_cases.PLAIN, moe_cases.GPT_OSS):
                weights = moe_cases.make_experts(5, 80, 37, BF16, bias=True, activation=activation)
                assert moe_cases.mlp_error(9, weights, 2, tuning) < 4e-3


def coded_experts() -> None:
    """Every kind of quantized experts, pairs and tiles, and a last program that is not full; all 4-bit floats."""
    with torch.device("cuda"):
        tunings, kinds = moe_codes_cases.TUNINGS.values(), moe_codes_cases.KINDS
        each_once = zip(kinds, cycle(tunings), strict=False)
        for kind, tuning in dict.fromkeys([*each_once, *(("float4", tuning) for tuning in tunings)]):
            weights = moe_codes_cases.make_experts(kind, 5, *kinds[kind], BF16, bias=True, activation=moe_cases.GPT_OSS)
            assert moe_codes_cases.mlp_error(9, weights, 2, tuning, BF16) < 4e-3
        for dtype in (BF16, torch.float16):
            assert not moe_codes_cases.float4_values([*range(113, 129)], dtype)
        assert not moe_codes_cases.float4_values([*range(16)], BF16)
        assert moe_codes_cases.written_out_product(3, BF16) < 4e-3


def sampling() -> None:
    """Greedy rows, draws, draws with limits; edits."""
    logits = torch.randn(3, 5000, device="cuda", dtype=BF16)
    sample(logits)
    for k, p in ((0, 1.0), (20, 0.9), (4000, 0.99)):
        sample(logits, sample_cases.on("cuda", sample_cases.table_of([(k, p)] * 3)))
    assert not sample_cases.edits(1, "cuda") and not sample_cases.rules("cuda")


def block_tables() -> None:
    with torch.device("cuda"):
        assert not block_tables_cases.updates(30) + block_tables_cases.places(32, 200)
        assert not block_tables_cases.entry_words(33, 2, 5)
        assert not block_tables_cases.plan(16, 5, 3, 2)


def all_kernels() -> dict[str, JITFunction]:
    """Every kernel of the package that can be launched, by name."""
    found = {}
    for module in pkgutil.walk_packages(qkv_engine.kernels.__path__, "qkv_engine.kernels."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel"):
                found[name] = value
    return found


def main() -> None:
    torch.manual_seed(0)
    for cases in (
        attention,
        windows,
        page_formats,
        fused,
        products,
        steady_products,
        delta_nets,
        quantized_products,
        experts,
        coded_experts,
        sampling,
        block_tables,
    ):
        cases()
        torch.cuda.synchronize()
    ran = {name for name, kernel in all_kernels().items() if any(cache[0] for cache in kernel.device_caches.values())}
    print("did not run:", sorted(all_kernels().keys() - ran))


if __name__ == "__main__":
    main()
