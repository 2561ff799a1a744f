"""How long the forward passes in rounds take: what is left of a round is the engine's own."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from torch import nn
from transformers import PreTrainedModel

import engine
from engine.drafters.base import stages_of
from engine.drafters.eagle_model import EagleModel


class ForwardClock:
    """While it is entered, adds up the seconds that an engine on a CPU spends in forward passes of its rounds.

    The target's are those with its head: a prompt is read without. The drafter's are those of `propose`: a draft model's, or
    those of a head and of the output matrix that it uses. Passes inside passes count once. It costs two looks at the clock
    for each.
    """

    def __init__(self, llm: engine.Engine) -> None:
        self.seconds = 0.0
        self._target, self._drafter = llm.target_model, llm.drafter
        self._inside = ExitStack()
        self._depth, self._begin = 0, 0.0
        self._drafting = False

    def __enter__(self) -> Self:
        with ExitStack() as entered:
            for module in {self._target, *_networks(self._drafter)}:
                entered.enter_context(module.register_forward_pre_hook(self._enter_pass))
                entered.enter_context(module.register_forward_hook(self._leave_pass, always_call=True))
            if self._drafter is not None:
                entered.enter_context(self._noting_drafts(self._drafter))
            self._inside = entered.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._inside.close()

    @contextmanager
    def _noting_drafts(self, drafter: engine.Drafter) -> Iterator[None]:
        """Heads read prompts with the same call as drafts: only this tells them apart."""
        propose = drafter.propose

        def noted(*arguments: Any) -> engine.Proposal:
            self._drafting = True
            try:
                return propose(*arguments)
            finally:
                self._drafting = False

        vars(drafter)["propose"] = noted  # hides the class's own
        try:
            yield
        finally:
            del vars(drafter)["propose"]

    def _enter_pass(self, module: nn.Module, inputs: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._begin = time.perf_counter()

    def _leave_pass(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and (self._drafting or module is self._target):
            self.seconds += time.perf_counter() - self._begin


def _networks(drafter: Any) -> Iterator[nn.Module]:
    """What a drafter, or each stage of a cascade, calls; nothing for lookups, and for layers of the target."""
    for stage in stages_of(drafter):
        model = getattr(stage, "model", None)
        if isinstance(model, nn.Module):
            yield model
        if isinstance(model, PreTrainedModel):
            yield model.base_model  # called without the head for what was missed
        if isinstance(model, EagleModel):  # outside of its forward
            yield model.get_output_embeddings()
            if hasattr(model, "fc"):  # not where it reads one hidden state as it is
                yield model.fc
