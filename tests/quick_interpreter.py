"""Triton's interpreter, made several times faster: most of its time goes into its own bookkeeping, not into the values.

Nothing here changes what a kernel computes.
"""

from dataclasses import replace
from typing import Any, NamedTuple


def quicken() -> None:
    """Before the first kernel runs, where TRITON_INTERPRET is set."""
    patch_the_language_once()
    look_up_dtypes_once()
    derive_shapes_once()
    check_overflow(False)


def patch_the_language_once() -> None:
    """Jit functions that call each other.

    It patches `triton.language` for each such call anew, 1 ms each, and wraps what it has wrapped before. The launch has
    done that already; what a launch does not patch (`triton.language.core`) stays patched after the first time.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    call_and_patch = InterpretedFunction.__call__
    patched = {tl}  # by the launch

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        modules = self.__dict__.get("languages")
        if modules is None:
            known = (tl, tl.core)
            modules = self.languages = {
                value for value in self.fn.__globals__.values() if any(value is m for m in known)
            }
        if modules <= patched:
            return self.rewrite()(*args, **kwargs)
        patched.update(modules)
        return call_and_patch(self, *args, **kwargs)

    InterpretedFunction.__call__ = call


def look_up_dtypes_once() -> None:
    """It asks for the NumPy dtype of every value, and makes the table of all for it each time."""
    from triton.runtime import interpreter

    derive = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def get(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = derive(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = get


class _Shape(NamedTuple):
    """What every type of blocks of one shape, and every value of such a type, is given."""

    of_type: Any  # a tuple of int
    of_value: Any  # a tuple of constexpr
    numel: int
    numel_of_value: Any
    text: str


def derive_shapes_once() -> None:
    """Of every value, and of its type, the shape was unwrapped, checked and wrapped anew: a third of the time.

    What has the same shape shares it then, so that whether two values need broadcasting is seen at once.
    """
    import triton.language as tl
    from triton.language.semantic import TritonSemantic

    core: Any = tl.core
    make_type, broadcast = core.block_type.__init__, TritonSemantic.broadcast_impl_value
    known: dict[tuple[int, ...], _Shape] = {}
    no_shape, one = core.tuple([]), core.constexpr(1)

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        found = known.get(key)
        if found is None:
            make_type(self, element_ty, shape)  # with its checks
            sizes = core.tuple([core.constexpr(size) for size in key])
            known[key] = _Shape(self.shape, sizes, self.numel, core.constexpr(self.numel), str(self.shape))
            return
        self.element_ty, self.shape, self.numel = element_ty, found.of_type, found.numel
        self.name = f"<{found.text}, {element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if type.is_block():
            found = known[tuple(type.shape.values)]
            self.shape, self.numel = found.of_value, found.numel_of_value
        else:
            self.shape, self.numel = no_shape, one

    def broadcast_unlike(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape is right.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
    TritonSemantic.broadcast_impl_value = broadcast_unlike


def check_overflow(on: bool) -> None:
    """Whether every sum, difference and product of integers is worked out again in 64 bits, and fails where fewer are not enough.

    As the interpreter comes, it does the work, a third of its time, and says nothing.
    """
    from triton.runtime.interpreter import interpreter_builder

    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=on, debug=on)
