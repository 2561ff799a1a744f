"""README.md says what is there: its files exist, and its figures are those of the files that it names."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_architectures import BATCHES, DRAFT_LENGTHS, DRAFTERS
from test_other_architectures import CONFIGS as OTHERS
from tiny_models import CONFIGS, GROUPED_EXPERTS

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "bench" / "results"
HEAD = "eagle3-SmolLM2-135M-Instruct"
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("|")]


def cells(label: str, number: int = 0) -> list[str]:
    """Those behind a label, in the n-th row of README.md's tables that has it in its first or second column."""
    found = [row[row.index(label) + 1 :] for row in ROWS if label in row[:2]]
    return found[number]


def measured(folder: str, method: str) -> dict[str, str]:
    """The figures of a method over all prompts in a run's table.md, by the names of their columns."""
    lines = [line.strip("| ").split(" | ") for line in (RESULTS / folder / "table.md").read_text("utf-8").splitlines()]
    names = next(line for line in lines if line[0] == "category")
    return dict(zip(names, next(line for line in lines if line[:2] == ["all", method]), strict=True))


def figures(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def test_every_file_and_heading_that_is_linked_exists() -> None:
    links = re.findall(r"\]\((?!http)([^)]+)\)", TEXT)
    assert len(links) > 30
    headings = {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", TEXT, re.M)}
    assert [link for link in links if not (link[1:] in headings if link[0] == "#" else (ROOT / link).exists())] == []


@pytest.mark.parametrize(
    ("label", "number", "method"),
    [
        ("ours, plain", 0, "ours plain"),
        ('`"ngram"`', 1, "ours ngram K=auto"),
        ('`"suffix"`', 1, "ours suffix K=auto"),
        ("the packaged EAGLE-3 head", 0, f"ours {HEAD} K=auto"),
        (f'`"ngram+{HEAD}"`, the command line\'s default without `--target`', 0, f"ours ngram+{HEAD} K=auto"),
    ],
)
def test_drafters(label: str, number: int, method: str) -> None:
    found = measured("throughput_cpu", method)
    median, mean, worst, to_plain, tokens, _, outside = cells(label, number)
    assert [median, mean, worst] == [found["median"], found["mean"], found["worst"]]
    if to_plain:
        assert to_plain == f"{found['median to our plain']}, {found['worst to our plain']}"
    assert tokens == found["tokens per target call"] and re.fullmatch(r"\d+%", outside)


@pytest.mark.parametrize(
    ("label", "number", "method"),
    [
        ("`transformers` 5.23.0, plain", 0, "transformers plain"),
        ("`transformers`, prompt lookup", 0, "transformers lookup K=5"),
        ("flashspec 0.3.1, prompt lookup", 0, "flashspec lookup K=5"),
        ("economize 0.3.2, prompt lookup", 0, "economize lookup K=5"),
        ("ours, plain", -1, "ours plain"),
        ("ours, n-gram", 0, "ours ngram K=5"),
        ("ours, the packaged head", 0, f"ours {HEAD} K=5"),
        ("ours, n-gram or else the head", 0, f"ours ngram+{HEAD} K=5"),
    ],
)
def test_throughput_against_others(label: str, number: int, method: str) -> None:
    found = measured("throughput_cpu", method)
    assert cells(label, number) == [found[name] for name in ("median", "mean", "worst", "tokens per target call")]


def test_the_demo() -> None:
    for run in figures("demo_cpu.json")["prompts"]:
        assert cells(run["prompt"]) == [
            f"{run['plain_tokens_per_second']:.1f}",
            f"{run['speculative_tokens_per_second']:.1f}",
            f"{run['speedup']:.2f}x",
            f"{run['acceptance_rate']:.0%}",
            f"{run['block_efficiency']:.2f}",
            "yes" if run["identical"] else "no",
        ]


def test_the_packaged_head() -> None:
    """Its acceptance, and the kinds of prompts for which it drafts worst."""
    alone, behind_ngrams = figures("acceptance_cpu.json"), figures("acceptance_ngram_head_cpu.json")
    shares = ", ".join(f"{share:.2f}".lstrip("0") for share in alone["acceptance"])
    assert (
        cells("acceptance of its first, second, third, fourth draft, given that those before were accepted")[0]
        == shares
    )
    assert cells("tokens per target call, the head alone")[0] == f"{alone['block_efficiency']:.2f}"
    kinds = behind_ngrams["categories"]
    assert min(kinds, key=kinds.get) == "roleplay" and max(kinds, key=kinds.get) == "extraction"
    assert cells("tokens per target call, n-gram lookup or else the head")[0] == (
        f"{behind_ngrams['block_efficiency']:.2f}, from {kinds['roleplay']:.2f} (role play) to "
        f"{kinds['extraction']:.2f} (extraction)"
    )
    names = dict(summarization="summaries", roleplay="role play", qa="short questions")
    worst = sorted(alone["categories"].items(), key=lambda item: item[1])[:3]
    first, second, third = (f"{names[kind]} ({tokens:.2f}" for kind, tokens in worst)
    assert f"drafts worst in {first} tokens a target call, K = 4), {second}) and {third})" in " ".join(TEXT.split())


def test_numbers_of_architectures() -> None:
    assert (len(BATCHES), len(DRAFT_LENGTHS), len(DRAFTERS)) == (3, 4, 2)
    text = " ".join(TEXT.split())
    assert f"own on {len(CONFIGS)} architectures, three batch sizes, four K and two drafters" in text
    assert f"on {len(OTHERS)} more with n-grams" in text
    on_device = len(set(CONFIGS) - {"falcon", *GROUPED_EXPERTS})  # see test_pretend_cuda.py
    assert f"thirteen drafters and on {on_device} architectures" in text


def test_huge_pages() -> None:
    runs = ("with_1", "with_2", "without_1", "without_2")
    medians = [measured(f"huge_pages_cpu/{run}", "ours plain")["median"].rstrip("x") for run in runs]
    text = " ".join(TEXT.split())
    assert "plain decoding had {} and {} times the tokens/s of `transformers` with them, and {} and {} without".format(*medians) in text  # fmt: skip


def test_results_say_nothing_of_where_they_were_measured() -> None:
    for file in (ROOT / "bench" / "results").rglob("*"):
        if file.suffix in (".json", ".md"):
            assert not re.findall(r"/(?:work|opt|home|root|usr|tmp)/\S*", file.read_text()), file
