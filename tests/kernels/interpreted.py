"""Kernel cases under Triton's interpreter, in a process of their own: Triton reads TRITON_INTERPRET when imported."""

from __future__ import annotations

import functools
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_cases(path: Path | str, *, slow: bool = False) -> dict[str, float]:
    """The figures that the module of cases at ``path`` reports, by case; those of its slow ones if asked."""
    module = ".".join(Path(path).resolve().relative_to(ROOT).with_suffix("").parts)
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        print(json.dumps([module, str(output), str(errors), *["slow"] * slow]), file=server.stdin, flush=True)
        answered, _, _ = select.select([server.stdout], [], [], 600)
        assert answered, f"{module} takes longer than ten minutes"
        assert server.stdout.readline() == "0\n", errors.read_text()[-4000:]
        figures: dict[str, float] = json.loads(output.read_text())
    return figures


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Ends with this process, which closes its pipe."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"{__package__}.interpreter_server"]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def report(cases: dict[str, Callable[[], float]], slow: dict[str, Callable[[], float]] | None = None) -> None:
    """Child side: runs every case, or every slow one, and prints its figure; a case that raises reports the error."""
    from .quick_types import use_quick_types

    _use_true_bf16()
    _use_true_fma()
    _use_true_float8()
    _use_true_index()
    _use_less_time()
    use_quick_types()
    figures: dict[str, Any] = {}
    for name, case in (slow or {} if sys.argv[1:] == ["slow"] else cases).items():
        try:
            figures[name] = case()
        except Exception as error:
            figures[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(figures))


def _use_true_fma() -> None:
    """Gives the interpreter fused multiply-add; older ones round product and sum. In float64 the product is exact."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        assert x.data.dtype == np.float32
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return TensorHandle(exact.astype(np.float32), x.dtype.scalar)

    InterpreterBuilder.create_fma = create_fma


def _use_true_bf16() -> None:
    """Gives the interpreter bf16 as on a GPU; its own keeps the bits, multiplies them in a dot, and truncates."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain_dot, plain_cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def value(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        """Sums in float64: a BLAS may add equal columns in different orders, in which float32 would tell them apart."""
        a, b = value(a), value(b)
        if not np.issubdtype(d.data.dtype, np.floating):
            return plain_dot(self, a, b, d, *rest)
        sums = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return TensorHandle(sums.astype(d.data.dtype), d.dtype.scalar)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) == (tl.bfloat16, tl.float32):
            return value(src)
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return plain_cast(self, src, dst_type)
        bits = np.ascontiguousarray(src.data).view(np.uint32)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return TensorHandle(nearest.astype(np.uint16), tl.bfloat16)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl


def _use_true_float8() -> None:
    """Gives the interpreter 8-bit floats as on a GPU; its own forget to carry where a mantissa is rounded up."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, *rest: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.float8e4nv):
            return plain(self, src, dst_type, *rest)
        codes = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.float8_e4m3fn).view(torch.uint8)
        return TensorHandle(codes.numpy(), tl.float8e4nv)

    plain_dot = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain_dot(self, value(a), value(b), *rest)

    def value(x: Any) -> Any:
        if x.dtype.scalar != tl.float8e4nv:
            return x
        codes = torch.from_numpy(np.ascontiguousarray(x.data).view(np.uint8)).view(torch.float8_e4m3fn)
        return TensorHandle(codes.float().numpy(), tl.float32)

    InterpreterBuilder.create_fp_to_fp, InterpreterBuilder.create_dot = create_fp_to_fp, create_dot


def _use_true_index() -> None:
    """Gives the interpreter loop bounds of one element; those of Triton 3.6 are arrays, which numpy 2.5 refuses."""
    from triton.runtime import interpreter

    plain_patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        plain_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor


def _use_less_time() -> None:
    """Takes out work that the interpreter repeats at each operation; the figures stay the same."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch_lang, scope = interpreter._patch_lang, interpreter._LangPatchScope()
    patched = set[str]()

    def patch_once(function: Any) -> Any:
        """Patches the language for each module that sees it, not at each call, and leaves it so between launches."""
        if function.__module__ not in patched:
            patch_lang(function)
            patched.add(function.__module__)
        return scope

    plain_dtype, known_dtype = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)

    def np_dtype(dtype: Any) -> Any:
        is_pointer = isinstance(dtype.scalar, tl.pointer_type)  # not hashable
        return plain_dtype(dtype) if is_pointer else known_dtype(dtype.scalar)

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, np_dtype
    # Integers wrap, as on a GPU: where they should not, the result differs from the reference.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
