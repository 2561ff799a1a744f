"""Self-speculative decoding: the target drafts for itself with some of its layers left out.

Early exit after the first layers (LayerSkip, Elhoushi et al., arXiv 2404.16710), which pays with models trained for it, or any
set of layers (Draft & Verify, Zhang et al., arXiv 2309.08168), which `search_layers` looks for.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from transformers import PretrainedConfig

from ..config import check_bool, check_int
from ..decoder_layers import DecoderLayers
from ..model import RaggedModel
from ..model_support import TESTED
from ..penalty import penalise_drafter
from ..state import BatchState, Proposal, Verdict
from .proposals import drafts_of, side_by_side


class LayerSkipDrafter:
    """The target without some of its layers, over the target's own weights and K/V.

    Below `seq_lens` the cache holds K/V of every layer, from the whole target; drafting adds that of the pending token and of
    the drafts in the layers that it runs, and verification writes all of it anew. So there is nothing to prefill, nothing to
    roll back, and no memory needed.

    While it drafts, the model itself has these layers alone: engines that share a live model must not run in several threads.

    Args:
        exit_layer: run the first so many layers, in [1, the target's layers].
        layers: or these, ascending, counted from 0; exactly one of the two is given.
        greedy: propose what is likeliest, without a distribution, instead of drawing from the draft's. Each draft then has a
            confidence, its probability at temperature 1.

    Raises:
        ValueError: naming the argument, the value and the rule; where it depends on the target, from `attach`.
    """

    observes_width_only = True  # see `Drafter`

    def __init__(
        self, exit_layer: int | None = None, layers: Sequence[int] | None = None, greedy: bool = False
    ) -> None:
        if (exit_layer is None) == (layers is None):
            raise ValueError(f"exactly one of exit_layer and layers must be given, got {exit_layer!r} and {layers!r}")
        check_bool("greedy", greedy)
        if exit_layer is not None:
            check_int("exit_layer", exit_layer, 1)
            layers = range(exit_layer)
        self.layers, self.greedy, self._exit_layer = _checked(layers), greedy, exit_layer
        # From `attach` on:
        self.target: RaggedModel  # which drafts for itself
        self._decoder: DecoderLayers

    def attach(self, target: RaggedModel) -> None:
        """Find the target's layers.

        Raises:
            ValueError: if it has not so many.
            UnsupportedModelError: if some of them cannot be left out.
        """
        decoder = DecoderLayers(target.model)
        self.check_target(target.config, target.vocab_size)
        if target.config.model_type not in TESTED:
            decoder.probe(self.layers)
        self.target, self._decoder = target, decoder

    def check_target(self, config: PretrainedConfig, vocab_size: int) -> None:
        """Raise ValueError if the target has not all the layers that are to run."""
        count = config.num_hidden_layers
        if self._exit_layer is not None:
            check_int("exit_layer", self._exit_layer, 1, count)
        if self.layers[-1] >= count:
            raise ValueError(f"layers must be below {count}, the target's number, got {list(self.layers)}")

    def restore(self) -> None:
        """Make sure that the target is whole, which an interrupt while drafting may have prevented."""
        self._decoder.restore()

    def prefill(self, state: BatchState) -> None:
        """The target has done it."""

    def propose(self, state: BatchState, num_draft_tokens: int) -> Proposal:
        """Draw token after token, each row under its own temperature and filters; or the likeliest, if `greedy`."""
        tokens = state.pending[:, None]
        steps: list[Proposal] = []
        with self._decoder.only(self.layers):
            for step in range(num_draft_tokens):
                start = state.seq_lens + step
                inside = ((start + 1 < state.limits) & ~state.without_drafts).long()
                length = state.max_text_length + step
                logits = self.target.call(tokens.clamp(min=0), start, inside, state.rows, length, keep_hidden=False)
                logits = penalise_drafter(logits, state, [each.tokens for each in steps])
                steps.append(drafts_of(state, logits, step, self.greedy))
                tokens = steps[-1].tokens
        return side_by_side(steps)

    def observe(self, state: BatchState, verdict: Verdict) -> None:
        """Nothing is kept."""

    def graph_key(self) -> Hashable | None:
        """What `propose` depends on beside the state: where the target's K/V lies."""
        return self.target.cache.capacity


def _checked(given: Any) -> tuple[int, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ValueError(f"layers must be ints, got {given!r}")
    layers: tuple[int, ...] = tuple(given)
    for layer in layers:
        check_int("layers", layer, 0)
    if not layers or list(layers) != sorted(set(layers)):
        raise ValueError(f"layers must be ascending, each once, and at least one, got {list(layers)}")
    return layers
