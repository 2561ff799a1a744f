"""PTX, as Triton compiles it for an NVIDIA GPU, translated into a Python function that runs a whole thread block with numpy.

Every register is an array with an element for each thread, and all threads go through the code together, which they may as
branches in what Triton makes are taken by all of a block's threads or by none (checked). Memory is ptx_machine.py's. The
instructions are those that the kernels need; an unknown one is an error. Sources: *PTX ISA*, version 8.7 (NVIDIA).

What is not the hardware's to the last bit: the approximate instructions (`ex2.approx`, `lg2.approx`, `div.full`, ...) are rounded
correctly here, and `fma` is rounded twice, first to float64.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

WARP = 32
TYPES: dict[str, Any] = {
    **{f"{kind}{8 * size}": np.dtype(f"{letter}{size}") for kind, letter in ("su", "iu") and (("s", "i"), ("u", "u"), ("b", "u"))
       for size in (1, 2, 4, 8)},
    "f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8"), "pred": np.dtype("?"),
}  # fmt: skip
REGISTERS = {"p": "pred", "rs": "u16", "r": "u32", "rd": "u64"}


def bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(x: Array) -> Array:
    """Rounded to the nearest, ties to even: uint16."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def flushed(x: Array) -> Array:
    """Subnormal float32 as zero."""
    return np.where(np.abs(x) < np.float32(2**-126), np.copysign(np.float32(0), x), x)


def high(a: Array, b: Array) -> Array:
    """The upper half of a product."""
    wide = np.int64 if a.dtype.kind == "i" else np.uint64
    return (a.astype(wide) * b.astype(wide) >> 32).astype(a.dtype)


def shift_left(a: Array, by: Array) -> Array:
    bits = a.dtype.itemsize * 8
    return np.where(by >= bits, a.dtype.type(0), a << np.minimum(by, bits - 1).astype(a.dtype))


def shift_right(a: Array, by: Array) -> Array:
    bits = a.dtype.itemsize * 8
    shifted = a >> np.minimum(by, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(by >= bits, a.dtype.type(0), shifted)


def bit_field(a: Array, start: Array, length: Array) -> Array:
    bits = a.dtype.itemsize * 8
    up = (bits - start.astype(np.int64) - length.astype(np.int64)).astype(a.dtype)
    return (a << up) >> (bits - length.astype(np.int64)).astype(a.dtype)


def permute(a: Array, b: Array, selector: Array) -> Array:
    """Bytes of the eight of b:a, four bits of the selector for each."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << 32
    out = np.zeros_like(a)
    for byte in range(4):
        chosen = (selector >> (4 * byte)) & 0xF
        value = (both >> ((chosen & 7).astype(np.uint64) * 8) & 0xFF).astype(np.uint32)
        value = np.where(chosen & 8, np.where(value & 0x80, np.uint32(0xFF), np.uint32(0)), value)
        out = out | value << (8 * byte)
    return out


def lut(a: Array, b: Array, c: Array, table: Array) -> Array:
    """lop3: any function of three bits."""
    out = np.zeros_like(a)
    for row in range(8):
        if int(table.flat[0]) >> row & 1:
            out |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return out


def fma(a: Array, b: Array, c: Array) -> Array:
    return (a.astype(np.float64) * b + c).astype(a.dtype)


def popcount(a: Array) -> Array:
    return np.bitwise_count(a).astype(np.uint32)


def divide(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return a / b
    quotient = np.abs(a.astype(np.int64)) // np.maximum(np.abs(b.astype(np.int64)), 1)
    return (quotient * np.sign(a.astype(np.int64)) * np.sign(b.astype(np.int64))).astype(a.dtype)


UNARY: dict[str, Callable[[Array], Array]] = {
    "neg": np.negative, "not": np.invert, "abs": np.abs, "sqrt": np.sqrt, "popc": popcount, "rcp": np.reciprocal,
    "ex2": lambda x: np.exp2(x.astype(np.float64)).astype(x.dtype),
    "lg2": lambda x: np.log2(x.astype(np.float64)).astype(x.dtype),
}  # fmt: skip
BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "div": divide,
    "shl": shift_left, "shr": shift_right,
}  # fmt: skip
COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": lambda a, b: ~unordered(a, b) & (a != b), "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    "equ": lambda a, b: ~((a < b) | (a > b)), "neu": np.not_equal, "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b), "num": lambda a, b: ~unordered(a, b),
    "nan": lambda a, b: unordered(a, b),
}  # fmt: skip


def unordered(a: Array, b: Array) -> Array:
    return (a != a) | (b != b)


def convert(x: Array, to: np.dtype[Any], integer: str) -> Array:
    """`integer`: how a float becomes one, "rzi", "rni", "rmi" or "rpi"; saturating, and 0 for NaN."""
    if x.dtype.kind == "f" and (integer or to.kind != "f"):
        x = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[integer](x)
        if to.kind != "f":
            limits = np.iinfo(to)
            x = np.clip(np.nan_to_num(x.astype(np.float64), nan=0), limits.min, limits.max)
    return x.astype(to)


def shuffle(x: Array, by: Array, mode: str, clamp: int) -> tuple[Array, Array]:
    """shfl.sync over warps of 32, and whether the source was inside."""
    lane = np.arange(x.size) % WARP
    by = np.broadcast_to(by, x.shape).astype(np.int64)
    segment = clamp >> 8 & 31
    low, most = lane & segment, (lane & segment) | (clamp & 31 & ~segment)
    source = {"bfly": lane ^ by, "up": lane - by, "down": lane + by, "idx": low | (by & ~segment & 31)}[mode]
    inside = source >= low if mode == "up" else source <= most
    source = np.where(inside, source, lane)
    return x.reshape(-1, WARP)[np.arange(x.size) // WARP, source], inside


def reduce_warp(x: Array, how: str) -> Array:
    warps = x.reshape(-1, WARP)
    smaller, larger = (np.fmin, np.fmax) if x.dtype.kind == "f" else (np.minimum, np.maximum)
    functions: dict[str, Any] = {"add": np.add, "min": smaller, "max": larger, "and": np.bitwise_and,
                                 "or": np.bitwise_or, "xor": np.bitwise_xor}  # fmt: skip
    return np.repeat(functions[how].reduce(warps, axis=1, dtype=x.dtype), WARP)


def ballot(p: Array) -> Array:
    bits = p.reshape(-1, WARP).astype(np.uint64) << np.arange(WARP, dtype=np.uint64)
    return np.repeat(bits.sum(axis=1, dtype=np.uint64).astype(np.uint32), WARP)


def _kind(register: str) -> str:
    return register.rstrip("0123456789")


class UnknownInstruction(Exception):
    """What the translation does not know."""


@dataclass
class Program:
    """A translated kernel: `run(machine, parameters, special)` runs one thread block of it."""

    name: str
    parameters: list[int]  # bytes of each
    threads: int
    run: Callable[..., list[int]]  # how often each basic block was gone through
    opcodes: list[Counter[str]]  # of each basic block


@dataclass
class _Translation:
    threads: int
    constants: dict[str, Any] = field(default_factory=dict)
    registers: set[str] = field(default_factory=set)

    def constant(self, value: Any) -> str:
        name = f"k{len(self.constants)}"
        self.constants[name] = value
        return name

    def register(self, text: str) -> str:
        name = text.lstrip("%").replace(".", "_")
        self.registers.add(name)
        return name

    def operand(self, text: str, type: str) -> str:
        """An expression for what is read as `type`."""
        dtype = TYPES["u16" if type == "bf16" else "u32" if type.endswith("x2") else type]
        if text.startswith("%"):
            if text.startswith(("%tid", "%ctaid", "%nctaid", "%ntid", "%laneid")):
                return f"special[{text!r}]"
            name = self.register(text)
            held = TYPES[REGISTERS[_kind(name)]]
            if held == dtype:
                return name
            if held.itemsize == dtype.itemsize:
                return f"{name}.view({self.constant(dtype)})"
            return f"{name}.astype({self.constant(np.dtype(f'u{dtype.itemsize}'))}).view({self.constant(dtype)})"
        if text.startswith("global_smem"):
            return self.constant(np.full(self.threads, int(text.partition("+")[2] or 0), dtype))
        if match := re.fullmatch(r"0f([0-9A-Fa-f]{8})", text):
            value = np.array([int(match[1], 16)], np.uint32).view(np.float32 if dtype.kind == "f" else np.uint32)
        elif match := re.fullmatch(r"0x([0-9A-Fa-f]{4})", text) if type == "bf16" else None:
            value = np.array([int(match[1], 16)], np.uint16)
        elif dtype.kind == "?":
            value = np.array([int(text, 0) != 0])
        else:
            value = np.array([int(text.rstrip("U"), 0) & (256**dtype.itemsize - 1)], f"u{dtype.itemsize}").view(dtype)
        return self.constant(np.broadcast_to(value, self.threads))

    def address(self, text: str, shared: bool) -> str:
        base, _, offset = text.strip("[] ").replace(" ", "").partition("+")
        type = "u32" if shared else "u64"
        if base == "global_smem":
            return self.operand(f"global_smem+{int(offset or 0)}", type)
        expression = self.operand(base, type)
        return f"({expression} + {self.operand(offset, type)})" if int(offset or 0) else expression

    def into(self, target: str, expression: str, type: str, guard: str | None) -> str:
        """Assign to a register what `expression` gives as `type`; sign or zero extended."""
        if target == "_":
            return "pass"
        name = self.register(target)
        held = TYPES[REGISTERS[_kind(name)]]
        dtype = TYPES["u16" if type == "bf16" else "u32" if type.endswith("x2") else type]
        if dtype.itemsize != held.itemsize:
            signed = np.dtype(f"{dtype.kind if dtype.kind in 'iu' else 'u'}{held.itemsize}")
            expression = f"({expression}).astype({self.constant(signed)})"
        if dtype != held:
            expression = f"({expression}).view({self.constant(held)})"
        return f"{name} = where({guard}, {expression}, {name})" if guard else f"{name} = {expression}"

    def values(self, text: str) -> list[str]:
        return [part.strip() for part in text.strip("{} ").split(",")]


def _split(text: str) -> list[str]:
    """Operands at commas outside braces and brackets."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)]


def _statement(t: _Translation, text: str, line: int) -> str:
    """One instruction as a Python statement; branches are not among them."""
    guard = None
    if match := re.match(r"@(!?)%p(\d+)\s+", text):
        guard = f"~p{match[2]}" if match[1] else f"p{match[2]}"
        t.registers.add(f"p{match[2]}")
        text = text[match.end() :]
    opcode, _, rest = text.partition(" ")
    operands = _split(rest.strip())
    name, *modifiers = opcode.split(".")
    type = modifiers[-1] if modifiers else ""
    where = repr(line)

    if name in ("ld", "st", "atom", "red"):
        return _memory(t, name, modifiers, operands, guard, where)
    if name == "ldmatrix":
        assert guard is None
        count = int(next(m for m in modifiers if re.fullmatch(r"x\d", m))[1])
        targets = ", ".join(t.register(value) for value in t.values(operands[0]))
        address = t.address(operands[1], True)
        return f"({targets},) = machine.load_matrix({address}, {count}, {'trans' in modifiers}, {where})"
    if name == "stmatrix":
        assert guard is None
        values = ", ".join(t.operand(value, "u32") for value in t.values(operands[1]))
        return f"machine.store_matrix({t.address(operands[0], True)}, ({values},), {'trans' in modifiers}, {where})"
    if name == "bar" or (name == "barrier" and modifiers[0] == "sync"):
        assert guard is None and operands == ["-1" if modifiers[0] == "warp" else "0"], text
        return f"machine.barrier({modifiers[0] == 'warp'})"
    if name == "mov" and "{" in rest:
        if operands[0].startswith("{"):
            parts, bits = t.values(operands[0]), TYPES[type].itemsize * 8
            size = bits // len(parts)
            whole = t.operand(operands[1], f"u{bits}")
            return "; ".join(
                t.into(part, f"({whole} >> {t.constant(TYPES[f'u{bits}'].type(i * size))}).astype({t.constant(TYPES[f'u{size}'])})",
                       f"u{size}", guard)
                for i, part in enumerate(parts)
            )  # fmt: skip
        parts, bits = t.values(operands[1]), TYPES[type].itemsize * 8
        size = bits // len(parts)
        pieces = [
            f"({t.operand(part, f'u{size}')}.astype({t.constant(TYPES[f'u{bits}'])}) << {t.constant(TYPES[f'u{bits}'].type(i * size))})"
            for i, part in enumerate(parts)
        ]
        return t.into(operands[0], " | ".join(pieces), f"u{bits}", guard)
    if name == "mov":
        return t.into(operands[0], t.operand(operands[1], type), type, guard)
    if name == "setp":
        return _compare(t, modifiers, operands, guard)
    if name == "selp":
        a, b = (t.operand(operand, type) for operand in operands[1:3])
        return t.into(operands[0], f"where({t.operand(operands[3], 'pred')}, {a}, {b})", type, guard)
    if name == "cvt":
        return _convert(t, modifiers, operands, guard)
    if name == "shfl":
        target, _, inside = operands[0].partition("|")
        by, clamp = t.operand(operands[2], "u32"), int(operands[3], 0)
        x = t.operand(operands[1], "b32")
        first = f"shuffled = shuffle({x}, {by}, {modifiers[1]!r}, {clamp})"
        done = [first, t.into(target, "shuffled[0]", "b32", guard)]
        return "; ".join(done + ([t.into(inside, "shuffled[1]", "pred", guard)] if inside else []))
    if name == "redux":
        return t.into(operands[0], f"reduce_warp({t.operand(operands[1], type)}, {modifiers[1]!r})", type, guard)
    if name == "vote":
        return t.into(operands[0], f"ballot({t.operand(operands[1], 'pred')})", "b32", guard)

    if type == "f32x2":
        return _packed(t, name, operands, guard, f"line {line}: {text}")
    arguments = [t.operand(operand, type) for operand in operands[1:]]
    if modifiers[-2:] == ["f32", "bf16"]:  # all but the last operand are of the second type
        type = "f32"
        arguments = [f"bfloat16({argument})" for argument in arguments[:-1]] + [t.operand(operands[-1], type)]
    if name in ("shl", "shr"):
        arguments[1] = t.operand(operands[2], "u32")
    if name == "bfe":
        arguments[1:] = [t.operand(operand, "u32") for operand in operands[2:]]
        return t.into(operands[0], f"bit_field({', '.join(arguments)})", type, guard)
    if name == "prmt":
        return t.into(operands[0], f"permute({', '.join(arguments)})", "b32", guard)
    if name == "lop3":
        return t.into(operands[0], f"lut({', '.join(arguments)})", "b32", guard)
    if name in ("mul", "mad") and "wide" in modifiers:
        wide = f"{type[0]}{2 * int(type[1:])}"
        constant = t.constant(TYPES[wide])
        expression = f"{arguments[0]}.astype({constant}) * {arguments[1]}.astype({constant})"
        if name == "mad":
            expression += f" + {t.operand(operands[3], wide)}"
        return t.into(operands[0], expression, wide, guard)
    if name in ("mul", "mad"):
        product = f"high({', '.join(arguments[:2])})" if "hi" in modifiers else f"{arguments[0]} * {arguments[1]}"
        return t.into(operands[0], product if name == "mul" else f"{product} + {arguments[2]}", type, guard)
    if name == "fma":
        expression = f"fma({', '.join(arguments)})"
    elif name in ("max", "min"):
        function = ("maximum" if name == "max" else "minimum") if "NaN" in modifiers else f"f{name}"
        expression = f"{function}({', '.join(arguments[:2])})"
        for third in arguments[2:]:
            expression = f"{function}({expression}, {third})"
    elif name in UNARY and len(arguments) == 1:
        expression = f"{name}_({arguments[0]})"
    elif name in BINARY and len(arguments) == 2:
        expression = f"{name}_({', '.join(arguments)})"
    else:
        raise UnknownInstruction(f"line {line}: {text}")
    if type in ("bf16", "f16x2", "bf16x2"):
        raise UnknownInstruction(f"line {line}: {text}")
    if "ftz" in modifiers:
        expression = f"flushed({expression})"
    return t.into(operands[0], expression, "u32" if name == "popc" else type, guard)


def _memory(t: _Translation, name: str, modifiers: list[str], operands: list[str], guard: str | None, line: str) -> str:
    type, space = modifiers[-1], modifiers[0]
    dtype, mask = TYPES[type], guard or "None"
    if space == "param":
        number = int(re.search(r"_param_(\d+)", operands[1])[1])  # type: ignore[index]
        return t.into(operands[0], f"parameter({number}, {t.constant(dtype)})", type, guard)
    shared = space in ("shared", "shared::cta")  # the block's own
    if name in ("atom", "red"):
        target, address = operands[0], t.address(operands[1], shared)
        value = t.operand(operands[2], type)
        order = next((m for m in modifiers if m in ("acq_rel", "acquire", "release")), "relaxed")
        how = modifiers[-2]
        call = f"machine.atomic({address}, {value}, {mask}, {how!r}, {order!r}, {line})"
        return t.into(target, call, type, guard)
    count = int(next((m[1:] for m in modifiers if re.fullmatch(r"v\d", m)), 1))
    if name == "ld":
        address = t.address(operands[1], shared)
        call = f"machine.load({shared}, {address}, {mask}, {t.constant(dtype)}, {count}, {line})"
        targets = t.values(operands[0])
        return "; ".join(
            [f"loaded = {call}"] + [t.into(value, f"loaded[{i}]", type, guard) for i, value in enumerate(targets)]
        )
    values = ", ".join(t.operand(value, type) for value in t.values(operands[1]))
    return f"machine.store({shared}, {t.address(operands[0], shared)}, {mask}, ({values},), {line})"


def _packed(t: _Translation, name: str, operands: list[str], guard: str | None, where: str) -> str:
    """What comes of each half of registers that hold two float32."""
    if name not in ("add", "sub", "mul", "fma"):
        raise UnknownInstruction(where)
    halves = []
    for shift in (0, 32):
        by, word, real = t.constant(np.uint64(shift)), t.constant(TYPES["u32"]), t.constant(TYPES["f32"])
        parts = [f"({t.operand(o, 'u64')} >> {by}).astype({word}).view({real})" for o in operands[1:]]
        function = "fma" if name == "fma" else f"{name}_"
        half = f"{function}({', '.join(parts)})" if name != "mul" else f"({' * '.join(parts)})"
        halves.append(f"({half}.view({word}).astype({t.constant(TYPES['u64'])}) << {by})")
    return t.into(operands[0], " | ".join(halves), "u64", guard)


def _compare(t: _Translation, modifiers: list[str], operands: list[str], guard: str | None) -> str:
    how, type = modifiers[0], modifiers[-1]
    if type == "bf16x2":
        first, _, second = operands[0].partition("|")
        parts = [
            [f"bfloat16(({t.operand(operand, 'u32')} >> {t.constant(np.uint32(shift))}).astype({t.constant(TYPES['u16'])}))"
             for operand in operands[1:3]] for shift in (0, 16)
        ]  # fmt: skip
        return "; ".join(
            t.into(target, f"{how}_({', '.join(pair)})", "pred", guard)
            for target, pair in zip((first, second), parts, strict=True)
        )
    pair = [t.operand(operand, type) for operand in operands[1:3]]
    if type == "bf16":
        pair = [f"bfloat16({operand})" for operand in pair]
    expression, joined, parts = f"({how}_({', '.join(pair)}))", "", []
    if len(operands) == 4:
        joint = {"and": "&", "or": "|", "xor": "^"}[modifiers[1]]
        negated = operands[3].startswith("!")
        parts.append(f"other = {'~' if negated else ''}{t.operand(operands[3].lstrip('!'), 'pred')}")
        joined = f" {joint} other"
    first, _, second = operands[0].partition("|")  # a second result is that of the opposite comparison
    parts.append(t.into(first, expression + joined, "pred", guard))
    if second:
        parts.append(t.into(second, f"~{expression}{joined}", "pred", guard))
    return "; ".join(parts)


def _convert(t: _Translation, modifiers: list[str], operands: list[str], guard: str | None) -> str:
    to, source = modifiers[-2:]
    integer = next((m for m in modifiers if re.fullmatch(r"r[znmp]i", m)), "")
    values = [t.operand(operand, source) for operand in operands[1:]]
    if to in ("bf16x2", "f16x2"):
        halves = [f"to_bfloat16({v})" if to == "bf16x2" else f"{v}.astype({t.constant(TYPES['f16'])}).view({t.constant(TYPES['u16'])})"
                  for v in values]  # fmt: skip
        wide = t.constant(TYPES["u32"])
        return t.into(operands[0], f"({halves[0]}.astype({wide}) << 16 | {halves[1]})", "u32", guard)
    if source == "bf16":
        return t.into(operands[0], f"bfloat16({values[0]})", "f32", guard)
    if to == "bf16":
        return t.into(operands[0], f"to_bfloat16({values[0]})", "u16", guard)
    return t.into(operands[0], f"convert({values[0]}, {t.constant(TYPES[to])}, {integer!r})", to, guard)


def translate(text: str) -> Program:
    """The kernel that a PTX module has."""
    entry = re.search(r"\.entry\s+(\w+)\((.*?)\)(.*?)\{(.*?)^\}", text, re.DOTALL | re.MULTILINE)
    assert entry, "no kernel"
    name, parameters, directives, body = entry.groups()
    threads = int(re.search(r"\.reqntid\s+(\d+)", directives)[1])  # type: ignore[index]
    sizes = [int(bits) // 8 for bits in re.findall(r"\.param\s+\.\w(\d+)", parameters)]
    first_line = text[: entry.start(4)].count("\n") + 1

    blocks: list[list[tuple[int, str]]] = [[]]
    labels: dict[str, int] = {}
    for number, raw in enumerate(body.split("\n"), first_line):
        line = raw.split("//")[0].strip()
        if match := re.fullmatch(r"(\$[\w.]+):", line):
            if not match[1].startswith(("$L__tmp", "$L__func")):
                if blocks[-1]:
                    blocks.append([])
                labels[match[1]] = len(blocks) - 1
            continue
        if not line or line.startswith("."):
            continue
        assert line.endswith(";"), line
        instruction = line.rstrip(";").replace("\t", " ").strip()
        blocks[-1].append((number, instruction))
        if re.search(r"(^|\s)(bra|ret|exit)(\.uni)?(\s|$)", instruction):
            blocks.append([])

    t = _Translation(threads)
    lines: list[str] = []
    for index, block in enumerate(blocks):
        lines.append(f"    if block == {index}:")
        lines.append(f"      visits[{index}] += 1")
        for number, instruction in block:
            match = re.fullmatch(r"(?:@(!?)%p(\d+)\s+)?bra(?:\.uni)?\s+(\$[\w.]+)", instruction)
            if match:
                jump = f"block = {labels[match[3]]}; continue"
                if match[2]:
                    t.registers.add(f"p{match[2]}")
                    lines.append(f"      if {'not ' if match[1] else ''}machine.agreed(p{match[2]}, {number}): {jump}")
                else:
                    lines.append(f"      {jump}")
            elif instruction in ("ret", "exit"):
                lines.append("      return visits")
            else:
                lines.append(f"      {_statement(t, instruction, number)}")
        lines.append(f"      block = {index + 1}")

    poison = {
        kind: np.full(threads, 0xDEADBEEFDEADBEEF, np.uint64).astype(TYPES[type]) for kind, type in REGISTERS.items()
    }
    starts = [f"  {register} = poison_{_kind(register)}" for register in sorted(t.registers)]
    source = [
        f"def run(machine, parameter, special):\n  block, visits = 0, [0] * {len(blocks)}",
        *starts,
        "  while True:",
        *lines,
    ]
    scope: dict[str, Any] = dict(t.constants) | {f"poison_{kind}": value for kind, value in poison.items()}
    scope |= {f"{name}_": function for table in (UNARY, BINARY, COMPARISONS) for name, function in table.items()}
    scope |= dict(where=np.where, fmax=np.fmax, fmin=np.fmin, maximum=np.maximum, minimum=np.minimum)
    scope |= {f.__name__: f for f in (bfloat16, to_bfloat16, flushed, high, bit_field, permute, lut, fma, convert, shuffle,
                                      reduce_warp, ballot)}  # fmt: skip
    exec(compile("\n".join(source), f"<{name}>", "exec"), scope)
    opcodes = [
        Counter(re.sub(r"^@\S+\s+", "", instruction).split(" ")[0] for _, instruction in block) for block in blocks
    ]
    return Program(name, sizes, threads, scope["run"], opcodes)
