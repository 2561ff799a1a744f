"""MLP speculators: their checkpoints, the drafts against the paper's formula, and that no law is bent."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from head_checkpoints import (
    HIDDEN,
    LAW_CASES,
    LAW_VOCAB,
    check_coupled_text,
    check_greedy_drafts,
    check_law,
    fitted,
    greedy_texts,
    last_hidden,
    lying,
    mlp_config,
    mlp_shapes,
    random_tensors,
    write,
)
from sampled_laws import flat_target
from tiny_models import greedy, random_prompts, tiny
from transformers import PreTrainedModel

import engine
from engine.drafters.head_files import read_head
from engine.drafters.mlp import MlpSpeculator, MlpSpeculatorDrafter


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny("llama")


def speculator(path: Path, **config: Any) -> Path:
    return write(path, mlp_config(**config), random_tensors(mlp_shapes()), "model.safetensors")


def next_state(
    tensors: dict[str, torch.Tensor], step: int, state: torch.Tensor, token: torch.Tensor, num_steps: int, tied: bool
) -> torch.Tensor:
    """States [..., inner] after a step, from the tensors alone."""
    proj, emb, weight, bias = (
        tensors[f"speculator.{part}.{min(step, most) if tied else step}.{kind}"].to(state)
        for part, most, kind in (("proj", 1, "weight"), ("emb", 0, "weight"), ("ln", 0, "weight"), ("ln", 0, "bias"))
    )
    a = 2 ** (-1 / (2 * num_steps))
    x = a * state @ proj.T + math.sqrt(1 - a * a) * math.sqrt(len(proj) / 2) * emb[token]
    x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight + bias
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def drafts(
    tensors: dict[str, torch.Tensor], hidden: torch.Tensor, token: int, num_steps: int, tied: bool, scaled: bool
) -> list[int]:
    state, tokens = hidden, [token]
    if scaled:
        state = state / (state.square().mean() + 1e-6).sqrt() / math.sqrt(2)
    for step in range(num_steps):
        state = next_state(tensors, step, state, torch.tensor(tokens[-1]), num_steps, tied)
        head = tensors[f"speculator.head.{0 if tied else step}.weight"].to(state)
        tokens.append(int((head @ state).argmax()))
    return tokens[1:]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("layout", ["safetensors", "bin", "bare", "inner 0", "tied", "tied, all names"])
def test_drafts_of_every_layout(target: PreTrainedModel, tmp_path: Path, layout: str, scaled: bool) -> None:
    tied, inner = layout.startswith("tied"), HIDDEN if layout == "inner 0" else 24
    tensors = random_tensors(mlp_shapes(inner=inner, tied=tied))
    config = mlp_config(inner=0 if layout == "inner 0" else inner, tie_weights=tied, scale_input=scaled)
    stored, file_name = tensors, "pytorch_model.bin" if layout == "bin" else "model.safetensors"
    if layout == "bare":
        stored = {name.removeprefix("speculator."): value for name, value in tensors.items()}
    elif layout == "tied, all names":
        stored = dict(tensors)
        for name, shape in mlp_shapes(inner=inner).items():
            if name not in tensors:
                _, part, _, kind = name.split(".")
                stored[name] = tensors[f"speculator.{part}.{1 if part == 'proj' else 0}.{kind}"].clone()
                assert stored[name].shape == shape
    folder = write(tmp_path, config, stored, file_name)
    assert MlpSpeculatorDrafter.matches(read_head(folder).config)
    drafter = MlpSpeculatorDrafter.from_pretrained(folder, min_reach=0.0)
    check_greedy_drafts(
        target, drafter, lambda text: drafts(tensors, last_hidden(target, text), text[-1], 3, tied, scaled), most=3
    )


@pytest.fixture(scope="module")
def good_speculator(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that knows greedy continuations of `random_prompts(8)`: random, but for its heads."""
    texts = greedy_texts(target, random_prompts(8))
    tensors = {name: value.double() for name, value in random_tensors(mlp_shapes(inner=80)).items()}
    states = [hidden for _, hidden in texts]
    for step in range(3):
        # At position j: the token at j + 1 + step is read, the next one is predicted.
        pairs = [(state[: len(tokens) - 2 - step], tokens) for (tokens, _), state in zip(texts, states, strict=True)]
        states = [
            next_state(tensors, step, state, tokens[1 + step :][: len(state)], 3, False) for state, tokens in pairs
        ]
        predicted = torch.cat([tokens[2 + step :] for _, tokens in pairs])
        tensors[f"speculator.head.{step}.weight"] = fitted(torch.cat(states), predicted)
    return write(tmp_path_factory.mktemp("good"), mlp_config(inner=80), tensors, "model.safetensors")


@pytest.mark.parametrize(("num_draft_tokens", "exact"), [(1, False), (2, True), (3, False), (5, True), ("auto", False)])
def test_greedy_text(target: PreTrainedModel, good_speculator: Path, num_draft_tokens: Any, exact: bool) -> None:
    llm = engine.load(target, good_speculator, num_draft_tokens, max_batch_size=3, exact=exact)
    prompts = random_prompts(8)
    for prompt, output in zip(prompts, llm.generate(prompts, engine.SamplingParams(max_new_tokens=16)), strict=True):
        assert output.token_ids == greedy(target, prompt, 16)
    if num_draft_tokens != "auto":
        assert 0.3 < llm.stats.acceptance_rate < 1


@pytest.mark.parametrize("options", [{}, {"greedy": True}])
def test_coupled_text_is_plain_text(target: PreTrainedModel, good_speculator: Path, options: dict[str, Any]) -> None:
    check_coupled_text(target, MlpSpeculatorDrafter.from_pretrained(good_speculator, **options))


def test_drafting_ends_where_nothing_is_likely(target: PreTrainedModel, tmp_path: Path) -> None:
    folder = speculator(tmp_path)
    widths = {}
    for min_reach in (0.0, 1.0):
        drafter = MlpSpeculatorDrafter.from_pretrained(folder, min_reach=min_reach)
        llm = engine.load(target, drafter, num_draft_tokens=3, max_batch_size=1)
        llm.generate([[3, 4, 5, 6]], engine.SamplingParams(max_new_tokens=12))
        widths[min_reach] = len(llm.stats.acceptance_per_position)
    assert widths == {0.0: 3, 1.0: 1}


def test_confidence_is_the_probability(target: PreTrainedModel, good_speculator: Path) -> None:
    drafter = MlpSpeculatorDrafter.from_pretrained(good_speculator, min_reach=0.0)
    seen, propose = [], drafter.propose

    def watched(state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
        seen.append(propose(state, num_draft_tokens))
        return seen[-1]

    drafter.propose = watched  # type: ignore[method-assign]
    text = [3, 4, 5, 6]
    engine.load(target, drafter, 2).generate([text], engine.SamplingParams(max_new_tokens=4))
    first, confidence = seen[0], seen[0].confidence
    assert confidence is not None and bool(((confidence >= 0) & (confidence < 1)).all())
    tensors = read_head(good_speculator).tensors
    state = next_state(tensors, 0, last_hidden(target, text), torch.tensor(text[-1]), 3, False)
    probabilities = (tensors["speculator.head.0.weight"] @ state).softmax(-1)
    assert int(first.tokens[0, 0]) == int(probabilities.argmax())
    torch.testing.assert_close(confidence[0, 0].double(), probabilities.max(), rtol=1e-5, atol=1e-6)


def test_prompts_of_one_token(target: PreTrainedModel, tmp_path: Path) -> None:
    llm = engine.load(target, speculator(tmp_path), 3)
    for output, prompt in zip(
        llm.generate([[5], [9]], engine.SamplingParams(max_new_tokens=9)), [[5], [9]], strict=True
    ):
        assert output.token_ids == greedy(target, prompt, 9)
    assert llm.stats.draft_tokens > 0


def law_drafter(**options: Any) -> MlpSpeculatorDrafter:
    torch.manual_seed(4)
    return MlpSpeculatorDrafter(MlpSpeculator(HIDDEN, LAW_VOCAB, 2, inner_size=16), min_reach=0.0, **options)


@pytest.mark.parametrize(("verification", "setting", "options", "count"), LAW_CASES)
def test_sampling_law(verification: str, setting: dict[str, Any], options: dict[str, Any], count: int) -> None:
    target = flat_target(LAW_VOCAB)
    assert check_law(target, law_drafter(**options), verification, setting, count) > 1e-3


@pytest.mark.parametrize("verification", ["rejection"])
def test_a_wrong_law_is_caught(verification: str) -> None:
    """The same test, for a drafter that lies about its second draft's distribution."""
    target = flat_target(LAW_VOCAB)
    assert check_law(target, lying(law_drafter()), verification, dict(temperature=1.0), 16_000) < 1e-4


@pytest.mark.parametrize("tied", [False, True])
def test_save_and_read_again(target: PreTrainedModel, tmp_path: Path, tied: bool) -> None:
    config = mlp_config(
        tie_weights=tied, scale_input=True, base_model_name_or_path="some/target", torch_dtype="float32"
    )
    folder = write(tmp_path / "first", config, random_tensors(mlp_shapes(tied=tied)), "model.safetensors")
    drafter = MlpSpeculatorDrafter.from_pretrained(folder)
    engine.load(target, drafter)  # its dtype is the target's now
    drafter.save(tmp_path / "again")
    stored, again = read_head(folder), read_head(tmp_path / "again")
    assert again.config == {**config, "torch_dtype": "float64"}
    assert again.tensors.keys() == stored.tensors.keys()
    assert all(torch.equal(again.tensors[name], value.double()) for name, value in stored.tensors.items())
    new = MlpSpeculatorDrafter(MlpSpeculator(8, 16, 4, tie_weights=tied))
    new.save(tmp_path / "new")
    assert read_head(tmp_path / "new").config["top_k_tokens_per_head"] == [1, 1, 1, 1]
    read = MlpSpeculatorDrafter.from_pretrained(tmp_path / "new").model
    assert all(torch.equal(read.state_dict()[name], value) for name, value in new.model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculator.ln.1.bias": None}, r"MlpSpeculator: missing ln\.1\.bias \[24\]$"),
        ({"speculator.emb.0.weight": None}, r"missing emb\.0\.weight \[64, 24\]$"),
        ({"speculator.ln0.weight": torch.zeros(3)}, r"extra ln0\.weight \[3\]$"),
        ({"speculator.head.2.weight": torch.zeros(63, 24)}, r"head\.2\.weight must be \[64, 24\], got \[63, 24\]$"),
    ],
)
def test_tensors_that_are_wrong(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    tensors = {**random_tensors(mlp_shapes()), **change}
    folder = write(tmp_path, mlp_config(), {n: v for n, v in tensors.items() if v is not None}, "model.safetensors")
    with pytest.raises(ValueError, match=message) as caught:
        MlpSpeculatorDrafter.from_pretrained(folder)
    assert str(folder) in str(caught.value)


def test_configs_that_are_wrong(target: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"architecture MLPSpeculatorPreTrainedModel, got .'ArcticMLPSpeculator"):
        engine.load(target, speculator(tmp_path / "a", architectures=["ArcticMLPSpeculatorPreTrainedModel"]))
    with pytest.raises(ValueError, match="positive integer 'emb_dim', got -32"):
        engine.load(target, speculator(tmp_path / "b", emb_dim=-32))
    tied = write(tmp_path / "c", mlp_config(tie_weights=True), random_tensors(mlp_shapes()), "model.safetensors")
    with pytest.raises(ValueError, match=r"emb\.1\.weight must equal emb\.0\.weight, as the config says tie_weights"):
        engine.load(target, tied)
    folder = speculator(tmp_path / "d")
    with pytest.raises(ValueError, match="target of hidden size 32, but the target has 40"):
        engine.load(tiny("llama", hidden_size=40), folder)
    with pytest.raises(ValueError, match="target of vocabulary 64, but the target has 70"):
        engine.load(tiny("llama", vocab_size=70), folder)
    (folder / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match=r"config\.json must be a JSON object, got list"):
        engine.load(target, folder)


def test_options() -> None:
    model = MlpSpeculator(8, 16)
    for options, message in (
        (dict(greedy="yes"), "greedy must be True or False, got 'yes'"),
        (dict(min_reach=1.5), r"min_reach must be in \[0, 1\], got 1.5"),
        (dict(min_reach="a"), r"min_reach must be in \[0, 1\], got 'a'"),
    ):
        with pytest.raises(ValueError, match=message):
            MlpSpeculatorDrafter(model, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_steps must be >= 1, got 0"):
        MlpSpeculator(8, 16, 0)
