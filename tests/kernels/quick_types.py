"""Triton's interpreter with less work at each operation: types of blocks made once, sizes compared as plain numbers.

The values are the same, and so are the errors of kernels that do not fit together.
"""

from __future__ import annotations

import builtins
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

BLOCKS: dict[tuple[str, tuple[int, ...]], Any] = {}  # by element type and sizes
SPREAD: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]] = {}  # what two sizes are broadcast to


def use_quick_types() -> None:
    """Puts all of it into Triton, which must not have run a kernel."""
    _make_types_once()
    _describe_tensors_once()
    _broadcast_by_sizes()
    _call_builtins_directly()
    _check_sizes_of_numpy_last()
    _compare_types_by_name()
    _unwrap_by_type()


def _sizes(shape: Any) -> tuple[int, ...]:
    return builtins.tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)


def _make_types_once() -> None:
    """Equal types of blocks are one object, with ``sizes`` as a tuple of Python."""
    kind = tl.core.block_type
    plain_init = kind.__init__

    def new(cls: Any, element_ty: Any, shape: Any) -> Any:
        key = element_ty.name, _sizes(shape)
        if key not in BLOCKS:
            made = object.__new__(cls)
            plain_init(made, element_ty, list(key[1]))  # checks the sizes
            made.sizes = key[1]
            BLOCKS[key] = made
        return BLOCKS[key]

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        return BLOCKS.get((scalar_ty.name, self.sizes)) or kind(scalar_ty, self.sizes)

    tl.core.dtype.sizes = ()
    kind.__new__, kind.__init__ = staticmethod(new), lambda self, element_ty, shape: None
    kind.with_element_ty, kind.to_ir = with_element_ty, lambda self, builder: self


def _compare_types_by_name() -> None:
    """Equal types are mostly one object; what two of them are promoted to follows from their names."""
    plain_eq, plain_promote, known = tl.core.dtype.__eq__, TritonSemantic.computation_type_impl, dict[Any, Any]()

    def promote(self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
        if key not in known:
            known[key] = plain_promote(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return known[key]

    tl.core.dtype.__eq__ = lambda self, other: self is other or plain_eq(self, other)
    TritonSemantic.computation_type_impl = promote


def _unwrap_by_type() -> None:
    plain, never_wrapped = tl.core._unwrap_if_constexpr, (int, bool, tl.tensor, tl.core.dtype, type(None))

    def unwrap(value: Any) -> Any:
        kind = type(value)
        if isinstance(value, builtins.tuple):  # whose fields' names Triton 3.6 loses
            return interpreter._tuple_create(value, [unwrap(part) for part in value])
        return value if kind in never_wrapped else value.value if kind is tl.constexpr else plain(value)

    tl.core._unwrap_if_constexpr = unwrap


def _describe_tensors_once() -> None:
    """The shape and the number of elements of a tensor are those of its type."""
    plain_init = tl.tensor.__init__

    def init(self: Any, handle: Any, type: Any) -> None:
        facts = type.__dict__.get("facts")
        if facts is None:
            plain_init(self, handle, type)
            type.facts = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = facts

    tl.tensor.__init__ = init


def _broadcast_by_sizes() -> None:
    plain = TritonSemantic.broadcast_impl_value

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type.sizes, rhs.type.sizes
        if left == right:
            return lhs, rhs
        if left and right and len(left) != len(right):
            return plain(self, lhs, rhs)
        sizes = SPREAD.get((left, right))
        if sizes is None:
            lhs, rhs = plain(self, lhs, rhs)  # checks that they fit
            SPREAD[left, right] = lhs.type.sizes
            return lhs, rhs
        return _spread(self, lhs, sizes), _spread(self, rhs, sizes)

    TritonSemantic.broadcast_impl_value = broadcast


def _spread(semantic: Any, tensor: Any, sizes: tuple[int, ...]) -> Any:
    if tensor.type.sizes == sizes:
        return tensor
    wide = tl.block_type(tensor.dtype, sizes)
    if tensor.type.sizes:
        return tl.tensor(semantic.builder.create_broadcast(tensor.handle, sizes), wide)
    return tl.tensor(semantic.builder.create_splat(wide, tensor.handle), wide)


def _call_builtins_directly() -> None:
    """Without the wrapper that only checks for the argument which is given here."""
    wrapper = tl.core.builtin(lambda: None).__code__

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        plain = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return plain(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch_attr


def _check_sizes_of_numpy_last() -> None:
    """Whether numpy widened a result is asked where it has more bytes than the type, which is known to have some."""
    plain = interpreter.TensorHandle.__post_init__

    def check(self: Any) -> None:
        if self.data.itemsize * 8 > getattr(self.dtype, "primitive_bitwidth", 64):  # pointers have none
            plain(self)

    interpreter.TensorHandle.__post_init__ = check
