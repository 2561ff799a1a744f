"""Medusa heads: both layouts of their checkpoints, the drafts against the paper's formula, and that no law is bent."""

import json
import resource
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
    medusa_shapes,
    random_tensors,
    write,
)
from sampled_laws import flat_target
from tiny_models import VOCAB, greedy, random_prompts, tiny
from transformers import PreTrainedModel

import engine
from engine.drafters.head_files import read_head
from engine.drafters.medusa import MedusaDrafter
from engine.drafters.medusa_model import MedusaHeads

CONFIG = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "some/target"}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny("llama")


def heads(path: Path, num_blocks: int = 1, **config: Any) -> Path:
    tensors = random_tensors(medusa_shapes(3, num_blocks))
    return write(path, {**CONFIG, "medusa_num_layers": num_blocks, **config}, tensors, "medusa_lm_head.safetensors")


def as_vllm(tensors: dict[str, torch.Tensor], num_blocks: int = 1) -> dict[str, torch.Tensor]:
    named = {}
    for name, value in tensors.items():
        head, block, *rest = name.split(".")
        named[f"lm_heads.{head}.weight" if rest == ["weight"] else f"blocks.{head}.layers.{block}.{rest[-1]}"] = value
    return named


def drafts(tensors: dict[str, torch.Tensor], hidden: torch.Tensor, num_blocks: int, output: Any = None) -> list[int]:
    """Each head's top token, from the tensors alone."""
    tokens = []
    for head in range(3):
        x = hidden
        for block in range(num_blocks):
            weight, bias = (tensors[f"{head}.{block}.linear.{kind}"].to(x) for kind in ("weight", "bias"))
            y = weight @ x + bias
            x = x + y / (1 + torch.exp(-y))
        matrix = tensors[f"{head}.{num_blocks}.weight"] if output is None else output
        tokens.append(int((matrix.to(x) @ x).argmax()))
    return tokens


@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize(
    "layout", ["safetensors", "pt", "prefix", "vllm", "vllm-prefix-bin", "borrowed", "shared", "shared-0", "shared-all"]
)
def test_drafts_of_every_layout(target: PreTrainedModel, tmp_path: Path, layout: str, num_blocks: int) -> None:
    tensors = random_tensors(medusa_shapes(3, num_blocks))
    config = {**CONFIG, "medusa_num_layers": num_blocks}
    vllm = dict(
        model_type="medusa", architectures=["MedusaModel"], hidden_size=HIDDEN, vocab_size=VOCAB, num_heads=3,
        num_hidden_layers=num_blocks, medusa_fc_bias=True, max_paths=64, topk=10,
    )  # fmt: skip
    output, file_name, stored = None, "medusa_lm_head.safetensors", tensors
    if layout == "pt":
        file_name = "medusa_lm_head.pt"
    elif layout == "prefix":
        stored = {f"medusa_head.{name}": value for name, value in tensors.items()}
    elif layout == "borrowed":
        stored = {name: value for name, value in tensors.items() if "linear" in name}
        output = target.lm_head.weight
    elif layout.startswith("vllm"):
        config, file_name, stored = vllm, "model.safetensors", as_vllm(tensors, num_blocks)
        if layout == "vllm-prefix-bin":
            file_name, stored = "pytorch_model.bin", {f"medusa_heads.{name}": value for name, value in stored.items()}
    elif layout.startswith("shared"):
        output = tensors[f"0.{num_blocks}.weight"]
        config, file_name = {**vllm, "original_lm_head": True}, "model.safetensors"
        stored = {name: value for name, value in as_vllm(tensors).items() if name.startswith("blocks")}
        stored["lm_head.weight" if layout == "shared" else "lm_heads.0.weight"] = output
        if layout == "shared-all":
            stored |= {f"lm_heads.{head}.weight": torch.zeros_like(output) for head in (1, 2)}
    folder = write(tmp_path / layout, config, stored, file_name)
    files = read_head(folder)
    assert MedusaDrafter.matches(files.config, files.tensors)
    drafter = MedusaDrafter.from_pretrained(folder)
    check_greedy_drafts(
        target, drafter, lambda text: drafts(tensors, last_hidden(target, text), num_blocks, output), most=3
    )


def test_a_reduced_vocabulary(target: PreTrainedModel, tmp_path: Path) -> None:
    """vLLM's token_map: the output matrices, whole or cut, give logits for these target ids alone."""
    tensors, ids = (
        random_tensors(medusa_shapes()),
        torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:20],
    )
    config = dict(model_type="medusa", hidden_size=HIDDEN, vocab_size=VOCAB, num_heads=3, truncated_vocab_size=20)
    for cut in (False, True):
        stored = {**as_vllm(tensors), "token_map": ids}
        if cut:
            stored |= {name: value[ids] for name, value in stored.items() if name.startswith("lm_heads")}
        folder = write(tmp_path / str(cut), config, stored, "model.safetensors")
        allowed = torch.full((VOCAB, 1), -torch.inf).index_fill(0, ids, 0.0)

        def expected(text: list[int], allowed: torch.Tensor = allowed) -> list[int]:
            hidden = last_hidden(target, text)
            features = [
                hidden + torch.nn.functional.silu(tensors[f"{i}.0.linear.weight"] @ hidden.float() + tensors[f"{i}.0.linear.bias"])
                for i in range(3)
            ]  # fmt: skip
            logits = [
                (tensors[f"{i}.1.weight"].double() @ feature) + allowed[:, 0] for i, feature in enumerate(features)
            ]
            return [int(row.argmax()) for row in logits]

        check_greedy_drafts(target, MedusaDrafter.from_pretrained(folder), expected, most=3)
        llm = engine.load(target, drafter=str(folder), num_draft_tokens=3)
        params = engine.SamplingParams(temperature=1.0, seed=1, max_new_tokens=20)
        assert len(llm.generate([[3, 4, 5]], params)[0].token_ids) == 20
    bad = write(tmp_path / "bad", config, {**stored, "token_map": torch.tensor([3, 3] * 10)}, "model.safetensors")
    with pytest.raises(ValueError, match=rf"token_map must hold distinct ids in \[0, {VOCAB}\), got \[3, 3"):
        MedusaDrafter.from_pretrained(bad)


def test_a_vocabulary_that_is_reduced_to_itself(tmp_path: Path) -> None:
    """Nothing is left out: the matrices give logits for tokens in their order."""
    tensors = as_vllm(random_tensors(medusa_shapes()))
    config = dict(model_type="medusa", hidden_size=HIDDEN, vocab_size=VOCAB, num_heads=3)
    folders = (
        write(tmp_path / str(len(more)), config, tensors | more, "model.safetensors")
        for more in ({}, {"token_map": torch.arange(VOCAB).flip(0)})
    )
    plain, mapped = map(MedusaDrafter.from_pretrained, folders)
    hidden = torch.randn(1, HIDDEN)
    assert torch.equal(plain.model(hidden), mapped.model(hidden))
    with pytest.raises(ValueError, match=f"draft_vocab_size must be below vocab_size = {VOCAB} or None, got {VOCAB}"):
        MedusaHeads(HIDDEN, VOCAB, draft_vocab_size=VOCAB)


def test_more_heads_or_blocks_than_the_config_says(target: PreTrainedModel, tmp_path: Path) -> None:
    """The first heads that were published say 2 and are 5. vLLM reads the number of blocks from keys of several names."""
    assert MedusaDrafter.from_pretrained(heads(tmp_path / "h", medusa_num_heads=2)).model.num_heads == 3
    folder = heads(tmp_path / "blocks", num_blocks=2, medusa_num_layers=1)
    assert MedusaDrafter.from_pretrained(folder).model.num_blocks == 2
    with pytest.raises(ValueError, match=r"missing 3\.0\.linear\.weight \[32, 32\]; .*missing 3\.1\.weight \[64, 32\]"):
        MedusaDrafter.from_pretrained(heads(tmp_path / "more", medusa_num_heads=4))


@pytest.fixture(scope="module")
def good_heads(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that know greedy continuations of `random_prompts(8)`: head i, what comes i + 2 after a hidden state."""
    texts = greedy_texts(target, random_prompts(8))
    tensors = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in medusa_shapes().items()}
    for head in range(3):
        ahead = 2 + head
        features = torch.cat([hidden[:-ahead] for _, hidden in texts])
        tensors[f"{head}.1.weight"] = fitted(features, torch.cat([tokens[ahead:] for tokens, _ in texts]))
    return write(tmp_path_factory.mktemp("good"), CONFIG, tensors, "medusa_lm_head.safetensors")


@pytest.mark.parametrize(("num_draft_tokens", "exact"), [(1, False), (2, True), (3, False), (5, True), ("auto", False)])
def test_greedy_text(target: PreTrainedModel, good_heads: Path, num_draft_tokens: Any, exact: bool) -> None:
    llm = engine.load(target, good_heads, num_draft_tokens, max_batch_size=3, exact=exact)
    prompts = random_prompts(8)
    for prompt, output in zip(prompts, llm.generate(prompts, engine.SamplingParams(max_new_tokens=16)), strict=True):
        assert output.token_ids == greedy(target, prompt, 16)
    if num_draft_tokens != "auto":
        assert 0.1 < llm.stats.acceptance_rate < 1


@pytest.mark.parametrize("options", [{}, {"greedy": True}])
def test_coupled_text_is_plain_text(target: PreTrainedModel, good_heads: Path, options: dict[str, Any]) -> None:
    check_coupled_text(target, MedusaDrafter.from_pretrained(good_heads, **options))


def test_prompts_of_one_token_and_no_tokens(target: PreTrainedModel, tmp_path: Path) -> None:
    llm = engine.load(target, heads(tmp_path), 3)
    for output, prompt in zip(
        llm.generate([[5], [9]], engine.SamplingParams(max_new_tokens=9)), [[5], [9]], strict=True
    ):
        assert output.token_ids == greedy(target, prompt, 9)
    assert llm.stats.draft_tokens > 0


def law_drafter(target: PreTrainedModel, **options: Any) -> MedusaDrafter:
    """Random heads over the target's own output matrix, of which some drafts stand."""
    torch.manual_seed(5)
    model = MedusaHeads(HIDDEN, LAW_VOCAB, num_heads=2)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.05)
        if name.endswith("1.weight"):
            with torch.no_grad():
                parameter += target.lm_head.weight
    return MedusaDrafter(model, **options)


@pytest.mark.parametrize(("verification", "setting", "options", "count"), LAW_CASES)
def test_sampling_law(verification: str, setting: dict[str, Any], options: dict[str, Any], count: int) -> None:
    target = flat_target(LAW_VOCAB)
    assert check_law(target, law_drafter(target, **options), verification, setting, count) > 1e-3


@pytest.mark.parametrize("verification", ["block"])
def test_a_wrong_law_is_caught(verification: str) -> None:
    """The same test, for a drafter that lies about its second draft's distribution."""
    target = flat_target(LAW_VOCAB)
    assert check_law(target, lying(law_drafter(target)), verification, dict(temperature=1.0), 16_000) < 1e-4


def test_save_and_read_again(target: PreTrainedModel, tmp_path: Path) -> None:
    for folder in (heads(tmp_path / "a"), heads(tmp_path / "b", num_blocks=2)):
        first = MedusaDrafter.from_pretrained(folder)
        engine.load(target, first)  # its dtype is the target's now
        first.save(tmp_path / "again" / folder.name)
        again = read_head(tmp_path / "again" / folder.name)
        assert again.config["base_model_name_or_path"] == "some/target"
        stored = read_head(folder).tensors
        assert again.tensors.keys() == stored.keys()
        assert all(torch.equal(again.tensors[name], value.double()) for name, value in stored.items())
        assert MedusaDrafter.from_files(again).model.num_blocks == first.model.num_blocks
        assert sorted(p.name for p in (tmp_path / "again" / folder.name).iterdir()) == [
            "config.json",
            "medusa_lm_head.safetensors",
        ]
    for output in ("own", "shared", "target"):
        model = MedusaHeads(HIDDEN, VOCAB, 2, 1, bias=False, output=output, layout="vllm")
        MedusaDrafter(model).save(tmp_path / output)
        read = MedusaDrafter.from_pretrained(tmp_path / output).model
        assert (read.output, read.layout, read.num_heads) == (output, "vllm", 2)
        assert {n: v.shape for n, v in read.state_dict().items()} == {n: v.shape for n, v in model.state_dict().items()}


def test_a_saved_config_says_what_is_in_the_file(tmp_path: Path) -> None:
    """Whatever that of the file before said; and for vLLM, whether each head has an output matrix of its own."""
    MedusaDrafter.from_pretrained(heads(tmp_path / "few", medusa_num_heads=2)).save(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["medusa_num_heads"] == 3
    for output, shared in (("own", False), ("shared", True), ("target", True)):
        model = MedusaHeads(HIDDEN, VOCAB, 2, 1, bias=False, output=output, layout="vllm")
        MedusaDrafter(model).save(tmp_path / output)
        assert json.loads((tmp_path / output / "config.json").read_text())["original_lm_head"] is shared


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = heads(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    drafter = MedusaDrafter.from_pretrained(folder)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)  # of the second file, config.json
        with pytest.raises(OSError, match="No space"):
            drafter.save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # bytes: too few for the weights
    try:
        with pytest.raises(OSError, match=r"could not be written|too large"):
            drafter.save(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_other_weights_in_the_folder(tmp_path: Path) -> None:
    folder = heads(tmp_path)
    drafter = MedusaDrafter.from_pretrained(folder)
    (folder / "medusa_lm_head.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(ValueError, match=r"no other \*\.safetensors than medusa_lm_head\.safetensors, got .*other"):
        drafter.save(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"1.0.linear.bias": None}, r"MedusaHeads: missing 1\.0\.linear\.bias \[32\]$"),
        ({"2.1.weight": None}, r"missing 2\.1\.weight \[64, 32\]$"),
        ({"0.7.weight": torch.zeros(3)}, r"extra 0\.7\.weight \[3\]$"),
        ({"1.1.weight": torch.zeros(63, 32)}, r"1\.1\.weight must be \[64, 32\], got \[63, 32\]$"),
        (
            {"0.0.linear.weight": torch.tensor(1.0)},
            r"at least one dimension, got a number as \['0\.0\.linear\.weight'\]",
        ),
        (
            {"model.layers.0.self_attn.q_proj.weight": torch.zeros(3)},
            "Medusa heads alone, got a whole model with heads$",
        ),
        ({f"0.7.{i}": torch.zeros(3) for i in range(30)}, r"extra 0\.7\.3 \[3\]; and 6 more$"),
        ({"0.1.weight": torch.tensor(1.0)}, r"at least one dimension, got a number as \['0\.1\.weight'\]"),
    ],
)
def test_tensors_that_are_wrong(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    tensors = {**random_tensors(medusa_shapes()), **change}
    stored = {name: value for name, value in tensors.items() if value is not None}
    folder = write(tmp_path, CONFIG, stored, "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match=message) as caught:
        MedusaDrafter.from_pretrained(folder)
    assert str(folder) in str(caught.value)


def test_heads_of_another_target(target: PreTrainedModel, tmp_path: Path) -> None:
    folder = heads(tmp_path)
    with pytest.raises(ValueError, match="target of hidden size 32, but the target has 40"):
        engine.load(tiny("llama", hidden_size=40), folder)
    with pytest.raises(ValueError, match="target of vocabulary 64, but the target has 70"):
        engine.load(tiny("llama", vocab_size=70), folder)


def test_damaged_files(tmp_path: Path) -> None:
    folder = heads(tmp_path)
    weights = folder / "medusa_lm_head.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"reading .*medusa_lm_head\.safetensors failed"):
        MedusaDrafter.from_pretrained(folder)
    weights.write_bytes(whole)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "medusa_num_layers": "one"}))
    with pytest.raises(ValueError, match="positive integer 'medusa_num_layers', got 'one'"):
        MedusaDrafter.from_pretrained(folder)
    write(tmp_path / "else", CONFIG, {"fc.weight": torch.zeros(2, 2)}, "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match=r"tensors of Medusa heads, such as .*got \['fc\.weight'\]"):
        MedusaDrafter.from_pretrained(tmp_path / "else")


def test_options() -> None:
    model = MedusaHeads(8, 16)
    with pytest.raises(ValueError, match="greedy must be True or False, got 1"):
        MedusaDrafter(model, greedy=1)  # type: ignore[arg-type]
    for options, message in (
        (dict(num_heads=0), "num_heads must be >= 1, got 0"),
        (dict(num_blocks=-1), "num_blocks must be >= 1, got -1"),
        (dict(output="none"), "output must be 'own', 'shared' or 'target' .*'none'"),
        (dict(layout="tgi"), "layout one of .*'tgi'"),
        (dict(vocab_size=None), "vocab_size must be an int >= 1 where output is 'own', got None"),
    ):
        with pytest.raises(ValueError, match=message):
            MedusaHeads(**{"hidden_size": 8, "vocab_size": 16, **options})  # type: ignore[arg-type]
