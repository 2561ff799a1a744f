"""Linear layers packed: the same results, the same weights, on the models that `engine.load` reads."""

import copy
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from random_heads import KINDS, random_head
from tiny_models import greedy, random_prompts, tiny
from torch import nn

import engine
from engine import weight_layouts
from engine.packing import PackedLinear, pack_linears
from engine.weight_layouts import FBGEMM, Columns, OneDNN, RowMajor, layout_of, layouts_for


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(1, 1), (1, 6), (1, 7), (2, 7), (3, 8), (2, 64)])
def test_the_product(dtype: torch.dtype, bias: bool, rows: tuple[int, int]) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 200, bias=bias, dtype=dtype)
    packed = PackedLinear(linear)
    x = torch.randn(*rows, 96, dtype=dtype)
    expected = copy.deepcopy(linear).double()(x.double())
    assert packed.weight.equal(linear.weight)
    with torch.no_grad():
        # One rounding of the result; sums of 96 products in float32.
        assert torch.allclose(packed(x).double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.fixture
def fbgemm() -> type[FBGEMM]:
    """On any processor that has it, whether or not it is the layout that is chosen there."""
    try:
        FBGEMM(torch.ones(2, 2), None)
    except RuntimeError as error:
        pytest.skip(f"no FBGEMM: {error}")
    return FBGEMM


@pytest.mark.parametrize("scale", [1.0, 2.0**-30, 2.0**20])
@pytest.mark.parametrize("with_bias", [True, False])
def test_bfloat16_of_any_size_in_float16(scale: float, with_bias: bool, fbgemm: type[FBGEMM]) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(40, 24) * scale).bfloat16()
    weight[0, :3] = torch.tensor([2.0**-24, 1.5 * 2.0**-20, 0.0]) * scale
    bias = torch.randn(40).bfloat16() * scale if with_bias else None
    packed = fbgemm(weight, bias)
    assert packed.weight().equal(weight)
    x = torch.randn(5, 24).bfloat16()
    expected = nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(packed.multiply(x).double(), expected, rtol=2**-8, atol=1e-5 * scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_stay_so(
    dtype: torch.dtype, value: float, fbgemm: type[FBGEMM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FBGEMM's layout holds finite numbers alone; what it would make of an infinite one also spoils all others of the matrix."""
    monkeypatch.setattr(weight_layouts, "layout_of", lambda dtype: fbgemm)
    linear = nn.Linear(32, 16, dtype=dtype)
    with torch.no_grad():
        linear.weight[3, 5], linear.weight[7, 2] = value, 2.0**-20
        expected = linear.weight.clone()
        packed = PackedLinear(linear)
        assert torch.equal(packed.weight.nan_to_num(), expected.nan_to_num()) and not packed.weight[3, 5].isfinite()
        output = packed(torch.ones(1, 32, dtype=dtype))
        assert output.isfinite().sum() == 15 and not output[0, 3].isfinite()
        packed.load_state_dict(nn.Linear(32, 16, dtype=dtype).state_dict())
        assert packed(torch.ones(1, 32, dtype=dtype)).isfinite().all()


def test_an_input_that_is_permuted(fbgemm: type[FBGEMM]) -> None:
    torch.manual_seed(0)
    packed, x = fbgemm(torch.randn(16, 64).bfloat16(), None), torch.randn(7, 2, 64).bfloat16().transpose(0, 1)
    torch.testing.assert_close(packed.multiply(x), packed.multiply(x.contiguous()), rtol=0, atol=0)


@pytest.fixture
def no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that has no instructions for bfloat16."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False}, raising=False)


@pytest.mark.usefixtures("no_bfloat16")
def test_what_a_row_gives_does_not_depend_on_its_place_or_on_the_others(fbgemm: type[FBGEMM]) -> None:
    torch.manual_seed(0)
    packed = fbgemm(torch.randn(96, 80).bfloat16(), None)
    x = torch.randn(150, 80).bfloat16()
    alike = [packed.multiply(x[:1].expand(rows, -1)) for rows in range(1, 33)]
    if not all(rows.equal(rows[:1].expand_as(rows)) for rows in alike):
        pytest.skip("on this processor FBGEMM's rows depend on their place, so that it may not be taken")
    assert layout_of.__wrapped__(torch.bfloat16) is fbgemm
    whole = packed.multiply(x)
    for rows in range(3, 150):
        assert packed.multiply(x[:rows]).equal(whole[:rows]), rows
        assert packed.multiply(x[None, -rows:])[0].equal(whole[-rows:]), rows
    x[3:] = torch.nan
    assert packed.multiply(x)[:3].equal(whole[:3])


def test_one_or_two_rows_that_are_left_over_become_three(fbgemm: type[FBGEMM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind six or more, whatever the processor makes of two."""
    seen: list[int] = []
    product = fbgemm._product
    monkeypatch.setattr(fbgemm, "_product", lambda self, x: seen.append(x.numel() // 8) or product(self, x))
    packed = fbgemm(torch.ones(4, 8).bfloat16(), None)
    given = [1, 2, 6, 7, 8, 9, 12, 13, 14, 15, 61, 62]
    assert [len(packed.multiply(torch.ones(rows, 8).bfloat16())) for rows in given] == given
    assert seen == [1, 2, 6, 9, 9, 9, 12, 15, 15, 15, 63, 63]


@pytest.mark.usefixtures("no_bfloat16")
def test_a_layout_whose_rows_depend_on_their_place_is_not_taken(
    fbgemm: type[FBGEMM], monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply = fbgemm.multiply
    monkeypatch.setattr(
        fbgemm, "multiply", lambda self, x: multiply(self, x) * (1 + torch.arange(len(x))[:, None] / 100)
    )
    assert layout_of.__wrapped__(torch.bfloat16) is not fbgemm


def test_a_layout_that_gives_something_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = RowMajor.multiply
    monkeypatch.setattr(RowMajor, "multiply", lambda self, x: 2 * multiply(self, x))
    assert layout_of.__wrapped__(torch.float32) is None


def test_a_layout_that_cannot_be_had_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: OneDNN, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        raise RuntimeError("not in this build")

    monkeypatch.setattr(OneDNN, "__init__", refuse)
    monkeypatch.setattr(weight_layouts, "layouts_for", lambda dtype: (OneDNN,))
    with caplog.at_level(logging.INFO, "engine.weight_layouts"):
        layout_of.__wrapped__(torch.bfloat16)
    assert "no linear layers of torch.bfloat16 in the layout OneDNN: not in this build" in caplog.text


@pytest.mark.parametrize(
    ("capabilities", "of_bfloat16"),
    [
        ({"avx512_bf16": True}, (OneDNN, FBGEMM)),
        ({"avx512_bf16": False}, (FBGEMM, OneDNN)),
        ({}, (OneDNN, FBGEMM)),  # not an x86
    ],
)
def test_bfloat16_goes_where_the_processor_has_instructions(
    capabilities: dict[str, bool], of_bfloat16: tuple[type, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert layouts_for(torch.bfloat16) == of_bfloat16
    assert layouts_for(torch.float16) == (OneDNN, FBGEMM)
    assert layouts_for(torch.float64) == ()


@pytest.mark.parametrize("slow", [RowMajor, Columns])
def test_float32_is_read_the_quicker_way(slow: type, monkeypatch: pytest.MonkeyPatch) -> None:
    for layout in (RowMajor, Columns):
        seconds = 0.02 if layout is slow else 0.005
        monkeypatch.setattr(layout, "multiply", lambda self, input, seconds=seconds: time.sleep(seconds))
    monkeypatch.setattr(weight_layouts, "_columns_are_quicker", weight_layouts._columns_are_quicker.__wrapped__)
    assert layouts_for(torch.float32) == ((Columns, RowMajor) if slow is RowMajor else (RowMajor,))


@pytest.mark.parametrize("with_bias", [True, False])
def test_rows_as_columns(with_bias: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(40, 24), torch.randn(40) if with_bias else None
    columns = Columns(weight, bias)
    assert columns.weight() is weight
    for rows in (*range(1, 10), 63, 64, 65):
        x = torch.randn(rows, 24)
        expected = nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double()).float()
        found = columns.multiply(x)
        assert found.is_contiguous() and columns.multiply(x[None, :, None]).equal(found[None, :, None])
        torch.testing.assert_close(found, expected)
    x = torch.randn(2, 7, 24)
    assert columns.multiply(x.transpose(0, 1)).equal(columns.multiply(x.transpose(0, 1).contiguous()))


def test_columns_come_in_fours_unless_they_are_one_or_many(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(weight_layouts, "pad", lambda x, by: seen.append(len(x) + by[-1]) or nn.functional.pad(x, by))
    columns = Columns(torch.ones(4, 8), None)
    given = [1, 2, 4, 5, 9, 64, 65]
    assert [len(columns.multiply(torch.ones(rows, 8))) for rows in given] == given
    assert seen == [4, 4, 8, 12, 64]


def test_columns_whose_rows_depend_on_their_place_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_layouts, "_columns_are_quicker", lambda: True)
    for difference, expected in ((0.0, Columns), (0.01, RowMajor)):

        def multiply(self: Columns, x: torch.Tensor, difference: float = difference) -> torch.Tensor:
            return RowMajor.multiply(self, x[:1]) * (1 + difference * torch.arange(len(x))[:, None])

        monkeypatch.setattr(Columns, "multiply", multiply)
        assert layout_of.__wrapped__(torch.float32) is expected


class Attention(nn.Module):
    """Projections as stock models have them."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, size, bias=bias) for size in (64, 16, 16))


def products_of(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry for each matrix product of a packed module."""
    made: list[int] = []
    for product in {part.product for part in module.modules() if isinstance(part, PackedLinear)}:
        monkeypatch.setattr(product, "multiply", lambda x, old=product.multiply: made.append(1) or old(x))
    return made


@pytest.mark.parametrize("bias", [True, False])
def test_siblings_with_one_input_are_computed_together(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module: Any = Attention(bias)
    plain = copy.deepcopy(module)
    assert pack_linears(module) == 3
    made = products_of(module, monkeypatch)
    x, y = torch.randn(2, 3, 32), torch.randn(1, 7, 32)
    with torch.no_grad():
        for calls, products in (
            (((x, "q"), (x, "k"), (x, "v")), 1),
            (((y, "v"), (y, "q"), (y, "k")), 1),
            (((x, "q"), (x, "q"), (x, "k")), 2),  # asked for twice: computed twice, as its input may have changed
            (((y, "q"), (x, "q"), (y, "k"), (x, "k")), 4),  # nothing is kept of an input before the last
        ):
            made.clear()
            for value, name in calls:
                expected = plain.get_submodule(f"{name}_proj")(value)
                torch.testing.assert_close(module.get_submodule(f"{name}_proj")(value), expected, rtol=1e-5, atol=1e-5)
            assert len(made) == products
        for name in ("q", "k", "v"):
            value = x.clone()
            for _ in range(2):  # in the same place
                got = module.get_submodule(f"{name}_proj")(value)
                torch.testing.assert_close(got, plain.get_submodule(f"{name}_proj")(value), rtol=1e-5, atol=1e-5)
                value.mul_(2)


def test_nothing_is_kept_once_all_siblings_were_called() -> None:
    module: Any = Attention()
    pack_linears(module)
    x = torch.randn(1, 4, 32)
    with torch.no_grad():
        results = [module.q_proj(x), module.k_proj(x)]
        assert module.q_proj.product._kept[0] is x
        results.append(module.v_proj(x))
    assert module.q_proj.product._kept is None
    assert [result.shape[-1] for result in results] == [64, 16, 16]


def test_nothing_is_kept_of_weights_that_were_replaced() -> None:
    module, other = Attention(), Attention()
    pack_linears(module)
    x = torch.randn(1, 4, 32)
    with torch.no_grad():
        module.q_proj(x)
        module.load_state_dict(other.state_dict())
        torch.testing.assert_close(module.k_proj(x), other.k_proj(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "phi", "opt", "mixtral", "gpt2"])
def test_a_loaded_checkpoint_is_packed_and_says_the_same(name: str, tmp_path: Path) -> None:
    plain = tiny(name, dtype=torch.float32)
    plain.save_pretrained(tmp_path)
    llm = engine.load(str(tmp_path), drafter="ngram", device="cpu")
    assert any(isinstance(module, PackedLinear) for module in llm.target_model.modules())
    prompts = random_prompts(6)
    outputs = llm.generate(prompts, engine.SamplingParams(max_new_tokens=12))
    assert [o.token_ids for o in outputs] == [greedy(plain, prompt, 12) for prompt in prompts]


def test_choosing_a_layout_draws_from_no_generator_of_others() -> None:
    before = torch.get_rng_state()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        layout_of.__wrapped__(dtype)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_layout_is_chosen_wherever_torch_makes_tensors() -> None:
    chosen = layout_of.__wrapped__(torch.float32)
    with torch.device("meta"):
        assert layout_of.__wrapped__(torch.float32) is chosen is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layout_is_chosen_under_autocast_too(dtype: torch.dtype) -> None:
    chosen = layout_of.__wrapped__(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert layout_of.__wrapped__(dtype) is chosen


@pytest.mark.parametrize(("name", "layers"), [("llama", 2 * 7 + 1), ("qwen2", 2 * 7 + 1), ("gpt2", 2 * 4 + 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_can_be_read_back(name: str, layers: int, dtype: torch.dtype, tmp_path: Path) -> None:
    plain = tiny(name, dtype=dtype)
    packed = tiny(name, dtype=dtype)
    assert pack_linears(packed) == layers
    x = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        torch.testing.assert_close(packed(x).logits, plain(x).logits, rtol=0.02, atol=0.02)
    packed.save_pretrained(tmp_path)
    again = type(plain).from_pretrained(tmp_path)
    expected = plain.state_dict()
    assert packed.state_dict().keys() == expected.keys() == again.state_dict().keys()
    parameters = {name for name, _ in packed.named_parameters()}  # in place, these can be changed
    linears = [name for name, module in packed.named_modules() if isinstance(module, PackedLinear)]
    assert parameters == {key for key in expected if key.rpartition(".")[0] not in linears}
    for key, value in again.state_dict().items():
        assert value.equal(expected[key]), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_a_packed_model_can_be_converted(name: str, dtype: torch.dtype, other: torch.dtype) -> None:
    plain, packed = tiny(name, dtype=dtype).to(other), tiny(name, dtype=dtype)
    if not pack_linears(packed):
        pytest.skip(f"no packed layout for {dtype}")
    packed.to(other)
    for key, value in plain.state_dict().items():
        assert packed.state_dict()[key].equal(value) and value.dtype == other, key
    x = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        torch.testing.assert_close(packed(x).logits, plain(x).logits, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_does_not_unpack_the_targets_weights(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would take as much memory once more, for a size."""
    tiny("llama", num_hidden_layers=7, dtype=torch.float32).save_pretrained(tmp_path / "target")
    head = random_head(kind, tmp_path / "head")
    monkeypatch.setattr(PackedLinear, "weight", property(lambda _: pytest.fail("it was unpacked")))
    llm = engine.load(tmp_path / "target", head)
    assert isinstance(llm.target_model.get_output_embeddings(), PackedLinear)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_may_go_on_to_a_target_of_another_dtype(kind: str, tmp_path: Path) -> None:
    prompts, params = random_prompts(3), engine.SamplingParams(max_new_tokens=8)
    drafter, fresh = (random_head(kind, tmp_path / name) for name in ("first", "second"))
    engine.load(tiny("llama", num_hidden_layers=7, dtype=torch.bfloat16), drafter).generate(prompts, params)
    target = tiny("llama", num_hidden_layers=7, dtype=torch.float32)
    for parameter in fresh.model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    runs = []
    for head in (drafter, fresh):
        llm = engine.load(target, head)
        texts = [output.token_ids for output in llm.generate(prompts, params)]
        runs.append((texts, llm.stats.draft_tokens, llm.stats.acceptance_rate))
    assert runs[0] == runs[1]
    assert runs[0][0] == [greedy(target, prompt, 8) for prompt in prompts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_weights_can_be_loaded_again(name: str, dtype: torch.dtype) -> None:
    """As of a model that goes on learning elsewhere."""
    packed, other = tiny(name, dtype=dtype), tiny(name, dtype=dtype)
    if not pack_linears(packed):
        pytest.skip(f"no packed layout for {dtype}")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x = torch.tensor([[3, 4, 5]])
    packed.load_state_dict(other.state_dict())
    assert packed.state_dict().keys() == other.state_dict().keys()
    for key, value in packed.state_dict().items():
        assert value.equal(other.state_dict()[key]), key
    with torch.no_grad():
        torch.testing.assert_close(packed(x).logits, other(x).logits, rtol=0.02, atol=0.02)


def test_weights_that_do_not_fit_are_told_as_for_other_layers() -> None:
    packed = tiny("qwen2", dtype=torch.float32)
    assert pack_linears(packed)
    states = packed.state_dict()
    name = "model.layers.0.self_attn.q_proj"
    wrong, more = states | {f"{name}.bias": torch.zeros(3)}, states | {f"{name}.scale": torch.zeros(3)}
    less = {key: value for key, value in states.items() if key != f"{name}.weight"}
    for given, message in ((wrong, rf"size mismatch for {name}.bias"), (more, "Unexpected key"), (less, "Missing key")):
        with pytest.raises(RuntimeError, match=message):
            packed.load_state_dict(given)
    assert packed.load_state_dict({f"{name}.weight": states[f"{name}.weight"]}, strict=False).unexpected_keys == []
    assert packed.state_dict()[f"{name}.bias"].equal(states[f"{name}.bias"])


def test_a_live_model_is_left_as_it_is() -> None:
    model = tiny("llama", dtype=torch.float32)
    llm = engine.load(model)
    assert llm.target_model is model and not any(isinstance(module, PackedLinear) for module in model.modules())


def test_layers_that_do_more_than_multiply_are_left_as_they_are() -> None:
    class Special(nn.Linear):
        pass

    model: Any = tiny("llama", dtype=torch.float32)
    attention = model.model.layers[0].self_attn
    attention.q_proj = Special(32, 32)
    attention.k_proj.register_forward_hook(lambda module, args, output: 2 * output)
    assert pack_linears(model) == 2 * 7 + 1 - 2
    assert type(attention.q_proj) is Special and type(attention.k_proj) is nn.Linear
    assert pack_linears(tiny("llama", dtype=torch.float64)) == 0
