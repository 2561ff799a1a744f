"""README.md says what is there: its files exist, and its figures are those of the files that it names."""

import json
import re
from itertools import takewhile
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
from test_architectures import BATCHES, DRAFT_LENGTHS, DRAFTERS, SAMPLE, WHOLE
from test_other_architectures import CONFIGS as OTHERS
from tiny_models import CONFIGS, GROUPED_EXPERTS

from engine.demo_prompts import PROMPTS

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "bench" / "results"
HEAD = "eagle3-SmolLM2-135M-Instruct"


def rows_of(text: str) -> list[list[str]]:
    """The cells of all rows of all tables."""
    lines = (line.strip() for line in text.splitlines())
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line.startswith("|")]


ROWS = rows_of(TEXT)


def cells(label: str, number: int = 0) -> list[str]:
    """Those behind a label, in the n-th row of README.md's tables that has it in its first or second column."""
    found = [row[row.index(label) + 1 :] for row in ROWS if label in row[:2]]
    return found[number]


def measured(folder: str, method: str, category: str = "all") -> dict[str, str]:
    """The figures of a method over all prompts in a run's table.md, by the names of their columns."""
    lines = rows_of((RESULTS / folder / "table.md").read_text(encoding="utf-8"))
    names = next(line for line in lines if line[0] == "category")
    found = dict(zip(names, next(line for line in lines if line[:2] == [category, method]), strict=True))
    parts = next((line for line in lines if line[0] == method), None)  # times of a round; not of slots
    names = next((line for line in lines if line[0] == "method"), [])
    return found | dict(zip(names, parts or [], strict=False))


def figures(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "CHANGELOG.md",
        "kernels/README.md",
        f"engine/heads/{HEAD}/README.md",
        "recipes/smollm2_135m_instruct/README.md",
    ],
)
def test_every_file_and_heading_that_is_linked_exists(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!http)([^)]+)\)", text)
    assert len(links) > 30 or name != "README.md"
    headings = {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text, re.M)}
    folder = (ROOT / name).parent
    assert [link for link in links if not (link[1:] in headings if link[0] == "#" else (folder / link).exists())] == []


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
    draft, verify, overhead = (float(found[f"{part}, ms"]) for part in ("draft", "verify", "overhead"))
    drafting, outside = draft / (draft + verify + overhead), float(found["outside forwards"].rstrip("%")) / 100
    is_plain = method == "ours plain"
    assert cells(label, number) == [
        *(found[name] for name in ("median", "mean", "worst")),
        "" if is_plain else f"{found['median to our plain']}, {found['worst to our plain']}",
        found["tokens per target call"],
        "" if is_plain else f"{drafting:.0%}",
        f"{outside:.0%}",
    ]


PROCESSORS = [
    *("throughput_cpu", "throughput_compiled_cpu", "throughput_epyc_cpu", "throughput_epyc_compiled_cpu"),
    *("throughput_avx2_cpu", "throughput_float32_avx2_cpu"),
]


@pytest.mark.parametrize("folder", PROCESSORS)
def test_processors(folder: str) -> None:
    at = next(i for i, row in enumerate(ROWS) if row[0] == "processor")
    first = next(i for i, row in enumerate(ROWS) if i > at and f"[{folder}]" in row[-1])
    others = takewhile(lambda row: row[0] == "", ROWS[first + 1 :])
    rows = {row[1]: row[2:5] for row in (ROWS[first], *others)}
    names = {
        "`transformers` plain": "transformers plain",
        "ours, plain": "ours plain",
        '`"ngram"`': "ours ngram K=auto",
        "n-gram or else the head": f"ours ngram+{HEAD} K=auto",
    }
    assert len(rows) == 4 - ("compiled" in folder or "float32" in folder)
    for label, (against_others, to_plain, tokens) in rows.items():
        found = measured(folder, names[label])
        drafts, ours = "K=" in names[label], "ours" in names[label]
        assert against_others == (", ".join(found[name] for name in ("median", "mean", "worst")) if ours else "")
        assert to_plain == (f"{found['median to our plain']}, {found['worst to our plain']}" if drafts else "")
        assert abs(float(tokens) - float(found["tokens/s"])) < 0.551  # rounded twice


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


@pytest.mark.parametrize(
    ("label", "method"),
    [
        ("`transformers`, prompt lookup", "transformers lookup K=5"),
        ("flashspec, prompt lookup", "flashspec lookup K=5"),
        ("economize, prompt lookup", "economize lookup K=5"),
        ("ours, n-gram", "ours ngram K=5"),
        ("ours, n-gram or else the head", f"ours ngram+{HEAD} K=5"),
    ],
)
def test_throughput_against_others_on_the_epyc(label: str, method: str) -> None:
    found = measured("throughput_epyc_cpu", method)
    assert cells(label, -1) == [found[name] for name in ("median", "mean", "worst")]


@pytest.mark.parametrize(("label", "folder"), [("8 slots", "slots_cpu"), ("calls of 8", "batch_cpu")])
def test_many_prompts(label: str, folder: str) -> None:
    """All their tokens over all seconds."""
    methods = ("transformers plain", "ours plain", "ours ngram K=auto", f"ours ngram+{HEAD} K=auto")
    others, *ours = (float(measured(folder, method, "mixed")["tokens/s"]) for method in methods)
    for cell, tokens in zip(cells(label)[:-1], ours, strict=True):
        assert abs(float(cell.rstrip("x")) - tokens / others) < 0.006


@pytest.mark.parametrize(
    ("label", "folder", "method"),
    [
        ('temperature 0.7, `rejection`, `"auto"`', "drafters_cpu_sampled", f"ours ngram+{HEAD} K=auto"),
        ('temperature 0.7, `block`, `"auto"`', "drafters_cpu_sampled", f"ours ngram+{HEAD} K=auto block"),
        ('temperature 0.7, top-p 0.9, `rejection`, `"auto"`', "sampled_top_p_cpu", f"ours ngram+{HEAD} K=auto"),
        ('temperature 0.7, top-p 0.9, `block`, `"auto"`', "sampled_top_p_cpu", f"ours ngram+{HEAD} K=auto block"),
        ("`transformers`, prompt lookup, with these settings", "sampled_top_p_cpu", "transformers lookup K=5"),
        (
            'on the EPYC with AVX2: temperature 0.7, `rejection`, `"auto"`',
            "sampled_avx2_cpu",
            f"ours ngram+{HEAD} K=auto",
        ),
        (
            'on the EPYC with AVX2: temperature 0.7, `block`, `"auto"`',
            "sampled_avx2_cpu",
            f"ours ngram+{HEAD} K=auto block",
        ),
    ],
)
def test_sampled_drafts(label: str, folder: str, method: str) -> None:
    found = measured(folder, method)
    assert cells(label)[:3] == [found[name] for name in ("median", "mean", "worst")]


def rates(folder: str, dtype: str) -> dict[str, dict[tuple[int, int], float]]:
    """Tokens/s by method and prompt."""
    found: dict[str, dict[tuple[int, int], float]] = {}
    for line in (RESULTS / folder / "records.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["contest"]["dtype"] == dtype:
            rate = record["new_tokens"] / record["seconds"]
            found.setdefault(record["method"], {})[record["line"], record["turn"]] = rate
    return found


def test_half_precision_against_transformers_in_float32() -> None:
    ours, others = (rates("throughput_float32_avx2_cpu", dtype) for dtype in ("bfloat16", "float32"))
    medians = [
        median(rate / others["transformers plain"][key] for key, rate in ours[name].items())
        for name in ("ours plain", f"ours ngram+{HEAD} K=auto")
    ]
    text = " ".join(TEXT.split())
    assert f"to {medians[0]:.2f} times the tokens/s in the median" in text and f"to {medians[1]:.2f} times with" in text


def test_sampled_drafts_without_the_best_ratio() -> None:
    found = rates("sampled_avx2_cpu", "bfloat16")
    others = found["transformers plain"]
    ratios = {name: sorted(rate / others[key] for key, rate in each.items()) for name, each in found.items()}
    kept = [ratios[f"ours ngram+{HEAD} K=auto{rule}"] for rule in ("", " block")]
    assert [round(each[-1]) for each in kept] == [14, 14]
    assert "has 14x under both" in TEXT and f"are {mean(kept[0][:-1]):.2f}x and {mean(kept[1][:-1]):.2f}x." in TEXT


def test_fixed_drafts() -> None:
    found = [measured("draft_length_cpu", f"ours ngram+{HEAD} K={k}") for k in (1, 2, 3, 4, 6)]
    columns = [", ".join(each[name] for each in found) for name in ("median", "mean", "worst")]
    assert cells("greedy, K = 1, 2, 3, 4, 6")[:3] == columns


@pytest.mark.parametrize(
    ("folder", "drafter"), [("layer_skip_cpu", "layer_skip:20"), ("medusa_cpu", "medusa-2-epochs")]
)
def test_drafters_that_do_not_pay(folder: str, drafter: str) -> None:
    two, auto = (measured(folder, f"ours {drafter} K={k}") for k in ("2", "auto"))
    row = next(row for row in ROWS if f"[{folder}]" in row[-1])
    assert row[1] == two["acceptance by position"].split()[0].lstrip("0")
    assert row[2] == f"{two['median to our plain']} of our plain"
    assert row[3] == f"{auto['median to our plain']} of our plain, at worst {auto['worst to our plain']}"


def test_the_demo() -> None:
    runs = figures("demo_cpu.json")["prompts"]
    assert len(runs) == len(PROMPTS)
    for run in runs:
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
    assert (len(BATCHES), len(DRAFT_LENGTHS), len(DRAFTERS), len(SAMPLE), len(WHOLE)) == (3, 4, 2, 6, 24)
    text = " ".join(TEXT.split())
    assert (
        f"own on {len(CONFIGS)} architectures, three batch sizes, four K and two drafters (six of these 24 ways; all under `-m slow`)"
        in text
    )
    assert f"on {len(OTHERS)} more with n-grams" in text
    on_device = len(set(CONFIGS) - {"falcon", *GROUPED_EXPERTS})  # see test_pretend_cuda.py
    assert f"thirteen drafters and on {on_device} architectures" in text


def test_huge_pages() -> None:
    runs = ("with_1", "with_2", "without_1", "without_2")
    medians = [measured(f"huge_pages_cpu/{run}", "ours plain")["median"].rstrip("x") for run in runs]
    text = " ".join(TEXT.split())
    assert "plain decoding had {} and {} times the tokens/s of `transformers` with them, and {} and {} without".format(*medians) in text  # fmt: skip


def test_results_say_nothing_of_where_they_were_measured() -> None:
    files = [file for file in RESULTS.rglob("*") if file.suffix in (".json", ".md")]
    assert RESULTS / "throughput_cpu" / "table.md" in files
    for file in files:
        assert not re.findall(r"/(?:work|opt|home|root|usr|tmp)/\S*", file.read_text()), file
