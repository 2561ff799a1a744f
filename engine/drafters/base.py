"""The narrow door between the loop and a drafter."""

from typing import Any, Protocol, runtime_checkable

from ..state import BatchState, Proposal, Verdict


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens for a batch of rows. Everything it needs is in the state. `propose` should not wait for the device.

    One that works with the target has `attach(target: RaggedModel)`, called once before all else: the place to ask for
    hidden states (`target.keep_hidden_states`). It serves the engine that it was attached to last. Its `restore()`, if there is
    one, is called before each generation, to undo what an interrupted one has left in the target.

    A drafter that keeps something per row keeps it per slot: `state.rows` are the slots of a state's rows.

    One that also has `graph_key() -> Hashable | None` is captured in CUDA graphs: the key tells apart whatever `propose`
    depends on beside the tensors that it reads in place, and None asks for an eager call, for example where `propose` waits
    for the device. What `propose` does in Python is then not done again; `observe` is never captured. `reserve(length)`, if
    there is one, is called before rows of that length come.

    `observes_width_only = True` says that `observe` looks at nothing but how many columns the verdict's tokens have: a
    cascade then makes nothing else for it.

    `ends_early(state) -> bool`, if there is one, says that `propose` itself stops where drafting on would not pay; if all rows are
    greedy, "auto" then asks for as many drafts as there may be. `steps(state, num_draft_tokens)` gives the columns of `propose`
    one by one as proposals [B, 1], to a reader who may stop at any.
    """

    def prefill(self, state: BatchState) -> None:
        """New rows have taken these slots: their prompts are the first `prompt_lengths` tokens, `seq_lens` + 1."""

    def propose(self, state: BatchState, num_draft_tokens: int) -> Proposal:
        """At most `num_draft_tokens` tokens per row, to follow the pending token.

        Tokens that were drawn at random must come with the logits they were drawn from, under the row's temperature and
        filters and the stream DRAFT; a proposal without logits counts as one-hot. Where the state is `coupled`, logits
        are not looked at: a token stands if the target draws it too, so draw with the target's noise, stream SAMPLE.

        Returns:
            Tokens [B, K'] int64, K' <= num_draft_tokens, on the state's device, -1 where a row proposes fewer.
        """
        ...

    def observe(self, state: BatchState, verdict: Verdict) -> None:
        """A round's outcome, tokens [B, K+1], also of one that had no draft; the state has it already."""


def stages_of(drafter: Any) -> tuple[Any, ...]:
    """Those of a cascade, or the drafter itself."""
    stages: tuple[Any, ...] = getattr(drafter, "stages", (drafter,))
    return stages
