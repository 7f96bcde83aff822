"""cuBLASLt asked for one of its kernels by name; it is the library behind torch's matrix products.

Torch takes the kernel that the library's heuristic puts first. The library has more of them, and says which would do;
``tune.py`` tries. Constants and layouts are those of ``cublasLt.h``.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from ctypes import Structure, byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

DATA_TYPES = {torch.bfloat16: 14, torch.float16: 2}  # CUDA_R_16BF, CUDA_R_16F
FLOAT32 = 0  # CUDA_R_32F
COMPUTE_FLOAT32 = 68  # CUBLAS_COMPUTE_32F
TRANSPOSE_A, TRANSPOSE = 3, 1  # CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T
MAX_WORKSPACE = 1  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
WORKSPACE_NBYTES = 32 * 2**20  # what torch gives the library on Hopper
ALIGNMENT = 256  # of addresses, in bytes: what the library assumes when it proposes kernels
MAX_PROPOSALS = 32
ONE, ZERO = c_float(1), c_float(0)


class Algorithm(Structure):
    """``cublasLtMatmulAlgo_t``: a kernel and its settings, opaque."""

    _fields_ = [("data", c_uint64 * 8)]


class Proposal(Structure):
    """``cublasLtMatmulHeuristicResult_t``."""

    _fields_ = [
        ("algorithm", Algorithm),
        ("workspace_nbytes", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class CublasLt:
    """The library on one device, for ``x @ weight.T`` of weights [O, I]. Raises ``OSError`` where torch has none."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self._data_type = device, DATA_TYPES[dtype]
        self._library = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}")
        self._handle, self._operation = c_void_p(), c_void_p()
        with torch.cuda.device(device):
            self._call("Create", byref(self._handle))
        self._call("MatmulDescCreate", byref(self._operation), COMPUTE_FLOAT32, FLOAT32)
        self._call("MatmulDescSetAttribute", self._operation, TRANSPOSE_A, byref(c_int(TRANSPOSE)), c_size_t(4))

    def products(self, weight: Tensor, num_rows: int, nearby: tuple[int, ...]) -> Iterator[Product]:
        """What the library proposes for x of ``num_rows`` rows, and what it proposes for row counts ``nearby``.

        Raises ``OSError`` if it fails.
        """
        layouts = Layouts(self, weight, num_rows)
        met = set()
        for rows in (num_rows, *nearby):
            for proposal in self._proposals(layouts if rows == num_rows else Layouts(self, weight, rows)):
                name = bytes(proposal.algorithm)
                if name not in met and self._suits(layouts, proposal):
                    met.add(name)
                    yield Product(self, layouts, proposal)

    def layout(self, num_columns: int, num_rows: int) -> c_void_p:
        """Of a row-major matrix, which the library sees as its transpose."""
        found = c_void_p()
        columns, rows = c_uint64(num_columns), c_uint64(num_rows)
        self._call("MatrixLayoutCreate", byref(found), self._data_type, columns, rows, c_int64(num_columns))
        return found

    def drop_layout(self, layout: c_void_p) -> None:
        self._library.cublasLtMatrixLayoutDestroy(layout)

    def multiply(self, product: Product, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Enqueues ``out = x @ weight.T``."""
        layouts, proposal = product.layouts, product.proposal
        workspace = torch.empty(proposal.workspace_nbytes, dtype=torch.uint8, device=self.device)
        a, b, c = c_void_p(weight.data_ptr()), c_void_p(x.data_ptr()), c_void_p(out.data_ptr())
        with torch.cuda.device(self.device):
            self._call(
                "Matmul", self._handle, self._operation,
                byref(ONE), a, layouts.weight, b, layouts.x, byref(ZERO), c, layouts.out, c, layouts.out,
                byref(proposal.algorithm), c_void_p(workspace.data_ptr()), c_size_t(workspace.nbytes),
                c_void_p(torch.cuda.current_stream(self.device).cuda_stream),
            )  # fmt: skip

    def _proposals(self, layouts: Layouts) -> list[Proposal]:
        preference, number = c_void_p(), c_int()
        found = (Proposal * MAX_PROPOSALS)()
        self._call("MatmulPreferenceCreate", byref(preference))
        try:
            limit = byref(c_uint64(WORKSPACE_NBYTES))
            self._call("MatmulPreferenceSetAttribute", preference, MAX_WORKSPACE, limit, c_size_t(8))
            self._call(
                "MatmulAlgoGetHeuristic", self._handle, self._operation,
                layouts.weight, layouts.x, layouts.out, layouts.out,
                preference, MAX_PROPOSALS, found, byref(number),
            )  # fmt: skip
        finally:
            self._library.cublasLtMatmulPreferenceDestroy(preference)
        return [proposal for proposal in found[: number.value] if not proposal.status]

    def _suits(self, layouts: Layouts, proposal: Proposal) -> bool:
        """Whether a kernel proposed for other row counts can be used; notes the workspace that it needs then."""
        found = Proposal()
        status = self._library.cublasLtMatmulAlgoCheck(
            self._handle, self._operation, layouts.weight, layouts.x, layouts.out, layouts.out,
            byref(proposal.algorithm), byref(found),
        )  # fmt: skip
        proposal.workspace_nbytes = found.workspace_nbytes
        return not status and found.workspace_nbytes <= WORKSPACE_NBYTES

    def _call(self, name: str, *args: object) -> None:
        function = getattr(self._library, f"cublasLt{name}")
        status = function(*args)
        if status:
            raise OSError(f"cublasLt{name} failed with status {status}")


class Layouts:
    """How x [M, I], weight [O, I] and out [M, O] lie in memory, in the library's terms."""

    def __init__(self, library: CublasLt, weight: Tensor, num_rows: int):
        num_out, num_in = weight.shape
        self.weight = library.layout(num_in, num_out)
        self.x = library.layout(num_in, num_rows)
        self.out = library.layout(num_out, num_rows)
        for layout in (self.weight, self.x, self.out):
            weakref.finalize(self, library.drop_layout, layout)


class Product:
    """One of the library's kernels for x of one number of rows."""

    def __init__(self, library: CublasLt, layouts: Layouts, proposal: Proposal):
        self.layouts, self.proposal = layouts, proposal
        self._library = library

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [M, I] @ weight [O, I].T -> [M, O]. Raises ``OSError`` if the library fails."""
        if x.data_ptr() % ALIGNMENT or weight.data_ptr() % ALIGNMENT or not x.is_contiguous():
            return F.linear(x, weight)
        out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
        self._library.multiply(self, x, weight, out)
        return out


@cache
def cublaslt(device: torch.device, dtype: torch.dtype) -> CublasLt | None:
    """The library for 16-bit weights on a GPU; ``None`` where it is not to be had."""
    if device.type != "cuda" or dtype not in DATA_TYPES or torch.version.hip is not None:
        return None
    try:
        return CublasLt(device, dtype)
    except OSError:
        return None
