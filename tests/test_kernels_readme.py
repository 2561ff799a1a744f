"""kernels/README.md says what is there: its code runs, its signatures, fields and files are the real ones."""

import __future__

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import g_test
from kernel_cases import DEVICE
from tiny_models import greedy, perturbed, random_prompts, tiny

from engine.kernels import ops, philox, records

README = Path(__file__).resolve().parent.parent / "kernels/README.md"
TEXT = README.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def run(code: str) -> dict[str, Any]:
    """The names that a block of the README defines."""
    names: dict[str, Any] = {}
    exec(compile(code, str(README), "exec", __future__.annotations.compiler_flag), names)
    return names


@pytest.fixture
def loop() -> dict[str, Any]:
    """What the block with the decoding loop defines and uses."""
    return run(next(block for block in BLOCKS if "def generate" in block))


@pytest.fixture
def generate(loop: dict[str, Any]) -> Any:
    return loop["generate"]


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_signatures_are_those_of_the_calls() -> None:
    stubs = run("from engine.kernels.philox import SAMPLE\n" + next(b for b in BLOCKS if "def row_stats" in b))
    for name in ("row_stats", "sample", "verify"):
        assert parameters(stubs[name]) == parameters(getattr(ops, name)), name


def test_the_call_of_warmup_fits() -> None:
    from engine.kernels.warmup import warmup

    signature = inspect.signature(warmup)
    (code,) = (block for block in BLOCKS if "import warmup" in block)
    (call,) = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))
    signature.bind(**{keyword.arg: keyword.value for keyword in call.keywords if keyword.arg})


def test_fields_flags_streams_and_methods_are_the_real_ones() -> None:
    for record in (records.RowStats, records.Draws, records.Verdict):
        assert set(re.findall(rf"`{record.__name__}\.(\w+)`", TEXT)) == set(record._fields)
    flags = re.findall(r"\| (\d+) \| `Status\.(\w+)`", TEXT)
    assert {name: int(bit) for bit, name in flags} == {flag.name: flag.value for flag in records.Status}
    streams = re.findall(r"\| `(\w+)` = (\d) \|", TEXT)
    assert len(streams) == 4 and all(getattr(philox, name) == int(value) for name, value in streams)
    methods = re.findall(r"^\| `(\w+)` \|.*\| \*{0,2}(lossless|lossy)\*{0,2} \|$", TEXT, re.MULTILINE)
    assert tuple(name for name, _ in methods) == ops.METHODS
    assert tuple(name for name, kind in methods if kind == "lossless") == ops.LOSSLESS_METHODS


def test_every_file_that_is_named_exists() -> None:
    links = re.findall(r"\]\((?!http)([^)]+)\)", TEXT)
    assert len(links) > 15
    assert [link for link in links if not (README.parent / link).is_file()] == []
    bare = {name for name in re.findall(r"[\w/.]+\.py\b", TEXT) if not name.startswith("..")}
    homes = (README.parent, README.parent.parent, README.parent.parent / "tests")
    assert [name for name in bare if not any((home / name).is_file() for home in homes)] == []


def test_the_first_example_runs() -> None:
    names = run(BLOCKS[0])
    verdict = names["verdict"]
    assert verdict.tokens.shape == (2, 4) and (verdict.status == 0).all()
    assert ((verdict.tokens >= 0).sum(dim=1) == verdict.num_accepted + 1).all()


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("method", ops.METHODS)
def test_greedy_text_is_that_of_transformers(generate: Any, method: str, num_draft_tokens: int) -> None:
    target = tiny()
    for drafter, prompt in zip((perturbed(target, 0.1), tiny(seed=5)), random_prompts(2), strict=True):
        text = generate(target, drafter, torch.tensor([prompt]), 12, num_draft_tokens, method=method)
        assert text[0, len(prompt) :].tolist() == greedy(target, prompt, 12)


@pytest.mark.parametrize("method", ops.LOSSLESS_METHODS)
def test_sampled_text_is_reproducible(generate: Any, method: str) -> None:
    """By its seed; under coupled also by another drafter and with another K."""
    target = tiny()
    prompt = torch.tensor(random_prompts(2)[1:])

    def text(seed: int, amount: float = 0.1, num_draft_tokens: int = 4) -> list[int]:
        drafter = perturbed(target, amount)
        options = dict(temperature=0.9, seed=seed, method=method)
        return generate(target, drafter, prompt, 12, num_draft_tokens, **options)[0].tolist()

    assert text(1) == text(1) != text(2)
    if method == "coupled":
        assert text(1) == text(1, amount=0.5) == text(1, num_draft_tokens=1) == text(1, num_draft_tokens=0)


def agreement(generate: Any) -> float:
    """The p-value of two tokens over a vocabulary of 4, by a drafter that is far from the target."""
    target, drafter = (tiny(seed=seed, vocab_size=4) for seed in (3, 4))
    prompt = torch.tensor([[1, 2]])
    pairs = torch.cat([generate(target, drafter, prompt, 2, 2, 1.0, seed)[:, 2:] for seed in range(300)])
    texts = torch.cat([prompt.expand(4, -1), torch.arange(4)[:, None]], dim=1)
    with torch.no_grad():
        law = target(texts).logits.softmax(dim=-1)
    joint = law[0, 1, :, None] * law[:, 2]
    return g_test(pairs[:, 0] * 4 + pairs[:, 1], joint.flatten())


def test_sampled_text_has_the_law_of_the_target(generate: Any) -> None:
    assert agreement(generate) > 1e-3


def test_the_wrong_q_is_caught(loop: dict[str, Any]) -> None:
    """Negative control: the drafts are verified as if the target had drawn them."""

    def wrong(target_logits: Any, drafts: Any, *q: Any, **rest: Any) -> Any:
        return ops.verify(target_logits, drafts, target_logits[:, :-1], **rest)

    loop["verify"] = wrong
    assert agreement(loop["generate"]) < 1e-6


def test_the_kernels_decode_the_text_of_their_twins(generate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny(dtype=torch.float32).to(DEVICE)
    drafter, prompt = perturbed(target, 0.1), torch.tensor(random_prompts(2)[1:], device=DEVICE)
    texts = []
    for choice in ("torch", "triton"):
        monkeypatch.setenv("ENGINE_KERNELS", choice)
        texts.append(generate(target, drafter, prompt, 10, 3, 0.8, seed=6))
    assert torch.equal(*texts)


def test_a_target_without_a_distribution_ends_the_loop(generate: Any) -> None:
    target = tiny()
    drafter = perturbed(target, 0.1)
    with torch.no_grad():
        target.lm_head.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="position 1"):
        generate(target, drafter, torch.tensor([[1]]), 4)
