"""bench/throughput/forwards.py: which forward passes are timed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_checkpoints import Head
from tiny_models import VOCAB, random_prompts, tiny

import engine
from bench.throughput import forwards
from bench.throughput.forwards import ForwardClock
from engine.drafters.medusa_model import MedusaHeads

K = 3
PARAMS = engine.SamplingParams(max_new_tokens=14)


class Ticks:
    """A clock that goes on by one each time that somebody looks: a pass that is timed takes 1."""

    now = 0

    def perf_counter(self) -> int:
        self.now += 1
        return self.now


class Silent:
    """Never has a draft."""

    def prefill(self, state: engine.BatchState) -> None: ...

    def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
        return engine.Proposal(torch.full((len(state.seq_lens), num_draft_tokens), -1))

    def observe(self, state: engine.BatchState, verdict: engine.Verdict) -> None: ...


def made(kind: str, folder: Path) -> Any:
    """A drafter that always has as many drafts as it is asked for, if it has any."""
    if kind == "eagle-3 of one state":
        Head(layers=(7,), left_out=("embed_tokens.weight", "fc.weight")).repository(
            folder, eagle_config={"use_aux_hidden_state": False}
        )
        return engine.EagleDrafter.from_pretrained(folder, min_reach=0.0)
    if kind.startswith("eagle"):
        Head(eagle=int(kind[-1])).repository(folder)
        return engine.EagleDrafter.from_pretrained(folder, min_reach=0.0)
    if kind == "medusa":
        return engine.MedusaDrafter(MedusaHeads(32, VOCAB))
    model = engine.DraftModel(tiny("llama", seed=3, num_hidden_layers=1))
    return {"model": model, "cascade": engine.CascadeDrafter(Silent(), model), "layers": "layer_skip:2"}.get(kind, kind)


# For n drafts. EAGLE's output matrix is used outside of the head's own pass; EAGLE-3 joins hidden states before the first.
PASSES = {
    "ngram": lambda n: 0,
    "layers": lambda n: n,
    "model": lambda n: n,
    "cascade": lambda n: n,
    "eagle-1": lambda n: 2 * n,
    "eagle-3": lambda n: 2 * n + 1,
    "eagle-3 of one state": lambda n: 2 * n,
    "medusa": lambda n: 1,
}


@pytest.mark.parametrize("kind", PASSES)
def test_passes_in_rounds_are_counted_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that read prompts, and no pass inside another."""
    model = tiny("llama", num_hidden_layers=7)  # the usual layers of EAGLE-3 are 2, 3 and 4
    llm = engine.load(model, drafter=made(kind, tmp_path), num_draft_tokens=K)
    asked: list[int] = []
    propose = type(llm.drafter).propose  # type: ignore[union-attr]

    def noted(self: Any, state: Any, num_draft_tokens: int) -> Any:
        asked.append(num_draft_tokens)
        return propose(self, state, num_draft_tokens)

    monkeypatch.setattr(type(llm.drafter), "propose", noted)
    monkeypatch.setattr(forwards, "time", Ticks())
    prompts = [[5, 9, 13, 9, 5, 9]]
    with ForwardClock(llm) as clock:
        output = llm.generate(prompts, PARAMS)[0]
    assert clock.seconds == output.stats.rounds + sum(map(PASSES[kind], asked)) and len(asked) > 2
    seconds = clock.seconds
    assert llm.generate(prompts, PARAMS)[0].token_ids == output.token_ids
    assert clock.seconds == seconds and "propose" not in vars(llm.drafter)


def test_plain_decoding_and_passes_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    llm = engine.load(model, drafter=None)
    monkeypatch.setattr(forwards, "time", Ticks())
    with ForwardClock(llm) as clock:
        llm.generate(random_prompts(2), PARAMS)
        rounds, seconds = llm.stats.rounds, clock.seconds
        assert 14 <= seconds <= rounds  # rows that go together share a pass
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.lm_head, "forward", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.generate(random_prompts(1), PARAMS)
        before = clock.seconds
        output = llm.generate(random_prompts(1), PARAMS)[0]
        assert clock.seconds - before == output.stats.rounds
    assert not model._forward_hooks and not model._forward_pre_hooks
