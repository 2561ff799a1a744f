"""The interface between the serving loop and a drafter."""

from typing import Any, Protocol, runtime_checkable

from ..model import RaggedModel
from ..state import BatchState, Proposal, Verdict


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens for a batch of rows. All that it needs is in the state. `propose` should not wait for the device.

    What a drafter keeps for a row, it keeps by slot: `state.rows` are the slots of a state's rows.

    The three methods below are all that a drafter must have. The engine also uses these, where a drafter has them:

    - `attach(target: RaggedModel)`: called once for each engine that is made with the drafter, before all else. The place to ask
      for hidden states of the target (`target.keep_hidden_states`). Such a drafter serves only the engine it was last attached to;
      the engine records this in the drafter's `attached_to`.
    - `check_target(config: PretrainedConfig, vocab_size: int)`: raises ValueError where the drafter was not made for a target with
      this text config and this many ids. `engine.load` calls it before it reads the target's weights.
    - `keeps_rows = True`: for a drafter without `attach` that keeps per-row state: it likewise serves only the last engine that
      was made with it.
    - `restore()`, beside `attach`: called before each generation, to undo what an interrupted one has left in the target.
    - `reserve(length)`: called before rows of that length come.
    - `graph_key() -> Hashable | None`: `propose` is captured in CUDA graphs, one for each key. The key tells apart whatever
      `propose` depends on beside the tensors that it reads in place. None asks for an eager call, for example where `propose`
      waits for the device. A replayed graph runs nothing of what `propose` does in Python. `observe` is never captured.
    - `observes_width_only = True`: of a verdict, `observe` looks at nothing but the number of columns of its tokens. A
      cascade then fills in nothing else for it.
    - `ends_early(state) -> bool`: whether `propose` itself stops where further drafting would not pay. If so, and it drafts for a
      single greedy row, "auto" requests the maximum number of drafts.
    - `steps(state, num_draft_tokens)`: yields the columns of `propose` one by one, as proposals [B, 1], to a reader who may
      stop at any of them.
    - `stages`: a tuple of drafters that it is made of, for which all of this is asked as well.
    - `drafter`: a drafter inside it, as a staged draft model has one. If that has `attach` or `keeps_rows`, it too serves only the
      last engine, which sets its `attached_to`.
    - `ragged`: the `RaggedModel` that it drafts with. Graphs that hold calls of it are captured anew if its modules or weights
      change, and a warm-up prepares its reading of prompts.
    - `reads_own_texts = True`: its model has texts of its own, so that its work is captured piece by piece by itself, and not with
      the round's (`OwnTexts`).
    - `layers`: a tuple of the target's layers or hidden states that it uses, which must be the same on all ranks.
    """

    def prefill(self, state: BatchState) -> None:
        """New rows have taken these slots. Their texts are their prompts, of `state.prompt_lengths` = `seq_lens` + 1 tokens."""

    def propose(self, state: BatchState, num_draft_tokens: int) -> Proposal:
        """At most `num_draft_tokens` tokens per row, to follow the pending token.

        Tokens that were drawn at random must come with the logits they were drawn from, under the row's temperature and
        filters and the stream DRAFT; a proposal without logits counts as one-hot. Where the state is `coupled`, logits are
        ignored: a draft is accepted if the target draws the same token, so draw with the target's noise (stream SAMPLE).

        Returns:
            Tokens [B, K'] int64, on the state's device, -1 where a row proposes fewer. Of more than num_draft_tokens columns,
            the rest is dropped.
        """
        ...

    def observe(self, state: BatchState, verdict: Verdict) -> None:
        """A round's outcome, tokens [B, K+1]; K = 0 in a round without drafts. They are in the state's texts already."""


def stages_of(drafter: Any) -> tuple[Any, ...]:
    """Those of a cascade, or the drafter itself."""
    stages: tuple[Any, ...] = getattr(drafter, "stages", (drafter,))
    return stages


def model_of(stage: Any) -> RaggedModel | None:
    """The model of its own that a drafter runs, one with a cache; None: it has none."""
    ragged = getattr(stage, "ragged", None)
    return ragged if isinstance(ragged, RaggedModel) else None
