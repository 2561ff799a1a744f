"""What `train_drafter` makes of its options: each reaches the part of the work that it is for.

A run that drops one still ends with a drafter that works, and with a card that says something else.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import tiny
from training_cases import PROMPTS, options, write_target

import engine
from engine.training import hidden_files, initial_model, run
from engine.training.answers import answer_prompts, read_answers
from engine.training.options import TrainingOptions
from engine.training.run import train_drafter

OWN = {
    "eagle3": dict(num_steps=2),
    "medusa": dict(num_steps=2),
    "mlp": dict(num_steps=2),
    "draft-model": dict(num_layers=2),
}


class Stop(Exception):
    """Ends a run where the training would begin."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def up_to_the_training(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, ...]]:
    """Runs `train_drafter` so far; returns what the loop would have got."""

    def begin(prompts: Any, out: Path, chosen: TrainingOptions) -> tuple[Any, ...]:
        found: list[tuple[Any, ...]] = []

        def stop(*given: Any) -> None:
            found.append(given)
            raise Stop

        monkeypatch.setattr(run, "train", stop)
        with pytest.raises(Stop):
            train_drafter(prompts, out, chosen)
        return found[0]

    return begin


@pytest.mark.parametrize("method", OWN)
def test_every_option_is_used(
    method: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, up_to_the_training: Any
) -> None:
    told: dict[str, Any] = {}
    frequent = initial_model.frequent_tokens

    def watched_answers(llm: engine.Engine, prompts: Any, file: Path, *given: Any) -> Any:
        told["answers"], told["batch"] = given, llm.config.max_batch_size
        return answer_prompts(llm, prompts, file, *given)

    def watched_frequent(answers: Any, *given: Any) -> Any:
        told["frequent"] = len(answers)
        return frequent(answers, *given)

    monkeypatch.setattr(run, "answer_prompts", watched_answers)
    monkeypatch.setattr(initial_model, "frequent_tokens", watched_frequent)
    chosen = options(
        target, method, seed=7, learning_rate=3e-3, tokens_per_batch=333, epochs=3, learn_prompts=True, max_new_tokens=5,
        temperatures=(0.3, 0.9), max_length=40, batch_size=3, validation_share=0.25, loss="lk", **OWN[method],
    )  # fmt: skip
    module, texts, validation, _, trained = up_to_the_training(PROMPTS, tmp_path, chosen)
    assert told["answers"] == ((0.3, 0.9), 5, 7, 40) and told["batch"] == 3
    for name in ("epochs", "learning_rate", "tokens_per_batch", "seed", "learn_prompts"):
        assert getattr(trained, name) == getattr(chosen, name)
    assert [sum(map(len, part)) for part in (texts, validation)] == [18, 6]
    assert module.loss == "lk"
    if method == "draft-model":
        assert module.head.config.num_hidden_layers == 2
    else:
        assert module.num_steps == 2
    if method == "eagle3":
        assert told["frequent"] == 18  # its vocabulary knows nothing of what is held back


@pytest.mark.parametrize(("max_length", "longest"), [(30, 30), (1000, 48)])
def test_no_text_is_longer_than_the_options_or_the_target_allow(
    max_length: int, longest: int, target: Path, tmp_path: Path, up_to_the_training: Any
) -> None:
    chosen = options(target, chat=False, max_length=max_length, max_new_tokens=200)
    up_to_the_training(PROMPTS[:4], tmp_path, chosen)
    found = read_answers(tmp_path / "work" / "answers.jsonl")
    assert max(len(answer.prompt_token_ids) + len(answer.token_ids) for answer in found) == longest


def test_answers_are_sampled_each_with_its_temperature_and_seed(target: Path, tmp_path: Path) -> None:
    """Else prompts that come twice get the same answer, and the drafter learns one temperature only."""
    llm = engine.load(str(target), None, exact=False)
    prompts, temperatures = [[5, 6, 7]] * 6, (0.0, 0.9, 1.5)
    found = answer_prompts(llm, prompts, tmp_path / "answers.jsonl", temperatures, 12, 40)
    params = [engine.SamplingParams(temperatures[i % 3], seed=40 + i, max_new_tokens=12) for i in range(6)]
    assert [answer.token_ids for answer in found] == [output.token_ids for output in llm.generate(prompts, params)]
    assert len({tuple(answer.token_ids) for answer in found}) == 5  # the greedy ones are the same


def test_prompts_are_answered_in_the_same_groups_after_an_interruption(tmp_path: Path) -> None:
    """In bf16 an answer may depend on who shares its batch, so a group of which a part was written is done again."""
    prompts, file, asked = [[i] for i in range(20)], tmp_path / "answers.jsonl", []

    def generate(group: list[list[int]], params: Any, progress: bool) -> list[Any]:
        asked.append(sorted(token for (token,) in group))
        return [SimpleNamespace(prompt_token_ids=prompt, token_ids=[7]) for prompt in group]

    llm: Any = SimpleNamespace(config=SimpleNamespace(max_batch_size=1), generate=generate, target_model=tiny())
    whole = answer_prompts(llm, prompts, file, (0.0,), 1, 0)
    before, lines = list(asked), file.read_bytes().splitlines(keepends=True)
    assert len(before) == 3 and len(before[1]) == 8
    file.write_bytes(b"".join(lines[:11]))
    asked.clear()
    assert answer_prompts(llm, prompts, file, (0.0,), 1, 0) == whole
    assert asked == before[1:] and file.read_bytes() == b"".join(lines)


def test_prompts_without_an_answer_are_left_out(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    up_to_the_training: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The target returned NaN for them: the others are answered and learned from all the same."""
    generate, failing = engine.Engine.generate, {2, 3, len(PROMPTS) - 1}

    def with_failures(self: engine.Engine, prompts: Any, *given: Any, **named: Any) -> Any:
        outputs: list[Any] = generate(self, prompts, *given, **named)
        bad = [index for index, prompt in enumerate(prompts) if prompt in [ids[i] for i in failing]]
        for index in bad:
            outputs[index] = None
        if bad:
            raise engine.InvalidLogitsError("NaN", outputs, dict.fromkeys(bad, "NaN"))
        return outputs

    ids: list[list[int]] = []
    encoded = run._encoded
    monkeypatch.setattr(run, "_encoded", lambda *given: ids.extend(encoded(*given)) or ids)
    monkeypatch.setattr(engine.Engine, "generate", with_failures)
    _, texts, validation, *_ = up_to_the_training(PROMPTS, tmp_path, options(target, validation_share=0.25))
    assert [sum(map(len, part)) for part in (texts, validation)] == [15, 6]
    found = read_answers(tmp_path / "work" / "answers.jsonl")
    assert {i for i, answer in enumerate(found) if not answer.token_ids} == failing
    assert [f"prompts[{i}] is left out" in caplog.text for i in (1, 2, 3, 23)] == [False, True, True, True]
    failing |= set(range(23))
    with pytest.raises(engine.EngineError, match="one of them for validation, got 0"):
        train_drafter(PROMPTS, tmp_path / "none", options(target))


def test_prompts_that_are_held_back_and_learned_from(
    target: Path, tmp_path: Path, up_to_the_training: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = ["one", "two", "three", "four", "five"]
    chosen = options(target, "medusa", validation_share=0.3, max_new_tokens=2)
    warnings = []
    for last in ("four", "six"):
        caplog.clear()
        up_to_the_training([*prompts, last], tmp_path / last, chosen)
        warnings.append([record.getMessage() for record in caplog.records])
    ((warning,), none) = warnings
    assert warning.startswith("of 2 prompts that are held back, 1 are learned from too") and not none


def test_first_weights_are_the_seeds(target: Path, tmp_path: Path, up_to_the_training: Any) -> None:
    """So that a run can be repeated, and repeated with other ones."""
    made = []
    for index, seed in enumerate((1, 1, 2)):
        chosen = options(target, "mlp", seed=seed, max_new_tokens=2)
        made.append(up_to_the_training(PROMPTS[:2], tmp_path / str(index), chosen)[0].head.state_dict())
    same = [all(torch.equal(made[0][name], other[name]) for name in made[0]) for other in made[1:]]
    assert same == [True, False]


def test_hidden_states_of_both_parts_stay_within_the_room(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, up_to_the_training: Any
) -> None:
    """`max_disk_gb` is for all of them; those of the validation, which every epoch reads whole, go first."""
    monkeypatch.setattr(hidden_files, "TEXTS_PER_GROUP", 4)

    def written(part: hidden_files.KeptTexts) -> list[float]:
        """Bytes in each file that is there."""
        texts = [hidden_files.read_texts(file) for file in part.files if file.exists()]
        return [sum(len(text.tokens) for text in each) * part.num_bytes / part.num_tokens for each in texts]

    _, texts, validation, *_ = up_to_the_training(PROMPTS, tmp_path / "all", options(target))
    room = texts.num_bytes + validation.num_bytes / 2
    chosen = options(target, max_disk_gb=room / 1e9)
    _, some, same, *_ = up_to_the_training(PROMPTS, tmp_path / "some", chosen)
    assert 0 < len(written(some)) < len(written(texts)) and written(same) == written(validation)
    assert sum(written(some)) + sum(written(same)) <= room
