"""bench/throughput: who takes part. Draft models, ways to draft, transformers and other engines, presets."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import throughput_fakes
import throughput_runs
import torch
from graph_books import Books
from throughput_runs import ONE, essence, medusa, save
from tiny_models import tiny
from tiny_tokenizer import byte_tokenizer
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import engine
from bench.throughput import match, run
from bench.throughput.__main__ import main
from bench.throughput.forwards import ForwardClock
from bench.throughput.methods import Contest, Method
from bench.throughput.options import Options
from bench.throughput.other_engines import Economize, FlashSpec
from bench.throughput.ours import Ours, SampledStagedDrafts
from bench.throughput.presets import PRESETS
from bench.throughput.prompts import read_prompts, render
from bench.throughput.records import read_records
from bench.throughput.shared_models import SharedModels, load_models
from bench.throughput.summary import summarize
from bench.throughput.transformers_methods import Transformers, TransformersAssisted
from engine.graphs import Graphs

# fixtures
bench = throughput_runs.bench
draft = throughput_runs.draft
few_plots = throughput_runs.few_plots
one_thread = throughput_runs.one_thread
prompts = throughput_runs.prompts
target = throughput_runs.target

TRANSFORMERS = ("transformers plain", "transformers lookup K=2")


def test_cascades_are_no_models_for_others(bench: Callable[..., Path], draft: str) -> None:
    drafters = ("suffix", f"ngram+{draft}", "layer_skip:1-1", f"staged:{draft}", f"ngram+staged:{draft}")
    folder = bench("-d", *drafters, "-k", "2", baselines="plain assistant")
    records = read_records(folder)
    methods = list(dict.fromkeys(record["method"] for record in records))
    names = ("suffix", "ngram+small", "layer_skip:1-1", "staged:small", "ngram+staged:small")
    ours = [f"ours {name} K=2" for name in names]
    assert methods == ["ours plain", *ours, "transformers plain"]
    texts = [[r["token_ids"] for r in records if r["method"] == name] for name in methods]
    assert all(text == texts[0] for text in texts)
    for name in ("ngram+small", "staged:small", "ngram+staged:small"):
        assert sum(r["accepted_tokens"] for r in records if r["method"] == f"ours {name} K=2") > 0


def test_no_answer_is_drafted_from_itself(bench: Callable[..., Path], target: str) -> None:
    """A suffix drafter keeps its outputs, and the same prompt comes in the warm-up and in every repeat."""
    words = ("-d", "suffix", "ngram+suffix", "--categories", "talk", "--max-turns", "1", "--repeats", "3")
    records = read_records(bench(*words, baselines="plain", tokens="24"))
    ids = render(byte_tokenizer(), ["hello"], [], "auto")
    for name in ("suffix", "ngram+suffix"):
        fresh = engine.load(target, name, 5, dtype="float32")
        expected = fresh.generate(ids, engine.SamplingParams(max_new_tokens=24)).stats.rounds
        assert [r["rounds"] for r in records if r["method"] == f"ours {name} K=5"] == [expected] * 3, name


@pytest.mark.parametrize("temperature", ["0", "0.5"])
def test_an_interrupted_run_drafts_from_the_same_answers(bench: Callable[..., Path], temperature: str) -> None:
    """A suffix drafter drafts from earlier answers, those before the interruption among them."""
    words = ("-d", "suffix", "-T", temperature, "-k", "3")
    folder = bench(*words, baselines="plain", tokens="24")
    whole, path = essence(folder), folder / "records.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-3]))  # without the last prompt's
    bench(*words, baselines="plain", tokens="24")
    assert essence(folder) == whole


def test_nobody_has_a_checkpoints_repetition_penalty(
    bench: Callable[..., Path], target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(target, tmp_path / "penalised")
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "repetition_penalty": 1.5}))
    params = engine.SamplingParams(max_new_tokens=12)
    prompt = [ord(letter) for letter in "abcabcabc"]
    texts = [engine.load(each, dtype="float32").generate(prompt, params).token_ids for each in (target, folder)]
    assert texts[0] != texts[1]  # it would show
    records = read_records(bench("-t", str(folder), "-k", "2", tokens="12"))
    assert {r["method"] for r in records} == {"ours plain", "ours ngram K=2", *TRANSFORMERS}
    assert {difference for r in records for difference in r["differences"].values()} == {None}
    warmed: list[engine.SamplingParams] = []
    monkeypatch.setattr(Graphs, "for_device", lambda device: Books())
    monkeypatch.setattr(engine.Engine, "warmup", lambda self, sizes, lengths, params: warmed.append(params))
    Ours(None).prepare(load_models(Options(tmp_path, target=str(folder), dtypes=("float32",)), "float32"), ONE)
    assert [params.repetition_penalty for params in warmed] == [1.0]


def test_a_staged_model_is_loaded_once(target: str, draft: str, tmp_path: Path) -> None:
    """For all methods, staged or not; a folder goes by its name, and where it lies is looked at for changes."""
    elsewhere = Options(tmp_path, target=target, drafters=("staged:owner/name", f"ngram+staged:{draft}"))
    assert elsewhere.draft_checkpoints == ("owner/name", draft)
    assert elsewhere.as_dict()["drafters"] == ["staged:owner/name", "ngram+staged:small"]
    options = Options(tmp_path, target=target, drafters=(draft, f"staged:{draft}"), dtypes=("float32",))
    assert options.draft_models == (draft,)
    for each in (elsewhere, options):
        assert set(run.describe(each, [])["models"]) == {"target", "drafter small"}
    models = load_models(options, "float32")
    assert list(models.ours) == ["", draft]
    for drafts, kind in (("own", engine.StagedDraftModel), ("sampled", SampledStagedDrafts)):
        ours = Ours(f"staged:{draft}", 2, drafts=drafts)
        ours.prepare(models, ONE)
        assert type(ours._drafter) is kind and ours._drafter.model is models.ours[draft][0]


@pytest.mark.parametrize("rows, temperature", [(1, 0.0), (3, 0.7)])
def test_all_graphs_are_captured_before_the_first_prompt(
    monkeypatch: pytest.MonkeyPatch, rows: int, temperature: float
) -> None:
    """Also those of rounds in which rows have ended, and of the longest texts."""
    monkeypatch.setattr(Graphs, "for_device", lambda device: Books())
    monkeypatch.setattr(
        ForwardClock, "__enter__", lambda self: self
    )  # without hooks, as on a GPU: they would drop the graphs
    monkeypatch.setattr(ForwardClock, "__exit__", lambda *_: None)
    models = SharedModels({"": (tiny("llama", max_position_embeddings=600), None)}, 600, frozenset(), ignore_eos=True)
    for drafter, k in ((None, 0), ("ngram", 3)):
        ours = Ours(drafter, k, max_length=320)
        ours.prepare(models, Contest("float32", rows, temperature, 40))
        graphs = ours._llm._target.graphs
        before = len(graphs)
        ours.generate([[5, 6, 7] * (80 - 20 * row) for row in range(rows)], [1] * rows, 40)
        assert len(graphs) == before > 0


def test_draft_models_of_other_vocabularies(bench: Callable[..., Path], tmp_path: Path) -> None:
    """Their tokens are looked up or read anew, as `engine.load` would have it."""
    everywhere = {chr(letter): f"<{letter}>" for letter in range(ord("!"), ord("~"))}
    few = save(tmp_path / "few", "llama", tokenizer=byte_tokenizer({"a": "<a>", "b": "<b>"}))
    all_ = save(tmp_path / "all", "llama", tokenizer=byte_tokenizer(everywhere))
    records = read_records(bench("-d", few, all_, "-k", "2", baselines="plain"))
    methods = list(dict.fromkeys(record["method"] for record in records))
    assert methods == ["ours plain", "ours few K=2", "ours all K=2", "transformers plain"]
    texts = [[r["token_ids"] for r in records if r["method"] == name] for name in methods]
    assert all(text == texts[0] for text in texts)
    assert sum(r["accepted_tokens"] for r in records if r["method"] == methods[1]) > 0


def test_ways_to_draft(bench: Callable[..., Path], draft: str) -> None:
    folder = bench(
        "-T",
        "0",
        "1",
        "-d",
        draft,
        "--drafts",
        "greedy",
        "sampled",
        "-k",
        "3",
        "--categories",
        "edit",
        baselines="plain",
        tokens="16",
    )
    found = summarize(read_records(folder), "transformers plain")
    cold, warm = ({s.method: s for s in summaries} for summaries in found.values())
    assert list(cold) == ["ours plain", "ours small K=3", "ours small K=3, sampled drafts", "transformers plain"]
    assert list(warm) == ["ours plain", "ours small K=3, greedy drafts", "ours small K=3", "transformers plain"]
    for summary in list(cold.values())[1:]:
        assert set(summary.compared_with("ours plain")) == {None}
    greedily, sampled = cold["ours small K=3"].acceptance, cold["ours small K=3, sampled drafts"].acceptance
    assert greedily is not None and sampled is not None and greedily > sampled > 0


def test_ways_to_draft_of_others(bench: Callable[..., Path], draft: str, tmp_path: Path) -> None:
    """Staged drafts can be sampled for a greedy target too; lookups have one way."""
    head = medusa(tmp_path)
    drafters = ("ngram", "layer_skip:1-1", head, f"staged:{draft}", f"ngram+staged:{draft}")
    words = ("-d", *drafters, "--drafts", "greedy", "sampled", "-T", "0", "1", "-k", "2", "--categories", "edit")
    found = summarize(read_records(bench(*words, baselines="plain", tokens="12")), "transformers plain")
    cold, warm = (
        [s.method.removeprefix("ours ").replace(" K=2", "") for s in summaries] for summaries in found.values()
    )
    staged, first, last = "staged:small", ["plain", "ngram"], ["transformers plain"]
    assert cold == [*first, "layer_skip:1-1", "head", staged, f"{staged}, sampled drafts", f"ngram+{staged}", *last]
    ours = ("layer_skip:1-1", "head", staged, f"ngram+{staged}")
    assert warm == [*first, *(way for name in ours for way in (f"{name}, greedy drafts", name)), *last]
    for summary in next(iter(found.values()))[1:]:
        assert set(summary.compared_with("ours plain")) == {None}


def test_greedy_drafts_are_asked_of_every_stage(target: str, draft: str, tmp_path: Path) -> None:
    head = medusa(tmp_path)
    drafters = (draft, f"staged:{draft}", f"suffix+staged:{draft}", "layer_skip:1", head, f"ngram+{head}")
    models = load_models(Options(tmp_path, target=target, drafters=drafters, dtypes=("float32",)), "float32")
    for drafter in drafters:
        for drafts in ("own", "greedy"):
            ours = Ours(drafter, 2, drafts=drafts)
            ours.prepare(models, Contest("float32", 1, 0.8, 8))
            made = ours._llm.drafter
            stage = getattr(made, "stages", (made,))[-1]
            assert stage.greedy is (drafts == "greedy"), drafter


def test_top_p_is_that_of_all_methods(bench: Callable[..., Path]) -> None:
    """Where it leaves the likeliest token alone, the texts are those of greedy decoding."""
    texts = []
    for words in (("-T", "0"), ("-T", "0.8", "--top-p", "1e-6", "--restart")):
        folder = bench(*words, "--max-turns", "1", "-k", "2", baselines="plain lookup", tokens="6")
        found = read_records(folder)
        texts.append({(record["question_id"], record["method"]): record["token_ids"] for record in found})
    assert texts[0] == texts[1] and len(texts[0]) > 4
    assert "temperature 0.8, top-p 1e-06" in (folder / "table.md").read_text(encoding="utf-8")


def test_more_prompts_than_a_batch_in_a_call(bench: Callable[..., Path]) -> None:
    """transformers takes batch after batch, and the texts are those of single prompts."""
    texts = []
    for words in ((), ("--restart", "-b", "2", "--batches-per-call", "2")):
        folder = bench(*words, "--max-turns", "1", "-k", "2", baselines="plain lookup", tokens="8")
        records = read_records(folder)
        texts.append({(r["method"], r["line"]): r["token_ids"] for r in records})
    assert {name for name, _ in texts[1]} == {"ours plain", "ours ngram K=2", "transformers plain"}
    assert all(texts[0][key] == tokens for key, tokens in texts[1].items())
    assert len({r["group"] for r in records}) == 1
    for name in ("ours plain", "transformers plain"):
        mine = [r for r in records if r["method"] == name]
        assert {r["call_tokens"] for r in mine} == {sum(r["new_tokens"] for r in mine)}
        assert {r["prefill_tokens"] for r in mine} == {3 if name == "transformers plain" else 0}
    assert "batch 2 of 4 prompts a call, greedy" in (folder / "table.md").read_text()
    (found,) = summarize(records, "transformers plain").values()
    assert {summary.parts_per_round() for summary in found} == {None}  # rows come and go


def test_auto_is_for_the_engine_to_choose(bench: Callable[..., Path]) -> None:
    """Others need a number: 5, if none is given."""
    folder = bench("-k", "auto", "--categories", "edit", "--load-option", "max_length=100", baselines="plain lookup")
    records = read_records(folder)
    theirs = {"transformers plain", "transformers lookup K=5"}
    assert {r["method"] for r in records} == {"ours plain", "ours ngram K=auto"} | theirs
    assert {r["error"] for r in records} == {None}


def test_a_static_cache_gives_the_same_text(target: str, tmp_path: Path) -> None:
    """Not compiled here: that is for a GPU."""
    models = load_models(Options(out=tmp_path, target=target, dtypes=("float32",)), "float32")
    texts = []
    for method in (Transformers(), Transformers(compiled=True)):
        method.prepare(models, ONE)
        call = method.generate([[5, 6, 7, 5, 6]], [0], 8)
        assert call.prefill_tokens == 1 and call.prefill_seconds is not None and call.prefill_seconds > 0
        texts.append(call.rows[0].token_ids)
        method.close()
    assert texts[0] == texts[1]


def test_a_static_cache_has_its_size_before_anything_is_timed(
    bench: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one is another shape, for which a GPU compiles again. Second turns are longer, a last call has fewer rows."""
    sizes: list[tuple[int, int]] = []
    generate = Transformers.generate

    def noted(self: Any, *arguments: Any) -> Any:
        call = generate(self, *arguments)
        if self.full_warmup:
            sizes.append((len(arguments[0]), self._model._previous_max_cache_length))
        return call

    monkeypatch.setattr(Transformers, "generate", noted)
    monkeypatch.setattr(Transformers, "unavailable", lambda *_: None)  # as on a GPU
    bench("-b", "2", "-d", baselines="plain compiled")
    rows = [2, 1, *(2, 1, 1)]  # in two calls to warm up, and three that are timed
    assert [size for size, _ in sizes] == rows and len({length for _, length in sizes}) == 1


def test_prompt_lookup_is_counted_call_by_call(target: str, tmp_path: Path) -> None:
    """Beside what transformers' own candidate generator says that it proposed."""
    models = load_models(Options(out=tmp_path, target=target, dtypes=("float32",)), "float32")
    proposed: list[int] = []
    get_candidates = PromptLookupCandidateGenerator.get_candidates

    def noted(self: Any, input_ids: torch.Tensor, **more: Any) -> Any:
        candidates, logits = get_candidates(self, input_ids, **more)
        proposed.append(candidates.shape[1] - input_ids.shape[1])
        return candidates, logits

    method = TransformersAssisted(3)
    method.prepare(models, ONE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptLookupCandidateGenerator, "get_candidates", noted)
        row = method.generate([[97, 98, 99, 97, 98, 99, 97, 98]], [0], 30).rows[0]
    assert row.rounds == len(proposed) and row.draft_tokens == sum(proposed) > proposed[0] > 0
    plain = Transformers()
    plain.prepare(models, ONE)
    assert row.token_ids == plain.generate([[97, 98, 99, 97, 98, 99, 97, 98]], [0], 30).rows[0].token_ids


# Other engines.


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, module in throughput_fakes.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield


def test_missing_engines_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for method in (FlashSpec(4), Economize(4)):
        monkeypatch.setattr(type(method), "module", "no_such_engine")
        assert method.unavailable(ONE, "cpu") == (
            "cannot import no_such_engine: ModuleNotFoundError: No module named 'no_such_engine'"
        )


def test_adapters_against_stand_ins(fakes: None, bench: Callable[..., Path], draft: str) -> None:
    """What they hand over has the shapes and meaning that the two engines document."""
    folder = bench(
        "-d", "ngram", draft, "-k", "3", "-T", "0", "0.5", "--categories", "edit", baselines="plain flashspec economize"
    )
    records = read_records(folder)
    names = {r["method"] for r in records if not r["method"].startswith(("ours", "transformers"))}
    expected = {f"{library} {drafter} K=3" for library in ("flashspec", "economize") for drafter in ("lookup", "small")}
    assert names == expected | {"flashspec small default"}
    for record in records:
        if record["method"] in names:
            assert record["error"] is None
            if record["method"] == "economize small K=3":  # which reads the prompts behind the target's first logits
                assert record["prefill_seconds"] is None
            else:
                assert record["prefill_seconds"] > 0
            assert record["rounds"] >= 2 and record["draft_tokens"] > 0
            if record["contest"]["temperature"] == 0:
                assert record["differences"] == {"ours plain": None, "transformers plain": None}


def test_each_prompt_has_a_seed_of_its_own(fakes: None, target: str, tmp_path: Path) -> None:
    models = load_models(Options(out=tmp_path, target=target, dtypes=("float32",)), "float32")
    method = FlashSpec(2)
    method.prepare(models, Contest("float32", 1, 0.7, 4))
    for seed in (3, 1003):
        method.generate([[5, 6]], [seed], 4)
    assert method._engine.seeds == [3, 1003]


def test_no_other_engine_decodes_more_rows_than_a_batch(fakes: None, target: str, tmp_path: Path) -> None:
    models = load_models(Options(out=tmp_path, target=target, dtypes=("float32",)), "float32")
    method = Economize(2)
    method.prepare(models, Contest("float32", 2, 0.0, 4, batches_per_call=2))
    sizes: list[int] = []
    decode_batch = method._model.decode_batch

    def noted(prompts: list[torch.Tensor], *arguments: Any, **more: Any) -> Any:
        sizes.append(len(prompts))
        return decode_batch(prompts, *arguments, **more)

    method._model.decode_batch = noted
    call = method.generate([[5, 6], [7, 8, 9], [10]], [0, 1, 2], 4)
    assert sizes == [2, 1] and len(call.rows) == call.prefill_tokens == 3
    assert call.prefill_seconds is not None and call.prefill_seconds > 0


# Presets.

# What stands in for a family; of OPT-350M also what sets it apart: norms behind, and embeddings narrower than the rest.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt2": ("gpt2", {}, {}),
    "opt": ("opt", dict(do_layer_norm_before=False, word_embed_proj_dim=16), {}),
    "pythia": ("gpt_neox", dict(use_parallel_residual=True), dict(use_parallel_residual=True)),
    "llama": ("llama", dict(tie_word_embeddings=True), dict(tie_word_embeddings=True)),
}


@pytest.mark.parametrize(
    "name",
    # The two that are left out differ from another one of their family in the names and numbers alone.
    [pytest.param(name, marks=pytest.mark.slow if name.startswith("pythia-2.8b") else ()) for name in PRESETS],
)
def test_presets_on_stand_ins(name: str, tmp_path: Path) -> None:
    preset = PRESETS[name]
    family = next(key for key in FAMILIES if name.startswith(key))
    architecture, big, small = FAMILIES[family]
    target = save(tmp_path / "big", architecture, **big)
    count = len(preset["drafters"])
    drafters = [save(tmp_path / f"small{i}", architecture, **small, num_hidden_layers=1) for i in range(count)]
    out = tmp_path / "out"
    words = ["--preset", name, "--out", str(out), "--target", target, "--drafters", *drafters, "-n", "5"]
    assert main([*words, "--dtypes", "float32"]) == 0
    about = json.loads((out / "run.json").read_text())
    options = about["options"]
    assert about["complete"] and about["skipped"] == []
    assert options["max_new_tokens"] == [5] and options["num_draft_tokens"] == list(preset["num_draft_tokens"])
    records = read_records(out)
    ks = preset["num_draft_tokens"]
    for drafter in range(count):
        for k in ks:
            for method in (f"ours small{drafter} K={k}", f"ours small{drafter} K={k}, sampled drafts"):
                mine = [r for r in records if r["method"] == method]
                assert [r["category"] for r in mine] == [
                    "The future of AI",
                    "Robot learning emotions",
                    "Happy Birthday lyrics",
                ]
                assert all(r["new_tokens"] == 5 and set(r["differences"].values()) == {None} for r in mine)
    assert len(records) == 3 * (1 + 2 * count * len(ks) + 2 + count * len(ks))


def test_presets_name_what_they_are() -> None:
    assert PRESETS["gpt2"]["max_new_tokens"] == (50, 100, 200, 500)
    assert PRESETS["gpt2"]["num_draft_tokens"] == (1, 2, 4, 8)
    for preset in PRESETS.values():
        options = Options(out=Path("/nowhere"), **preset)
        assert [p.turns[0] for p in read_prompts(options.prompts)] == [
            "The future of AI",
            "Robot learning emotions",
            "Happy Birthday lyrics",
        ]
        assert "no-cache" in options.baselines and options.drafts == ("greedy", "sampled")


def test_methods_go_in_turn(bench: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one goes first for each prompt; synthetic drafters come last, since they need plain's text."""
    order: list[str] = []
    timed = match.timed

    def noted(call: Any, device: Any) -> Any:
        order.append(call.func.__self__.name)
        return timed(call, device)

    monkeypatch.setattr(match, "timed", noted)
    bench("-d", "ngram", "synthetic:0.5", "-k", "2", "--max-turns", "1", baselines="plain")
    names = ["ours plain", "ours ngram K=2", "ours synthetic 0.5 K=2 (not a real drafter)", "transformers plain"]
    a, b, s, t = names
    assert order == [a, b, t, s, b, t, a, s, t, a, b, s]


def test_all_are_loaded_before_one_is_warmed_up(bench: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What one loads may have torch.compile compile another anew."""
    steps: list[tuple[str, str]] = []

    def note(kind: type[Any], step: str) -> None:
        original = getattr(kind, step)

        def noted(self: Method, *arguments: Any) -> Any:
            steps.append((step, self.name))
            return original(self, *arguments)

        monkeypatch.setattr(kind, step, noted)

    for kind in (Ours, Transformers):
        note(kind, "prepare")
        note(kind, "generate")
    bench("-d", "ngram", "-k", "2", "--max-turns", "1", baselines="plain")
    names = ["ours plain", "ours ngram K=2", "transformers plain"]
    assert steps[:6] == [(step, name) for step in ("prepare", "generate") for name in names]


def test_every_method_is_one() -> None:
    for method in (Ours(None), Ours("ngram", 3), Transformers(), FlashSpec(None, "x/y"), Economize(2)):
        assert isinstance(method, Method) and method.name
