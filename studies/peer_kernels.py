"""Decode attention of other engines over KV of few bits, loaded from a folder laid out like site-packages.

No code of theirs is in this repository. The folder has their wheels unpacked, or the files named in ``KERNELS`` copied.
Each kernel is called on random codes in its own format, and its result is compared with plain attention over the values
of the codes.
"""

from __future__ import annotations

import enum
import importlib
import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv_engine.errors import ConfigError


class Shape(NamedTuple):
    """Requests of equal length: one query each, grouped query heads."""

    batch: int
    length: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)


class Call(NamedTuple):
    """A kernel ready to run: ``run`` gives [B, HQ, D]; ``values`` the query [HQ, D], K and V [L, H, D] of a request.

    ``values`` is None for a kernel that is checked elsewhere.
    """

    run: Callable[[], Tensor]
    values: Callable[[int], tuple[Tensor, Tensor, Tensor]] | None
    nbytes: int  # of codes and metadata that must be read


@dataclass(frozen=True)
class PeerKernel:
    """A kernel of another engine: ``module`` is imported from the folder, with ``stubs`` for its other imports.

    ``prepare`` makes one call, or several launch shapes of which the fastest counts.
    """

    name: str
    bits: int
    module: str
    stubs: Callable[[], dict[str, dict[str, Any]]]
    prepare: Callable[[Any, Shape, str], list[Call]]


def load(kernel: PeerKernel, folder: Path) -> Any:
    """The module of ``kernel``. Raises ``ConfigError`` if its file is not in ``folder`` or one of its imports fails."""
    path = f"{kernel.module.replace('.', '/')}.py"
    if not (folder / path).is_file():
        raise ConfigError(f"holds no {path}", field="kernels", value=str(folder))
    for name, content in kernel.stubs().items():
        _bare_parents(name, folder)
        sys.modules.setdefault(name, _module(name, content))
    _bare_parents(kernel.module, folder)
    try:
        return importlib.import_module(kernel.module)
    except ImportError as error:
        raise ConfigError(f"{path} cannot be imported: {error}", field="kernels", value=str(folder)) from error


def _bare_parents(name: str, folder: Path) -> None:
    """Packages above ``name`` whose ``__init__`` does not run: it would import the whole library."""
    parts = name.split(".")[:-1]
    for end in range(1, len(parts) + 1):
        package = ".".join(parts[:end])
        if package not in sys.modules:
            sys.modules[package] = _module(package, {"__path__": [str(folder.joinpath(*parts[:end]))]})


def _module(name: str, content: dict[str, Any]) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(content)
    return module


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of one query [HQ, D] over K and V [L, H, D], float32 [HQ, D]."""
    group = q.shape[0] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    weights = (scale * torch.einsum("hd,lhd->hl", q.float(), k)).softmax(-1)
    return torch.einsum("hl,lhd->hd", weights, v)


def hadamard(size: int, device: str | torch.device) -> Tensor:
    """Sylvester's Hadamard matrix [size, size] of +-1, float32."""
    h = torch.ones(1, 1, device=device)
    while len(h) < size:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


def page_table(shape: Shape, page: int, device: str) -> Tensor:
    """[B, pages of a request] int32: every page once, in random order."""
    pages = -(-shape.length // page)
    return torch.randperm(shape.batch * pages, device=device).view(shape.batch, pages).to(torch.int32)


def _codes(*size: int, device: str) -> Tensor:
    return torch.randint(0, 256, size, device=device, dtype=torch.uint8)


def _scales(*size: int, device: str, dtype: torch.dtype, bits: int) -> Tensor:
    """Steps for values of about unit size."""
    return (0.5 + torch.rand(size, device=device)).div(2**bits).to(dtype)


# ---- exllamav3: 2 to 8 bits in words of 32 bits, a scale for 32 values, rotated by a Hadamard matrix of 32


def prepare_exllamav3(bits: int, module: Any, shape: Shape, device: str) -> list[Call]:
    """Groups of 32 values own ``bits`` words; value i lies in word i // (32 / bits). Values lie on a midpoint grid."""
    page, half = 256, torch.float16
    b, hq, h, d = shape.batch, shape.num_heads, shape.num_kv_heads, shape.head_dim
    table = page_table(shape, page, device)
    groups = h * d // 32
    words = [_codes(table.numel(), page, groups * bits * 4, device=device).view(torch.int32) for _ in "kv"]
    scales = [_scales(table.numel(), page, groups, device=device, dtype=half, bits=0) for _ in "kv"]
    q = torch.randn(b, 1, hq, d, device=device).to(half)
    lengths = torch.full((b,), shape.length, dtype=torch.int32, device=device)

    def run() -> Tensor:
        out: Tensor = module.paged_attn_triton_decode(
            q, None, None, *words, table, lengths, softmax_scale=shape.scale, qc=(*scales, bits, bits),
            n_kv_heads_override=h,
        )  # fmt: skip
        return out[:, 0]

    def values(i: int) -> tuple[Tensor, Tensor, Tensor]:
        k, v = (decode(w, s, table[i]) for w, s in zip(words, scales, strict=True))
        return q[i, 0], k, v

    def decode(w: Tensor, s: Tensor, pages: Tensor) -> Tensor:
        w, s = (x[pages].flatten(0, 1)[: shape.length] for x in (w, s))
        shifts = torch.arange(0, 32, bits, device=device)
        codes = (w[..., None] >> shifts) & (2**bits - 1)
        grid = codes.view(shape.length, groups, 32) - (2 ** (bits - 1) - 0.5)
        x = grid * s[..., None].float().div(2 ** (bits - 1))
        return torch.matmul(x, hadamard(32, device)).div(math.sqrt(32)).view(shape.length, h, d)

    return [Call(run, values, shape.tokens * 2 * groups * (bits * 4 + 2))]


# ---- vLLM: two 4-bit values a byte, a float32 step for each token and head with the zero in its last bits


def prepare_vllm(module: Any, shape: Shape, device: str) -> list[Call]:
    """Even dims in low nibbles; q and outputs are rotated by a signed Hadamard matrix outside of the kernel."""
    page, segments = 16, 16
    b, hq, h, d = shape.batch, shape.num_heads, shape.num_kv_heads, shape.head_dim
    table = page_table(shape, page, device)
    caches = [_codes(table.numel(), page, h, d // 2, device=device) for _ in "kv"]
    steps = []
    for _ in "kv":
        exact = _scales(table.numel(), page, h, device=device, dtype=torch.float32, bits=4).view(torch.int32)
        steps.append(((exact & -16) | torch.randint(0, 16, exact.shape, device=device)).int().view(torch.float32))
    q, out = (torch.randn(b, hq, d, device=device).bfloat16() for _ in range(2))
    starts = torch.arange(b + 1, dtype=torch.int32, device=device)
    lengths = torch.full((b,), shape.length, dtype=torch.int32, device=device)
    partial = [torch.empty(b, hq, segments, *more, device=device) for more in ((d,), (), ())]
    split = {
        "seq_threshold_3D": b,
        "num_par_softmax_segments": segments,
        **dict(zip(("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum"), partial, strict=True)),
    }
    nothing = dict.fromkeys(("sinks", "alibi_slopes", "qq_bias", "output_scale", "mm_prefix_range"))

    def runner(more: dict[str, Any]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            module.unified_attention_int4(
                q, *caches, out, cu_seqlens_q=starts, max_seqlen_q=1, seqused_k=lengths, max_seqlen_k=shape.length,
                softmax_scale=shape.scale, window_size=(-1, -1), block_table=table, softcap=0.0, use_alibi_sqrt=False,
                k_scale_cache=steps[0], v_scale_cache=steps[1], **nothing, **more,
            )  # fmt: skip
            return out

        return run

    def values(i: int) -> tuple[Tensor, Tensor, Tensor]:
        k, v = (decode(c[table[i]], s[table[i]]) for c, s in zip(caches, steps, strict=True))
        # K . RHT(q) / D = (RHT^-1 K) . q with RHT x = H (signs * x), and its inverse = signs * H x / D.
        signs = module._get_rht_signs(d, 0, torch.device(device)).float()
        k, v = (x @ hadamard(d, device) * signs / d for x in (k, v))
        return q[i], k, v

    def decode(cache: Tensor, step: Tensor) -> Tensor:
        cache, step = cache.flatten(0, 1)[: shape.length], step.flatten(0, 1)[: shape.length]
        codes = torch.stack((cache & 15, cache >> 4), -1).flatten(-2).float()
        whole = step.contiguous().view(torch.int32)
        return (codes - (whole & 15)[..., None]) * (whole & -16).view(torch.float32)[..., None]

    nbytes = shape.tokens * 2 * h * (d // 2 + 4)
    return [Call(runner(more), values, nbytes) for more in ({}, split)]


def _vllm_stubs() -> dict[str, dict[str, Any]]:
    import triton
    import triton.language as tl

    answers: dict[str, Any] = dict.fromkeys(("is_rocm", "is_xpu"), lambda: False)
    answers |= dict.fromkeys(("is_cuda", "is_cuda_alike", "has_device_capability"), lambda *_: True)
    answers |= {"fp8_dtype": lambda: torch.float8_e4m3fn, "is_device_capability_family": lambda _: False}
    KVQuantMode = enum.IntEnum(
        "KVQuantMode",
        {
            "NONE": 0,
            "FP8_PER_TENSOR": 1,
            "INT8_PER_TOKEN_HEAD": 2,
            "FP8_PER_TOKEN_HEAD": 3,
            "INT4_PER_TOKEN_HEAD": 4,
        },
    )
    return {
        "vllm.platforms": {"current_platform": SimpleNamespace(**answers)},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": KVQuantMode},
    }


# ---- LMDeploy: two 4-bit values a byte, (scale, zero) for each token and head


def prepare_lmdeploy(module: Any, shape: Shape, device: str) -> list[Call]:
    """The first half of the dims in low nibbles; x = (code - zero) * scale."""
    page, half = 64, torch.float16
    b, hq, h, d = shape.batch, shape.num_heads, shape.num_kv_heads, shape.head_dim
    table = page_table(shape, page, device)
    caches = [_codes(table.numel(), page, h, d // 2, device=device) for _ in "kv"]
    metas = []
    for _ in "kv":
        step = _scales(table.numel(), page, h, device=device, dtype=half, bits=4)
        metas.append(torch.stack((step, 5 + 5 * torch.rand_like(step)), -1))
    q = torch.randn(b, hq, d, device=device).to(half)
    lengths = torch.full((b,), shape.length, dtype=torch.int32, device=device)
    policy = module.QuantPolicy.INT4

    def run() -> Tensor:
        out: Tensor = module.flash_attn_with_kvcache(
            q, *caches, lengths, table, max_seqlen_q=1, softmax_scale=shape.scale, k_scales_zeros=metas[0],
            v_scales_zeros=metas[1], quant_policy=policy,
        )  # fmt: skip
        return out

    def values(i: int) -> tuple[Tensor, Tensor, Tensor]:
        k, v = (decode(c[table[i]], m[table[i]]) for c, m in zip(caches, metas, strict=True))
        return q[i], k, v

    def decode(cache: Tensor, meta: Tensor) -> Tensor:
        cache, meta = cache.flatten(0, 1)[: shape.length], meta.flatten(0, 1)[: shape.length].float()
        codes = torch.cat((cache & 15, cache >> 4), -1).float()
        return (codes - meta[..., 1:]) * meta[..., :1]

    return [Call(run, values, shape.tokens * 2 * h * (d // 2 + 4))]


def _lmdeploy_stubs() -> dict[str, dict[str, Any]]:
    QuantPolicy = enum.IntEnum(
        "QuantPolicy", {"NONE": 0, "INT4": 4, "INT8": 8, "FP8": 16, "FP8_E5M2": 17, "TURBO_QUANT": 42}
    )
    return {
        "lmdeploy.messages": {"QuantPolicy": QuantPolicy},
        "lmdeploy.utils": {"get_logger": logging.getLogger},
    }


# ---- OSCAR (SGLang): four 2-bit values a byte, float32 (scale, zero) for each token and head


def prepare_oscar(module: Any, shape: Shape, device: str) -> list[Call]:
    """Quarters of the dims in the four crumbs of a byte; x = (code - zero) * scale. Tokens are found one by one."""
    b, hq, h, d = shape.batch, shape.num_heads, shape.num_kv_heads, shape.head_dim
    where = page_table(shape, 128, device)[..., None] * 128 + torch.arange(128, device=device)
    where = where.flatten(1)[:, : shape.length].contiguous()  # [B, L]: runs of 128 tokens in random order
    num_rows = -(-shape.length // 128) * 128 * b
    caches = [_codes(num_rows, h, d // 4, device=device) for _ in "kv"]
    metas = []
    for _ in "kv":
        step = _scales(num_rows, h, device=device, dtype=torch.float32, bits=2)
        metas.append(torch.stack((step, 3 * torch.rand_like(step)), -1))
    q = torch.randn(b, hq, d, device=device).bfloat16()
    out = torch.empty_like(q)
    starts = torch.arange(b + 1, dtype=torch.int32, device=device) * shape.length

    def runner(splits: int) -> Callable[[], Tensor]:
        logits = torch.empty(b, hq, splits, d, device=device)
        lse = torch.empty(b, hq, splits, device=device)
        counts = torch.full((b,), splits, dtype=torch.int32, device=device)

        def run() -> Tensor:
            module.decode_attention_fwd_quantized(
                q, *caches, *metas, out, starts, where.flatten(), logits, lse, counts, splits, shape.scale, "int2"
            )
            return out

        return run

    def values(i: int) -> tuple[Tensor, Tensor, Tensor]:
        k, v = (decode(c[where[i]], m[where[i]]) for c, m in zip(caches, metas, strict=True))
        return q[i], k, v

    def decode(cache: Tensor, meta: Tensor) -> Tensor:
        codes = torch.cat([(cache >> shift) & 3 for shift in (0, 2, 4, 6)], -1).float()
        return (codes - meta[..., 1:]) * meta[..., :1]

    nbytes = shape.tokens * 2 * h * (d // 4 + 8)
    return [Call(runner(splits), values, nbytes) for splits in (1, 4, 8, 32)]


def _oscar_stubs() -> dict[str, dict[str, Any]]:
    return {"sglang.srt.utils": {"is_hip": lambda: False}, "sglang.srt.environ": {"envs": SimpleNamespace()}}


def _none() -> dict[str, dict[str, Any]]:
    return {}


def _exllamav3(bits: int) -> PeerKernel:
    def prepare(module: Any, shape: Shape, device: str) -> list[Call]:
        return prepare_exllamav3(bits, module, shape, device)

    return PeerKernel(f"exllamav3, {bits} bits", bits, "exllamav3.modules.attention_fn.triton_paged", _none, prepare)


KERNELS = (
    _exllamav3(8),
    _exllamav3(4),
    PeerKernel("vLLM int4", 4, "vllm.v1.attention.ops.int4_per_token_head", _vllm_stubs, prepare_vllm),
    PeerKernel("LMDeploy int4", 4, "lmdeploy.pytorch.kernels.cuda.pagedattention", _lmdeploy_stubs, prepare_lmdeploy),
    _exllamav3(2),
    PeerKernel("OSCAR int2", 2, "oscar.decode_attention", _oscar_stubs, prepare_oscar),
)
