"""Bad input: a clear error that names the argument, the value and the rule, before any work is done."""

from typing import Any

import numpy as np
import pytest
import torch
import triton
from tiny_models import CONTEXT, VOCAB, greedy, tiny
from transformers import BatchEncoding, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerFast, TopKLogitsWarper

import engine
from engine import config
from engine.kernels import ops
from engine.kernels.checks import MAX_GRID
from engine.kernels.records import GREEDY_BELOW


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny("llama")


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("temperature", -0.1, "a finite number >= 0"),
        ("temperature", float("nan"), "a finite number >= 0"),
        ("temperature", float("inf"), "a finite number >= 0"),
        ("temperature", "hot", "a finite number >= 0"),
        ("temperature", 1e39, r"<= 3e\+38"),  # infinite in float32
        ("temperature", 10**400, "a finite number >= 0"),
        ("top_k", -1, ">= 0"),
        ("top_k", 2.5, "an int >= 0"),
        ("top_k", 2**63, "<= 9223372036854775807"),
        ("top_p", 0.0, r"in \(0, 1\]"),
        ("top_p", 1.1, r"in \(0, 1\]"),
        ("top_p", float("nan"), r"in \(0, 1\]"),
        ("min_p", -0.1, r"in \[0, 1\]"),
        ("min_p", 1.5, r"in \[0, 1\]"),
        ("max_new_tokens", 0, ">= 1"),
        ("max_new_tokens", -3, ">= 1"),
        ("max_new_tokens", True, "an int >= 1"),
        ("max_new_tokens", 10**30, "<= 9223372036854775807"),
        ("seed", -1, "in "),
        ("seed", 2**63, "in "),
        ("stop", [""], "non-empty strings"),
        ("stop", [3], "non-empty strings"),
        ("stop", 5, "non-empty strings"),
        ("stop", None, "non-empty strings"),
        ("ignore_eos", 1, "True or False"),
        ("stop_token_ids", 5, "a list of ints"),
        ("stop_token_ids", [2.5], "an int >= 0"),
        ("stop_token_ids", [-1], ">= 0"),
        ("logits_processor", 3, "callable as a LogitsProcessor of transformers is"),
        ("logits_processor", TopKLogitsWarper, "callable as a LogitsProcessor of transformers is"),
        ("repetition_penalty", 0.0, r"in \[0.01, 100\]"),
        ("repetition_penalty", -1.1, r"in \[0.01, 100\]"),
        ("repetition_penalty", float("nan"), r"in \[0.01, 100\]"),
        ("repetition_penalty", "1.1", r"in \[0.01, 100\]"),
        ("logprobs", 5, "True or False"),
    ],
)
def test_sampling_params(field: str, value: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be .*{rule}.*got") as caught:
        engine.SamplingParams(**{field: value})
    assert str(value).strip("[]") in str(caught.value)


def test_params_with_processors_have_a_hash() -> None:
    """Though a list of processors has none."""
    first, second = (engine.SamplingParams(logits_processor=LogitsProcessorList(), seed=seed) for seed in (1, 2))
    assert len({first, second, engine.SamplingParams(logits_processor=LogitsProcessorList(), seed=1)}) == 2


def test_sampling_params_know_their_fields_and_are_frozen() -> None:
    with pytest.raises(TypeError, match="temperatur"):
        engine.SamplingParams(temperatur=1)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        engine.SamplingParams().top_k = 3  # type: ignore[misc]
    assert engine.SamplingParams(stop="end").stop == ("end",)
    assert engine.SamplingParams(temperature=1e-40).temperature == 0.0


def test_the_kernels_have_the_same_rules() -> None:
    """The config is read without them, as it needs no torch."""
    assert torch.tensor(config.GREEDY_BELOW).item() == GREEDY_BELOW and config.MAX_BATCH_SIZE == MAX_GRID
    assert config.VERIFICATION_METHODS == ops.LOSSLESS_METHODS


def test_numbers_of_numpy() -> None:
    params = engine.SamplingParams(
        np.float32(0.5),
        np.int64(3),
        np.float16(0.5),
        np.float64(0),
        np.uint8(7),
        np.int64(1),
        (),
        False,
        [np.int32(4)],
        np.float32(1.5),
    )
    assert params == engine.SamplingParams(0.5, 3, 0.5, 0.0, 7, 1, stop_token_ids=[4], repetition_penalty=1.5)
    values = (getattr(params, name) for name in params.__dataclass_fields__)
    assert [type(value) for value in values] == [
        float,
        int,
        float,
        float,
        int,
        int,
        tuple,
        bool,
        tuple,
        float,
        bool,
        type(None),
    ]
    config = engine.EngineConfig(num_draft_tokens=np.int64(2), max_batch_size=np.int32(3), max_length=np.int16(9))
    assert config == engine.EngineConfig(2, max_batch_size=3, max_length=9)
    assert {type(value) for value in (config.num_draft_tokens, config.max_batch_size, config.max_length)} == {int}
    for value in (np.bool_(True), np.float32(3)):
        with pytest.raises(ValueError, match="max_new_tokens must be an int >= 1, got"):
            engine.SamplingParams(max_new_tokens=value)


def test_extreme_numbers_that_are_allowed(target: PreTrainedModel) -> None:
    llm = engine.load(target, num_draft_tokens=10**12)
    llm.warmup([1])
    for options in (dict(temperature=3e38), dict(temperature=1.0, top_k=2**63 - 1), dict(temperature=1.0, top_p=1e-50)):
        assert len(llm.generate([3, 4], engine.SamplingParams(max_new_tokens=2, seed=1, **options)).token_ids) == 2
    assert len(llm.generate([3, 4], engine.SamplingParams(max_new_tokens=2**63 - 1)).token_ids) == CONTEXT - 2


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("num_draft_tokens", -1, "num_draft_tokens must be >= 0, got -1"),
        ("num_draft_tokens", 2.0, "num_draft_tokens must be 'auto' or an int >= 0, got 2.0"),
        ("verification", "typical", "verification must be one of .*, got 'typical'"),
        ("exact", 1, "exact must be True, False or None, got 1"),
        ("exact", "yes", "exact must be True, False or None, got 'yes'"),
        ("num_draft_tokens", 2**63, "num_draft_tokens must be <= 9223372036854775807, got 9223372036854775808"),
        ("max_batch_size", 0, "max_batch_size must be >= 1, got 0"),
        ("max_batch_size", 10**30, "max_batch_size must be <= 65535, got 10{30}"),
        ("max_length", 1, "max_length must be >= 2, got 1"),
        ("max_length", CONTEXT + 1, f"max_length must be <= {CONTEXT}, the target's context, got {CONTEXT + 1}"),
        ("dtype", "int8", "dtype must be .*, got 'int8'"),
        ("dtype", "float8_e4m3fn", "dtype must be 'auto', 'bfloat16', .* got 'float8_e4m3fn'"),
        ("dtype", torch.float8_e5m2, r"dtype must be 'auto', 'bfloat16', .* got torch\.float8_e5m2"),
        ("device", "abacus", "device must be"),
        ("drafter", 5, "drafter must be .*; got int"),
        ("drafter", "none", "drafter must be None for plain decoding, got 'none'"),
        ("drafter", engine.NGramDrafter, "drafter must be an object, got the class NGramDrafter"),
        ("tensor_parallel", 1, "tensor_parallel must be True or False, got 1"),
        ("compile", 1, "compile must be True or False, got 1"),
        ("drafter", "./nothing", "drafter must be an existing path or a hub id, got './nothing'"),
        ("drafter", "", "drafter must be a name, a hub id or a path, also after a '\\+', got ''"),
        ("drafter", "ngram+", "drafter must be a name, a hub id or a path, also after a '\\+', got 'ngram\\+'"),
        ("tokenizer", 5, "tokenizer must be a tokenizer of transformers, a folder or a hub id, got 5"),
        ("tokenizer", "", "tokenizer must be a tokenizer of transformers, a folder or a hub id, got ''"),
        ("tokenizer", PreTrainedTokenizerFast, "tokenizer must be a tokenizer of transformers, a folder or a hub id"),
        ("drafter", tiny("llama").model, "drafter must be a causal language model, got LlamaModel without a head"),
    ],
)
def test_load(target: PreTrainedModel, option: str, value: Any, message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        engine.load(target, **{option: value})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("cuda", "ENGINE_KERNELS must be 'triton' or 'torch', got 'cuda'"),
        ("triton", "ENGINE_KERNELS must be 'torch' or unset for tensors on cpu .*, got 'triton'"),
    ],
)
def test_kernels_that_cannot_be_had(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    monkeypatch.setenv("ENGINE_KERNELS", value)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match=message):
        engine.load(target)


def test_kernels_without_triton(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KERNELS", "triton")
    monkeypatch.setattr(ops, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="ENGINE_KERNELS must be 'torch' or unset where Triton is not installed"):
        engine.load(target)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts must not be empty"),
        ("", r"prompts\[0\] must not be empty"),
        ([[]], r"prompts\[0\] must not be empty"),
        ([[1], ""], r"prompts\[1\] must not be empty"),
        (None, "prompts must be a string.* got NoneType"),
        (3.5, "prompts must be a string.* got float"),
        ([[1], 2.5], r"prompts\[1\] must be a string.* got float"),
        ([1, 2.0], r"prompts\[0\] must hold token ids .* got 2.0"),
        ([1, None], r"prompts\[0\] must hold token ids .* got None"),
        ([1, VOCAB], rf"prompts\[0\] must hold token ids in \[0, {VOCAB}\), got {VOCAB}"),
        ([[1, 2], [3, -1]], r"prompts\[1\] must hold token ids .* got -1"),
        ([[1, True]], r"prompts\[0\] must hold token ids .* got True"),
        (
            torch.ones(2, 2, dtype=torch.long),
            r"prompts\[0\] must be a 1-D tensor or array of ids, got the shape \[2, 2\]",
        ),
        (np.ones((2, 2), dtype=int), r"prompts\[0\] must be a 1-D tensor or array of ids, got the shape \[2, 2\]"),
        (torch.ones(2), r"prompts\[0\] must hold token ids .* got 1.0"),
        (np.array(["a"]), r"prompts\[0\] must hold token ids .* got 'a'"),
        (torch.tensor(3), "prompts must be a string.* got Tensor"),
        ([BatchEncoding({"input_ids": [[1, 2], [3]]})], r"prompts\[0\] must hold token ids .* got \[1, 2\]"),
        (BatchEncoding({}), r"prompts\[0\] must have input_ids, got nothing"),
        *(
            (
                BatchEncoding({"input_ids": ids, "attention_mask": mask}),
                "attention_mask must have the shape of input_ids, got ",
            )
            for ids, mask in (
                ([1, 2, 3], [1, 1]),
                ([1, 2, 3], 1),
                (torch.ones(3, dtype=torch.long), torch.tensor(1)),
                ([[1, 2], [3]], [[1, 1]]),
                ([[1, 2], [3]], [[1], [1]]),
                (torch.ones(2, 3, dtype=torch.long), torch.ones(2, dtype=torch.long)),
            )
        ),
        ([1] * CONTEXT, rf"prompts\[0\] has {CONTEXT} tokens; at most {CONTEXT - 1}"),
        ("text", r"prompts\[0\] is text, which needs a tokenizer"),
        ([{"role": "user", "content": "hi"}], r"prompts\[0\] is chat messages, which needs a tokenizer"),
    ],
)
def test_prompts(target: PreTrainedModel, prompts: Any, message: str) -> None:
    calls: list[int] = []
    hook = target.register_forward_hook(lambda *args: calls.append(1))
    llm = engine.load(target)
    try:
        with pytest.raises(ValueError, match=message):
            llm.generate(prompts)
        with pytest.raises(ValueError, match=message):
            llm.check(prompts)
        alone = message.replace(r"prompts\[0\]", "^prompt")
        with pytest.raises(ValueError, match=rf"{alone}|^prompt must be one prompt, got a list of [12]: use generate"):
            llm.stream(prompts)
    finally:
        hook.remove()
    assert not calls, "work was done before the input was checked"
    assert llm.generate([[3, 4]], engine.SamplingParams(max_new_tokens=2))[0].token_ids == greedy(target, [3, 4], 2)


def test_ids_of_other_integer_types(target: PreTrainedModel) -> None:
    output = engine.load(target).generate([np.int64(3), np.int32(4)], engine.SamplingParams(max_new_tokens=2))
    assert output.token_ids == greedy(target, [3, 4], 2)
    assert [type(token) for token in output.prompt_token_ids] == [int, int]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: engine.DraftModel(None), "model must be of the class PreTrainedModel, got None"),
        (lambda model: engine.StagedDraftModel(5, None), "model must be of the class PreTrainedModel, got 5"),
        (lambda model: engine.MedusaDrafter(5), "model must be of the class HeadModel, got 5"),
        (lambda model: engine.MlpSpeculatorDrafter(5), "model must be of the class HeadModel, got 5"),
        (lambda model: engine.EagleDrafter("x"), "model must be of the class EagleModel, got 'x'"),
        (
            lambda model: engine.ReencodingDraftModel(model, 5, 5),
            "tokenizer must be of the class PreTrainedTokenizerBase, got 5",
        ),
    ],
)
def test_drafters(target: PreTrainedModel, make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        make(target)


def test_params_must_fit_the_prompts(target: PreTrainedModel) -> None:
    llm = engine.load(target)
    for params in ([engine.SamplingParams()], {"temperature": 1}, [engine.SamplingParams(), None], 5):
        with pytest.raises(ValueError, match="params must be SamplingParams, or a list of one for each of 2 prompts"):
            llm.generate([[1], [2]], params)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"for each of 2 prompts, got 3 of them$"):
        llm.generate([[1], [2]], [engine.SamplingParams()] * 3)
    with pytest.raises(ValueError, match="progress must be True or False, got 'yes'"):
        llm.generate([[1]], progress="yes")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="stop needs a tokenizer"):
        llm.generate([[1]], engine.SamplingParams(stop="x"))
    with pytest.raises(ValueError, match=rf"stop_token_ids must be in \[0, {VOCAB - 1}\], got {VOCAB}"):
        llm.generate([[1]], engine.SamplingParams(stop_token_ids=[VOCAB]))
    with pytest.raises(ValueError, match="prompt must be one prompt, got a list of 2: use generate for several"):
        llm.stream([[1], [2]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_sizes": 8}, "batch_sizes must be a list of ints, got 8"),
        ({"batch_sizes": [3]}, r"batch_sizes must be in \[1, 2\], got 3"),
        ({"text_lengths": 16}, "text_lengths must be a list of ints, got 16"),
        ({"text_lengths": (1,)}, r"text_lengths must be in \[2, 16\], got 1"),
        ({"params": 5}, "params must be SamplingParams or None, got 5"),
    ],
)
def test_warmup(target: PreTrainedModel, arguments: dict[str, Any], message: str) -> None:
    llm = engine.load(target, max_batch_size=2, max_length=16)
    with pytest.raises(ValueError, match=message):
        llm.warmup(**arguments)
    llm.warmup()  # a max_length below the usual 1024


def test_chat_without_a_template(target: PreTrainedModel) -> None:
    from tiny_tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    llm = engine.load(target, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="no chat template"):
        llm.generate([{"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match="'role' and 'content'"):
        llm.generate([{"role": "user"}])
    with pytest.raises(ValueError, match="'role' and 'content'") as caught:
        llm.generate([{"role": "user", "content": "x" * 1000}, {"content": "y" * 1000}])
    assert "yyy" in str(caught.value) and len(str(caught.value)) < 300
    for content in (5, None, [], [{"type": "image", "url": "x"}], [{"type": "text", "text": "hi"}, {"type": "image"}]):
        with pytest.raises(ValueError, match=r"prompts\[0\] must hold chat messages .* both strings, got"):
            llm.generate([{"role": "user", "content": content}])


def test_text_that_is_no_unicode(target: PreTrainedModel) -> None:
    """As Python hands on bytes that are no UTF-8, from arguments for one."""
    from tiny_tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    llm = engine.load(target, tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"prompts\[1\] must be valid Unicode text, got '\\udcff' at index 2"):
        llm.generate(["12", "12\udcff"])
    with pytest.raises(ValueError, match=r"prompts\[0\] must be valid Unicode text, got '\\ud800'"):
        llm.generate([{"role": "user", "content": "\ud800"}])
    tokenizer.chat_template = "{{ raise_exception('only one message') }}"
    with pytest.raises(ValueError, match=r"prompts\[0\] must hold chat messages that .* takes: only one message"):
        llm.generate([{"role": "user", "content": "hi"}])
