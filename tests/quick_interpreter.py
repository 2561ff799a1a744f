"""Triton's interpreter, made several times faster: most of its time goes into its own bookkeeping, not into the values.

Nothing here changes what a kernel computes, but for numbers that become bfloat16: they are rounded, as on a GPU.
"""

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple


def quicken() -> None:
    """Before the first kernel runs, where TRITON_INTERPRET is set."""
    call_builtins_directly()
    look_up_dtypes_once()
    derive_shapes_once()
    make_handles_directly()
    see_equal_types()
    pass_equal_operands()
    convert_directly()
    round_to_bfloat16()
    say_nothing_of_values()
    patch_the_language_once()
    check_overflow(False)


def patch_the_language_once() -> None:
    """Each launch patched `triton.language`, 1 ms, and put it back; each call of one jit function by another patched it once more."""
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))  # as of any kernel
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()  # nothing to put back
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)


def call_builtins_directly() -> None:
    """Each went through three functions that pass on its arguments, two of which look for `_semantic` among them."""
    from triton.runtime import interpreter

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        scope.set_attr(obj, name, make(member))

    def make(member: Any) -> Any:
        function, semantic = inspect.unwrap(member), interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return calculate_directly(function, call)

    interpreter._patch_attr = patch


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

    What has the same shape shares it then, so that whether two values need broadcasting is seen at once. A scalar beside a block is
    spread over its shape without a detour through the types of an IR.
    """
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

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
        if left.is_block() != right.is_block():
            return (lhs, spread(rhs, left)) if left.is_block() else (spread(lhs, right), rhs)
        if not left.is_block() or left.shape is right.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def spread(scalar: Any, block: Any) -> Any:
        data = scalar.handle.data.astype(interpreter._get_np_dtype(scalar.dtype), copy=False).repeat(block.numel)
        shape = block.shape.values
        handle = interpreter.TensorHandle(data if len(shape) == 1 else data.reshape(shape), scalar.dtype)
        return core.tensor(handle, block.with_element_ty(scalar.dtype))

    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
    TritonSemantic.broadcast_impl_value = broadcast_unlike


def make_handles_directly() -> None:
    """A handle was made by a dataclass, which then asked for the class and the width of its dtype: by name, here."""
    from triton.language import core
    from triton.runtime import interpreter

    most: dict[str, int] = {}  # bytes of an element

    def fits(data: Any, dtype: Any) -> bool:
        if dtype.name not in most:
            pointer = isinstance(dtype, core.pointer_type)
            most[dtype.name] = 8 if pointer else max(8, dtype.primitive_bitwidth) // 8
        return data.itemsize <= most[dtype.name]

    def handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if not fits(data, dtype):
            self.__post_init__()  # which says so

    interpreter._validate_np_data_size = fits
    interpreter.TensorHandle.__init__ = handle


def see_equal_types() -> None:
    """Types that are the same object are equal, which was found out by their names; and a type with other elements is made once."""
    from triton.language import core

    def quick(equal: Any) -> Any:
        return lambda self, other: self is other or equal(self, other)

    for kind in (core.dtype, core.pointer_type, core.block_type):
        kind.__eq__ = quick(kind.__eq__)

    known: dict[tuple[int, str, int], Any] = {}

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        # `derive_shapes_once` keeps one for each shape; a pointer's name does not tell its address space.
        key = id(self.shape), scalar_ty.name, getattr(scalar_ty, "address_space", 0)
        if key not in known:
            known[key] = core.block_type(scalar_ty, self.shape)
        return known[key]

    core.block_type.with_element_ty = with_element_ty


PLAIN = frozenset(
    ["int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "fp16", "bf16", "fp32", "fp64"]
)  # names of dtypes
OFFSETS = frozenset(["int32", "int64"])
NUMBERS = (int, float, bool)
MOST_CONSTANTS = 10_000


def pass_equal_operands() -> None:
    """Operands of one dtype need no conversion, those of two become one that is known from the first such pair, and a number beside
    a value becomes the same constant each time."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    convert, tensor = TritonSemantic.binary_op_type_checking_impl, core.tensor
    unwrap, values = core._unwrap_if_constexpr, {tensor, *NUMBERS}
    constants: dict[Any, Any] = {}  # None: the value beside the number is converted too
    common: dict[Any, Any] = {}  # dtypes that two become

    def operands(self: Any, lhs: Any, rhs: Any, *more: bool, **named: bool) -> tuple[Any, Any]:
        """more: whether lhs and rhs may be pointers, whether operands are converted at all, and whether to divide."""
        if named:
            return convert(self, lhs, rhs, *more, **named)
        left, right = type(lhs), type(rhs)
        if left is tensor and lhs.dtype.name in PLAIN:
            if right is tensor and rhs.dtype.name == lhs.dtype.name and len(more) < 3:
                return self.broadcast_impl_value(lhs, rhs)
            if right is tensor and rhs.dtype.name in PLAIN:
                return made_alike(self, lhs, rhs, more)
            if right in NUMBERS:
                constant = beside(self, lhs, rhs, more)
                return convert(self, lhs, rhs, *more) if constant is None else (lhs, constant)
        elif left is right is tensor and more[:1] == (True,) and lhs.dtype.is_ptr() and rhs.dtype.name in OFFSETS:
            return self.broadcast_impl_value(lhs, rhs)
        elif left in NUMBERS and right is tensor and rhs.dtype.name in PLAIN:
            constant = beside(self, rhs, lhs, more)
            if constant is not None:
                return constant, rhs
        return convert(self, lhs, rhs, *more)

    def made_alike(self: Any, lhs: Any, rhs: Any, more: tuple[bool, ...]) -> tuple[Any, Any]:
        key = lhs.dtype.name, rhs.dtype.name, more
        if more[2:3] == (False,):  # not to be converted
            return convert(self, lhs, rhs, *more)
        if key not in common:
            alike = convert(self, lhs, rhs, *more)
            common[key] = alike[0].dtype
            return alike
        return self.broadcast_impl_value(self.cast(lhs, common[key]), self.cast(rhs, common[key]))

    def beside(self: Any, value: Any, number: Any, more: tuple[bool, ...]) -> Any:
        shape = id(value.type.shape) if value.type.is_block() else None
        key = type(number), repr(number), value.dtype.name, shape, more  # 0.0 is equal to -0.0, and NaN not to itself
        if key not in constants:
            if len(constants) == MOST_CONSTANTS:
                constants.clear()
            same, constant = convert(self, value, number, *more)
            constant.handle.data.setflags(write=False)
            constants[key] = constant if same is value else None
        return constants[key]

    TritonSemantic.binary_op_type_checking_impl = operands
    core._unwrap_if_constexpr = lambda value: value if type(value) in values else unwrap(value)


def maker() -> Any:
    """Of a value with the shape of another: what its constructor and its handle's would look up is known."""
    from triton.language import core
    from triton.runtime import interpreter

    tensor, handle, new = core.tensor, interpreter.TensorHandle, object.__new__

    def make(data: Any, dtype: Any, type: Any, like: Any) -> Any:
        value, inner = new(tensor), new(handle)
        inner.data, inner.dtype, inner.attr = data, dtype, {}
        value.handle, value.type, value.dtype, value.shape, value.numel = inner, type, dtype, like.shape, like.numel
        return value

    return make


CALCULATED = {"fp32", "fp64", "int32", "int64", "uint32", "uint64"}  # dtypes that NumPy has, too
SUMMED = set(CALCULATED)  # whose sums, differences and products are NumPy's: see `check_overflow`
BITS = {"int1", "int32", "int64", "uint32", "uint64"}


def calculate_directly(function: Any, call: Any) -> Any:
    """`call`, which does the work of a builtin of Triton, or what does the same where that is one step of NumPy: where both operands
    have one shape, or one is a scalar or a number."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import interpreter_semantic

    tensor, constexpr, boolean, make = tl.core.tensor, tl.core.constexpr, tl.int1, maker()
    if function is inspect.unwrap(tl.core.where):
        return choose_directly(call)
    if function is not inspect.unwrap(vars(tensor).get(function.__name__, call)):
        return call
    name = function.__name__.strip("_")
    arithmetic = {"add": np.add, "radd": np.add, "sub": np.subtract, "mul": np.multiply, "rmul": np.multiply}
    bitwise = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    comparisons = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
    comparisons |= {"eq": np.equal, "ne": np.not_equal}
    step = (arithmetic | bitwise | comparisons).get(name)
    if step is None:
        return call
    compares = name in comparisons
    dtypes = CALCULATED if compares else BITS if name in bitwise else SUMMED
    cast, promote = interpreter_semantic.cast, interpreter_semantic.computation_type_impl
    common_dtypes: dict[tuple[str, str], Any] = {}

    def promoted(left: Any, right: Any) -> Any:
        key = left.name, right.name
        if key not in common_dtypes:
            common_dtypes[key] = promote(left, False, right, False, False)
        return common_dtypes[key]

    def calculate(self: Any, other: Any) -> Any:
        if isinstance(other, constexpr):
            other = other.value
        dtype, kind, like = self.dtype, type(other), self
        if dtype.name not in dtypes:
            return add_offset(self, other) if step is np.add else call(self, other)
        of_both = self.type
        if kind is tensor:
            if other.dtype.name != dtype.name:
                if other.dtype.name not in dtypes or dtype.name == "int1" or other.dtype.name == "int1":
                    return call(self, other)
                common = promoted(dtype, other.dtype)
                return calculate(cast(self, common), cast(other, common))
            if other.shape is not self.shape:
                if not of_both.is_block():
                    of_both, like = other.type, other
                elif other.type.is_block():
                    return call(self, other)
            data = step(self.handle.data, other.handle.data)
        elif (kind is int and lowest.get(dtype.name, 2**31) <= other < 2**31) or (
            kind is float and dtype.name == "fp32"
        ):
            data = step(self.handle.data, other)
        else:
            return call(self, other)
        if compares:
            return make(data, boolean, of_both.with_element_ty(boolean), like)
        return make(data, dtype, of_both, like)

    def add_offset(self: Any, offset: Any) -> Any:
        """A pointer, or pointers, and how many elements behind it."""
        pointer, of_both, like = self.dtype, self.type, self
        if not isinstance(pointer, tl.core.pointer_type):
            return call(self, offset)
        size = max(8, pointer.element_ty.primitive_bitwidth) // 8
        if type(offset) is int and -(2**31) <= offset < 2**31:
            behind = np.uint64(size * offset % 2**64)
        elif type(offset) is tensor and offset.dtype.name in OFFSETS:
            if offset.shape is not self.shape:
                if not of_both.is_block():
                    of_both, like = offset.type.with_element_ty(pointer), offset
                elif offset.type.is_block():
                    return call(self, offset)
            behind = offset.handle.data.astype(np.uint64) * np.uint64(size)
        else:
            return call(self, offset)
        return make(self.handle.data + behind, self.handle.dtype, of_both, like)

    # Beside these dtypes, numbers from here on become the same constant in Triton and in NumPy.
    lowest = {"fp32": -(2**31), "int32": -(2**31), "int64": -(2**31), "uint32": 0, "uint64": 0}
    return calculate


def choose_directly(call: Any) -> Any:
    """`tl.where` for blocks, or a block and a scalar or a number, of one dtype."""
    import numpy as np
    import triton.language as tl

    tensor, make = tl.core.tensor, maker()

    def where(condition: Any, x: Any, y: Any, **kwargs: Any) -> Any:
        whole = x if type(x) is tensor and x.type.is_block() else y
        if type(whole) is not tensor or type(condition) is not tensor or condition.dtype.name != "int1":
            return call(condition, x, y, **kwargs)
        dtype, shape = whole.dtype, whole.shape
        if dtype.name not in CALCULATED or (condition.type.is_block() and condition.shape is not shape):
            return call(condition, x, y, **kwargs)
        chosen = []
        for value in (x, y):
            if type(value) is tensor:
                if value.dtype.name != dtype.name or (value.type.is_block() and value.shape is not shape):
                    return call(condition, x, y, **kwargs)
                chosen.append(value.handle.data)
            elif type(value) is float and dtype.name == "fp32":
                chosen.append(np.float32(value))
            else:
                return call(condition, x, y, **kwargs)
        return make(np.where(condition.handle.data, *chosen), dtype, whole.type, whole)

    return where


def convert_directly() -> None:
    """Between dtypes that NumPy has, too, and from truth values; and between float32 and bfloat16."""
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    convert, make = TritonSemantic.cast, maker()
    sources, shifted = {"int1", *CALCULATED}, {"bf16", "fp32"}

    def cast(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        source, target = input.dtype, dst_ty.scalar
        if source is target:
            return input
        if fp_downcast_rounding is None and {source.name, target.name} == shifted:
            data = interpreter._convert_float(input.handle.data, source, target, None)
            data = data.view(interpreter._get_np_dtype(target))
        elif fp_downcast_rounding is not None or source.name not in sources or target.name not in CALCULATED:
            return convert(self, input, dst_ty, fp_downcast_rounding)
        elif source.name == target.name:
            return input
        else:
            data = input.handle.data.astype(interpreter._get_np_dtype(target))
        return make(data, target, input.type.with_element_ty(target), input)

    TritonSemantic.cast = cast


def round_to_bfloat16() -> None:
    """To the nearest number, of two the even one, and subnormal ones too, as GPUs do: the interpreter cuts off."""
    import numpy as np
    from triton.runtime import interpreter

    convert, names, upper = interpreter._convert_float, {"bf16", "fp32"}, np.uint32(16)  # bits of a float32

    def convert_float(input: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
        if rounding_mode is not None or {input_dtype.name, output_dtype.name} != names:
            return convert(input, input_dtype, output_dtype, rounding_mode)
        if input_dtype.name == "bf16":
            return np.ascontiguousarray(input).view(np.uint16).astype(np.uint32) << upper
        bits = np.ascontiguousarray(input).view(np.uint32)
        high = bits >> upper
        rounded = bits + (np.uint32(0x7FFF) + (high & np.uint32(1))) >> upper
        is_nan = bits & np.uint32(0x7FFF_FFFF) > np.uint32(0x7F80_0000)
        return np.where(is_nan, high | np.uint32(0x40), rounded).astype(np.uint16)

    interpreter._convert_float = convert_float


def say_nothing_of_values() -> None:
    """Of infinities subtracted and the like NumPy would warn; a GPU does not."""
    import numpy as np
    from triton.runtime.interpreter import GridExecutor

    GridExecutor.__call__ = np.errstate(all="ignore")(GridExecutor.__call__)


def check_overflow(on: bool) -> None:
    """Whether every sum, difference and product of integers is worked out again in 64 bits, and fails where fewer are not enough.

    As the interpreter comes, it does the work, a third of its time, and says nothing.
    """
    from triton.runtime.interpreter import interpreter_builder

    SUMMED.clear()
    SUMMED.update(["fp32", "fp64"] if on else CALCULATED)
    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=on, debug=on)
