"""The pretended GPU that tests/test_kernels_ptx.py runs the kernels on: what it computes, and that it finds what it is there for."""

import numpy as np
import pytest
import torch
from ptx import UnknownInstruction, translate
from ptx_machine import KernelFault, launch
from torch import Tensor

WHERE = """
    ld.param.b64 %rd1, [k_param_0];
    ld.param.b64 %rd2, [k_param_1];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %nctaid.x;
    setp.eq.s32 %p1, %r1, 0;
    mad.wide.u32 %rd3, %r1, 4, %rd1;
"""


def run(body: str, *tensors: Tensor, blocks: int = 1, threads: int = 64, shared: int = 0, order: int = 1) -> None:
    """A kernel of two pointers that begins with WHERE: rd1, rd2 the pointers, r1 the thread, r2 the block, r3 how many blocks
    there are, p1 whether it is thread 0, rd3 the thread's int32 of the first tensor."""
    parameters = ",\n".join(f".param .u64 .ptr .global .align 1 k_param_{i}" for i in range(2))
    lines = "\n".join(line.strip() for line in (WHERE + body).splitlines())
    program = translate(f".visible .entry k(\n{parameters}\n)\n.reqntid {threads}\n{{\n{lines}\nret;\n}}\n")
    launch(program, [(f"tensor {i}", t) for i, t in enumerate(tensors)], (blocks,), shared, lambda n: range(n)[::order])


def floats(values: Tensor) -> Tensor:
    return values.view(torch.float32)


def ints(count: int = 64) -> Tensor:
    return torch.arange(count, dtype=torch.int32)


@pytest.mark.parametrize("instructions, expected", [
    ("shl.b32 %r5, %r4, 3;", lambda x: x << 3),
    ("sub.s32 %r5, 7, %r4; shr.s32 %r5, %r5, 1;", lambda x: (7 - x) >> 1),
    ("sub.s32 %r5, 7, %r4; shr.u32 %r5, %r5, 28;", lambda x: ((7 - x) >> 28) & 15),
    ("bfe.u32 %r5, %r4, 2, 3;", lambda x: x >> 2 & 7),
    ("bfe.s32 %r5, %r4, 4, 1;", lambda x: -(x >> 4 & 1)),
    ("popc.b32 %r5, %r4;", lambda x: sum(x >> i & 1 for i in range(6))),
    ("mad.lo.s32 %r5, %r4, %r4, %r1;", lambda x: x * x + x),
    ("mul.wide.s32 %rd5, %r4, -3; cvt.u32.u64 %r5, %rd5;", lambda x: -3 * x),
    ("mov.b32 %r6, 0xFFFFFFFF; mul.hi.u32 %r5, %r4, %r6;", lambda x: (x - 1).clamp(min=0)),
    ("setp.gt.and.s32 %p2, %r4, 3, %p1; selp.b32 %r5, 1, 0, %p2;", lambda x: x * 0),
    ("setp.gt.s32 %p2|%p3, %r4, 3; selp.b32 %r5, 1, 0, %p2; selp.b32 %r6, 2, 0, %p3; add.s32 %r5, %r5, %r6;", lambda x: 2 - (x > 3).int()),
    ("setp.gt.or.s32 %p1|%p2, %r4, 3, %p1; selp.b32 %r5, 1, 0, %p2;", lambda x: (x <= 3).int()),
    ("setp.gt.s32 %p2, %r4, 3; mov.b32 %r5, 9; @%p2 mov.b32 %r5, %r4;", lambda x: torch.where(x > 3, x, 9)),
    ("shfl.sync.bfly.b32 %r5, %r4, 5, 31, -1;", lambda x: x ^ 5),
    ("shfl.sync.up.b32 %r5, %r4, 2, 0, -1;", lambda x: torch.where(x % 32 < 2, x, x - 2)),
    ("shfl.sync.down.b32 %r5, %r4, 2, 31, -1;", lambda x: torch.where(x % 32 > 29, x, x + 2)),
    ("shfl.sync.idx.b32 %r5, %r4, 7, 31, -1;", lambda x: x // 32 * 32 + 7),
    ("redux.sync.add.s32 %r5, %r4, -1;", lambda x: torch.where(x < 32, 496, 1520)),
    ("prmt.b32 %r5, %r4, 0, 0x4444; prmt.b32 %r5, %r4, %r5, 0x7610;", lambda x: x & 0xFFFF),
    ("lop3.b32 %r5, %r4, %r1, 12, 0x6A;", lambda x: (x & x) ^ 12),
    ("mov.b32 {%rs1, %rs2}, %r4; mov.b32 %r5, {%rs2, %rs1};", lambda x: x << 16),
])  # fmt: skip
def test_integer_instructions(instructions: str, expected: object) -> None:
    values = ints()
    run("ld.global.b32 %r4, [%rd3];\n" + instructions.replace("; ", ";\n") + "\nst.global.b32 [%rd3], %r5;", values)
    assert torch.equal(values, expected(ints()).int())


@pytest.mark.parametrize("instructions, expected", [
    ("add.rn.f32 %r5, %r4, 0f3F800000;", lambda x: x + 1),
    ("fma.rn.f32 %r5, %r4, %r4, %r4;", lambda x: (x.double() * x.double() + x.double()).float()),
    ("ex2.approx.ftz.f32 %r5, %r4;", lambda x: torch.exp2(x.double()).float()),
    ("max.f32 %r5, %r4, 0f3F800000, 0fBF800000;", lambda x: x.nan_to_num(1, torch.inf, -torch.inf).clamp(min=1)),
    (
        "mov.b64 %rd5, {%r4, 0f40000000}; mov.b64 %rd6, {0f3F800000, %r4}; add.rn.f32x2 %rd7, %rd5, %rd6; "
        "fma.rn.f32x2 %rd7, %rd7, %rd7, %rd5; mov.b64 {%r5, %r6}, %rd7; sub.rn.f32 %r5, %r6, %r5;",
        lambda x: ((x + 2).double() ** 2 + 2).float() - ((x + 1).double() ** 2 + x.double()).float(),
    ),
    ("redux.sync.max.f32 %r5, %r4, -1;", lambda x: torch.cat([part.nan_to_num(-torch.inf, torch.inf, -torch.inf).max().expand(32) for part in x.split(32)])),
    ("cvt.rn.bf16.f32 %rs1, %r4; sub.rn.f32.bf16 %r5, %rs1, 0f3F800000;", lambda x: x.bfloat16().float() - 1),
    ("max.f32 %r5, %r4, 0f7FC00000;", lambda x: torch.where(x.isnan(), x, x)),
    ("setp.num.f32 %p2, %r4, %r4; selp.f32 %r5, %r4, 0f00000000, %p2;", lambda x: x.nan_to_num(0, torch.inf, -torch.inf)),
    ("setp.neu.f32 %p2, %r4, %r4; selp.f32 %r5, 0f3F800000, 0f00000000, %p2;", lambda x: x.isnan().float()),
    ("setp.ne.f32 %p2, %r4, 0f3F800000; selp.f32 %r5, 0f3F800000, 0f00000000, %p2;", lambda x: ((x != 1) & ~x.isnan()).float()),
    ("cvt.rzi.s32.f32 %r5, %r4; cvt.rn.f32.s32 %r5, %r5;",
     lambda x: x.nan_to_num(0).clamp(-(2**31), 2**31 - 1).double().trunc().float()),
    ("cvt.rn.bf16x2.f32 %r6, %r4, %r4; shr.u32 %r6, %r6, 16; cvt.u16.u32 %rs1, %r6; cvt.f32.bf16 %r5, %rs1;",
     lambda x: x.bfloat16().float()),
    ("cvt.rn.f16x2.f32 %r6, %r4, %r4; cvt.u16.u32 %rs1, %r6; cvt.f32.f16 %r5, %rs1;", lambda x: x.half().float()),
])  # fmt: skip
def test_float_instructions(instructions: str, expected: object) -> None:
    values = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 20
    values[:6] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 1.0, 2.0**-30])
    before = values.clone()
    run("ld.global.b32 %r4, [%rd3];\n" + instructions.replace("; ", ";\n") + "\nst.global.b32 [%rd3], %r5;", values)
    np.testing.assert_array_equal(values.numpy(), expected(before).numpy())


def test_vectors_shared_memory_and_loops() -> None:
    """Four neighbours a thread, added up by thread 0 of the block behind a barrier."""
    values, total = ints(256), torch.zeros(1, dtype=torch.int32)
    run(
        """
        mad.wide.u32 %rd4, %r1, 16, %rd1;
        ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd4];
        add.s32 %r4, %r4, %r5;
        add.s32 %r4, %r4, %r6;
        add.s32 %r4, %r4, %r7;
        mov.b32 %r8, global_smem;
        mad.lo.s32 %r8, %r1, 4, %r8;
        st.shared.b32 [%r8], %r4;
        bar.sync 0;
        mov.b32 %r9, 0;
        mov.b32 %r10, 0;
        $L__BB0_1:
        ld.shared.b32 %r11, [%r10];
        add.s32 %r9, %r9, %r11;
        add.s32 %r10, %r10, 4;
        setp.lt.s32 %p2, %r10, 256;
        @%p2 bra $L__BB0_1;
        @%p1 st.global.b32 [%rd2], {%r9};
        """,
        values,
        total,
        shared=256,
    )
    assert total.item() == 256 * 255 // 2


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_in_shared_memory(transposed: bool) -> None:
    """One of 8 x 8 16-bit values of each warp, stored and read back by rows: value 8 r + c of the two that lane 4 r + c / 2 has."""
    values = ints()
    how = ".trans" if transposed else ""
    run(
        f"""
        mul.lo.s32 %r4, %r1, 2;
        add.s32 %r5, %r4, 1;
        shl.b32 %r5, %r5, 16;
        or.b32 %r4, %r4, %r5;
        and.b32 %r6, %r1, 7;
        mul.lo.s32 %r6, %r6, 16;
        and.b32 %r7, %r1, 32;
        mad.lo.s32 %r6, %r7, 4, %r6;
        stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r6], {{%r4}};
        bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x1{how}.shared.b16 {{%r8}}, [%r6];
        st.global.b32 [%rd3], %r8;
        """,
        values,
        shared=256,
    )
    expected = torch.arange(128).view(2, 8, 8)
    expected = (expected.mT if transposed else expected).reshape(64, 2)
    assert torch.equal(values, (expected[:, 0] | expected[:, 1] << 16).int())


SUM_OF_ALL_BLOCKS = """
    mad.wide.u32 %rd4, %r2, 4, %rd1;
    add.s32 %r4, %r2, 5;
    @%p1 st.global.b32 [%rd4+4], %r4;
    bar.sync 0;
    mov.b32 %r5, 1;
    @%p1 atom.global.gpu.acq_rel.add.u32 %r6, [%rd1], %r5;
    mov.b32 %r7, global_smem;
    @%p1 st.shared.b32 [%r7], %r6;
    bar.sync 0;
    ld.shared.b32 %r6, [%r7];
    sub.s32 %r8, %r3, 1;
    setp.ne.s32 %p2, %r6, %r8;
    @%p2 bra $L__BB0_2;
    setp.lt.s32 %p3, %r1, %r3;
    mov.b32 %r9, 0;
    @%p3 ld.global.b32 %r9, [%rd3+4];
    redux.sync.add.s32 %r9, %r9, -1;
    @%p1 st.global.b32 [%rd2], %r9;
    $L__BB0_2:
"""


@pytest.mark.parametrize("order", [1, -1])
def test_the_last_block_may_read_what_the_others_left(order: int) -> None:
    values, total = torch.zeros(9, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    run(SUM_OF_ALL_BLOCKS, values, total, blocks=8, shared=16, order=order)
    assert total.item() == sum(range(5, 13)) and values[0] == 8


@pytest.mark.parametrize("change", [
    ("acq_rel", "relaxed"),
    ("acq_rel", "acquire"),
    ("acq_rel", "release"),
    ("st.global.b32 [%rd4+4], %r4;\n    bar.sync 0;", "st.global.b32 [%rd4+4], %r4;"),
])  # fmt: skip
def test_it_may_not_without_an_order(change: tuple[str, str]) -> None:
    """An atomic that does not release or acquire, or a release that other threads' stores need not have reached."""
    assert change[0] in SUM_OF_ALL_BLOCKS
    values, total = torch.zeros(9, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(KernelFault, match="nothing orders this behind another block's store to tensor 0"):
        run(SUM_OF_ALL_BLOCKS.replace(*change), values, total, blocks=8, shared=16)


REVERSED = """
    ld.global.b32 %r4, [%rd3];
    bar.sync 0;
    sub.s32 %r5, 63, %r1;
    mad.wide.u32 %rd4, %r5, 4, %rd1;
    st.global.b32 [%rd4], %r4;
    bar.sync 0;
    ld.global.b32 %r6, [%rd3];
    st.global.b32 [%rd3], %r6;
"""


def test_barriers_order_a_block() -> None:
    values = ints()
    run(REVERSED, values)
    assert torch.equal(values, ints().flip(0))


@pytest.mark.parametrize("barrier, message", [
    (0, "a thread overwrites what another may not have read yet, in tensor 0"),
    (1, "no barrier since another thread wrote to tensor 0"),
])  # fmt: skip
def test_races_in_a_block(barrier: int, message: str) -> None:
    parts = REVERSED.split("bar.sync 0;")
    body = "bar.sync 0;".join(parts[: barrier + 1]) + "".join(parts[barrier + 1 :])
    with pytest.raises(KernelFault, match=message):
        run(body, ints())


REVERSED_IN_A_WARP = REVERSED.replace("sub.s32 %r5, 63, %r1;", "xor.b32 %r5, %r1, 31;").replace(
    "bar.sync 0;", "bar.warp.sync -1;"
)


def test_barriers_of_warps_order_a_warp() -> None:
    values = ints()
    run(REVERSED_IN_A_WARP, values)
    assert torch.equal(values, ints().view(-1, 32).flip(1).flatten())


@pytest.mark.parametrize("body, message", [
    (REVERSED.replace("bar.sync 0;", "bar.warp.sync -1;"), "a thread overwrites what another may not have read yet"),
    (REVERSED.replace("bar.sync 0;", "bar.warp.sync -1;").replace("bar.warp.sync -1;", "bar.sync 0;", 1), "no barrier since"),
    (REVERSED_IN_A_WARP.replace("bar.warp.sync -1;", "", 1), "a thread overwrites what another may not have read yet"),
    ("bar.warp.sync -1;".join(REVERSED_IN_A_WARP.split("bar.warp.sync -1;")[:2]) + REVERSED_IN_A_WARP.split("bar.warp.sync -1;")[2],
     "no barrier since"),
])  # fmt: skip
def test_barriers_of_warps_order_nothing_else(body: str, message: str) -> None:
    with pytest.raises(KernelFault, match=message):
        run(body, ints())


def test_words_that_a_warp_has_read_are_its_own_to_write() -> None:
    """Several threads of a warp read a word, and behind the warp's barrier one of them writes it; other warps may not have read it."""
    body = """
        {which}
        mad.wide.u32 %rd4, %r5, 4, %rd1;
        ld.global.b32 %r4, [%rd4];
        bar.warp.sync -1;
        and.b32 %r6, %r1, 31;
        setp.eq.s32 %p2, %r6, 0;
        @%p2 st.global.b32 [%rd4], %r1;
    """
    values = ints()
    run(body.format(which="shr.u32 %r5, %r1, 5;"), values)
    assert values[:2].tolist() == [0, 32]
    with pytest.raises(KernelFault, match=r"a thread overwrites what another may not have read yet|different values"):
        run(body.format(which="mov.b32 %r5, 0;"), ints())


def test_a_value_that_is_held_twice_is_stored_by_one_thread_before_another_has_read_it() -> None:
    """What Triton makes of load, compute, store of a tensor with fewer elements than the program has threads."""
    with pytest.raises(KernelFault, match="overwrites what another may not have read yet"):
        run(
            """
            and.b32 %r4, %r1, 31;
            mad.wide.u32 %rd4, %r4, 4, %rd1;
            ld.global.b32 %r5, [%rd4];
            add.s32 %r5, %r5, 1;
            setp.lt.s32 %p2, %r1, 32;
            @%p2 st.global.b32 [%rd4], %r5;
            """,
            ints(),
        )


@pytest.mark.parametrize("body, message", [
    ("add.s64 %rd4, %rd3, 4;\nld.global.b32 %r4, [%rd4];", "1 threads access 4 bytes at .* nobody's"),
    ("add.s64 %rd4, %rd3, 2;\nld.global.b32 %r4, [%rd4];", "not on a multiple"),
    ("@%p1 bra $L__BB0_1;\n$L__BB0_1:", "branch apart"),
    ("st.global.b32 [%rd1], %r1;", "different values to one place|no barrier"),
    ("st.global.b32 [%rd1], %r2;", "behind another block's store to"),
    ("setp.eq.s32 %p2, %r2, 0;\n@%p2 ld.global.b32 %r4, [%rd1];\nmov.b32 %r5, 7;\nsetp.ne.and.s32 %p3, %r2, 0, %p1;\n"
     "@%p3 st.global.b32 [%rd1], %r5;", "behind another block's load from"),
])  # fmt: skip
def test_other_faults(body: str, message: str) -> None:
    with pytest.raises(KernelFault, match=message):
        run(body, ints(), blocks=2)


def test_an_unknown_instruction_is_an_error() -> None:
    with pytest.raises(UnknownInstruction, match=r"line \d+: sin.approx.f32"):
        run("sin.approx.f32 %r4, %r1;", ints())
