"""Kernels of other people: loading without their libraries, what is measured of them, and their formats' arithmetic."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qkv_engine.errors import ConfigError
from studies import peer_attention
from studies.peer_attention import (
    FAILED,
    OK,
    OURS,
    SKIPPED,
    WRONG,
    Entry,
    attention_table,
    entries,
    measure,
    prepare_torch,
    with_ratios,
)
from studies.peer_kernels import KERNELS, Call, PeerKernel, Shape, hadamard, load, reference
from studies.peers import main

SHAPE = Shape(3, 200, 8, 2, 128)


@pytest.fixture(autouse=True)
def _modules() -> Iterator[None]:
    """Nothing that a test imports from a made-up library stays."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("made", "exllamav3", "vllm", "lmdeploy", "oscar", "sglang"):
            del sys.modules[name]


def put(folder: Path, name: str, text: str) -> None:
    path = folder.joinpath(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def kernel(name: str = "made.up.kernel", stubs: dict | None = None) -> PeerKernel:
    return PeerKernel("made up", 4, name, lambda: stubs or {}, lambda module, shape, device: [])


def test_a_file_is_loaded_without_the_library_around_it(tmp_path: Path) -> None:
    put(tmp_path, "made.__init__", "raise ImportError('the whole library')")
    put(tmp_path, "made.up.beside", "x = 2")
    put(tmp_path, "made.up.kernel", "from made.platforms import y\nfrom .beside import x\nz = x + y\n")
    assert load(kernel(stubs={"made.platforms": {"y": 40}}), tmp_path).z == 42


@pytest.mark.parametrize("text", [None, "import made_up_dependency_of_theirs"])
def test_a_kernel_that_cannot_be_loaded_is_skipped(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        put(tmp_path, "made.up.kernel", text)
    entry = Entry("made up", 4, lambda shape, device: peer_attention.prepare_peer(kernel(), tmp_path, shape, device))
    row = measure(entry, SHAPE, "cpu", lambda call: 1.0)
    assert row.status == SKIPPED and "kernel.py" in (row.detail or "")


def test_without_a_folder_every_peer_of_it_is_skipped() -> None:
    rows = [measure(entry, SHAPE, "cpu", lambda call: 1.0) for entry in entries(None) if entry.name != OURS]
    assert [row.status for row in rows if row.kernel in {k.name for k in KERNELS}] == [SKIPPED] * len(KERNELS)
    assert [row.bits for row in rows] == sorted((row.bits for row in rows), reverse=True)


def call(factor: float = 1.0) -> Call:
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, n, 8 if n == 1 else 2, 128) for n in (1, 200, 200))
    out = torch.stack([reference(q[i, 0], k[i], v[i], SHAPE.scale) for i in range(3)])
    return Call(lambda: factor * out, lambda i: (q[i, 0], k[i], v[i]), 4_300_000)


def test_the_fastest_launch_shape_counts() -> None:
    def seconds(call: Call) -> float:
        if call is broken:
            raise RuntimeError("no such launch")
        return times[id(call)]

    slow, broken, fast = call(), call(), call()
    times = {id(slow): 2e-6, id(fast): 1e-6}
    row = measure(Entry("a", 4, lambda shape, device: [slow, broken, fast]), SHAPE, "cpu", seconds)
    assert (row.us, row.eta, row.status) == (1.0, 1.0, OK) and (row.error or 0) < 1e-5
    assert row.stored_bits == round(8 * 4_300_000 / (2 * 3 * 200 * 2 * 128), 3)


def test_wrong_results_and_failures_are_rows() -> None:
    wrong = measure(Entry("a", 4, lambda shape, device: [call(1.1)]), SHAPE, "cpu", lambda call: 1e-6)
    assert wrong.status == WRONG and wrong.error == pytest.approx(0.1, rel=0.01)

    def fails(call: Call) -> float:
        raise RuntimeError("out of resources")

    failed = measure(Entry("a", 4, lambda shape, device: [call()]), SHAPE, "cpu", fails)
    assert (failed.status, failed.us) == (FAILED, None) and "out of resources" in (failed.detail or "")
    table = attention_table(with_ratios([wrong, failed]))
    assert [cells[-1] for cells in table.cells] == [WRONG, FAILED] and len(table.notes) == 3


def test_ratios_are_to_ours_of_the_same_bits() -> None:
    def row(name: str, bits: int, us: float | None) -> peer_attention.AttentionRow:
        return peer_attention.AttentionRow(kernel=name, bits=bits, us=us, batch=1, length=1, status=OK)

    rows = with_ratios([row(OURS, 4, 10.0), row("a", 4, 35.0), row("b", 2, 5.0), row("c", 4, None)])
    assert [r.times_ours for r in rows] == [1.0, 3.5, None, None]


def test_torch_is_checked_too() -> None:
    (plain,) = prepare_torch(SHAPE, "cpu")
    assert (peer_attention.check(plain, SHAPE) or 1) < 0.01
    assert plain.nbytes == 2 * 3 * 200 * 2 * 128 * 2


def test_hadamard_is_orthogonal() -> None:
    h = hadamard(32, "cpu")
    assert torch.equal(h @ h.T, 32 * torch.eye(32)) and torch.equal(h, h.T)


# Stand-ins for the libraries' functions, in plain torch and value by value: what a format's documentation says.
LMDEPLOY = """
import torch
from lmdeploy.messages import QuantPolicy

def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens, page_table, *, max_seqlen_q, softmax_scale,
                            k_scales_zeros, v_scales_zeros, quant_policy):
    assert quant_policy == QuantPolicy.INT4 == 4
    out = torch.empty(q.shape)
    for b, pages in enumerate(page_table.long()):
        sides = []
        for cache, meta in ((k_cache, k_scales_zeros), (v_cache, v_scales_zeros)):
            n, (h, half) = int(cache_seqlens[b]), cache.shape[2:]
            codes = torch.empty(n, h, 2 * half)
            for d in range(2 * half):
                codes[..., d] = (cache[pages].flatten(0, 1)[:n, :, d % half] >> (4 * (d // half))) & 15
            scale, zero = meta[pages].flatten(0, 1)[:n].float().split(1, -1)
            sides.append(((codes - zero) * scale).repeat_interleave(q.shape[1] // h, 1))
        p = (softmax_scale * torch.einsum('hd,lhd->hl', q[b].float(), sides[0])).softmax(-1)
        out[b] = torch.einsum('hl,lhd->hd', p, sides[1])
    return out
"""

OSCAR = """
import torch

def decode_attention_fwd_quantized(q, k_buffer, v_buffer, k_sz, v_sz, o, kv_indptr, kv_indices, attn_logits, attn_lse,
                                   num_kv_splits, max_kv_splits, sm_scale, kv_dtype):
    assert kv_dtype == 'int2' and attn_logits.shape[2] == max_kv_splits
    for b in range(len(q)):
        rows = kv_indices[kv_indptr[b]:kv_indptr[b + 1]]
        sides = []
        for buffer, sz in ((k_buffer, k_sz), (v_buffer, v_sz)):
            quarter = buffer.shape[-1]
            codes = torch.empty(len(rows), buffer.shape[1], 4 * quarter)
            for d in range(4 * quarter):
                codes[..., d] = (buffer[rows][..., d % quarter] >> (2 * (d // quarter))) & 3
            x = (codes - sz[rows][..., 1:]) * sz[rows][..., :1]
            sides.append(x.repeat_interleave(q.shape[1] // buffer.shape[1], 1))
        p = (sm_scale * torch.einsum('hd,lhd->hl', q[b].float(), sides[0])).softmax(-1)
        o[b] = torch.einsum('hl,lhd->hd', p, sides[1])
"""


@pytest.mark.parametrize(
    ("name", "module", "text", "stored_bits"),
    [
        ("LMDeploy int4", "lmdeploy.pytorch.kernels.cuda.pagedattention", LMDEPLOY, 4.25),
        ("OSCAR int2", "oscar.decode_attention", OSCAR, 2.5),
    ],
)
def test_formats_as_their_libraries_read_them(
    name: str, module: str, text: str, stored_bits: float, tmp_path: Path
) -> None:
    put(tmp_path, module, text)
    entry = next(entry for entry in entries(tmp_path) if entry.name == name)
    row = measure(entry, SHAPE, "cpu", lambda call: 1e-6)
    assert (row.status, row.detail, row.stored_bits) == (OK, None, stored_bits)


def test_every_kernel_says_where_its_file_lies(tmp_path: Path) -> None:
    for peer in KERNELS:
        with pytest.raises(ConfigError, match=r"\.py"):
            load(peer, tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_without_a_gpu_it_is_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attention"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "GPU" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("words", [["--batch", "0"], ["--bits", "5"]])
def test_mistakes(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["attention", *words])
    assert ended.value.code == 2


def test_rows_go_to_stdout_and_to_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(*ignored: object) -> Iterator[peer_attention.AttentionRow]:
        for name, us in ((OURS, 2.0), ("a", 7.0)):
            yield peer_attention.AttentionRow(kernel=name, bits=4, us=us, batch=64, length=8192, status=OK)

    monkeypatch.setattr(peer_attention, "run", made)
    file = tmp_path / "rows.json"
    assert main(["attention", "-o", "json", "--output", str(file)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["times_ours"] for row in rows] == [1.0, 3.5] and json.loads(file.read_text()) == rows
