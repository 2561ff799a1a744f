"""What drafters share that read one hidden state of the target and keep nothing themselves."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn
from transformers import PretrainedConfig

from ..config import check_bool, check_instance
from ..hidden_states import HiddenStates
from ..model import RaggedModel
from ..packing import pack_linears
from ..state import BatchState, Proposal, Verdict
from .head_files import HeadFiles, check_made_for, read_head
from .proposals import drafts_of


class HeadModel(nn.Module):
    """The network of such a drafter.

    Attributes:
        hidden_size: of the target that it was made for.
        vocab_size: of that target; None if there is nothing here that depends on it.
        extra: what else the checkpoint's config.json said; it is saved again.
    """

    hidden_size: int
    vocab_size: int | None
    extra: dict[str, Any]

    def borrow(self, lm_head: nn.Module) -> None:
        """The target's head, for one that has none of its own."""


class HiddenHeadDrafter:
    """Drafts from the target's last hidden state, the one from which the pending token was predicted.

    A text of a single token has no such state yet: nothing is proposed for it.

    Args:
        model: the network; it is moved to the target's device and dtype by `attach`, and on a CPU its weights are packed.
        greedy: propose what is likeliest instead of drawing from the network's distributions.
        source: where it is from, for messages.

    Raises:
        ValueError: for a `greedy` that is no bool.
    """

    model: Any
    observes_width_only = True  # see `Drafter`

    def __init__(self, model: HeadModel, greedy: bool = False, source: Any = "drafter") -> None:
        check_instance("model", model, HeadModel)
        check_bool("greedy", greedy)
        self.model, self.greedy, self._source = model, greedy, source
        # From `attach` on:
        self.target: RaggedModel  # whose hidden states are read
        self._hidden: HiddenStates

    @classmethod
    def from_files(cls, files: HeadFiles, **options: Any) -> Self:
        """From what a folder holds; see the class for `options`."""
        raise NotImplementedError

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> Self:
        """From a folder, see `from_files`."""
        return cls.from_files(read_head(Path(folder)), **options)

    def attach(self, target: RaggedModel) -> None:
        """Move to the target's device and dtype, and ask it for its hidden states.

        Raises:
            ValueError: if the network was made for a target of another size.
        """
        self.check_target(target.config, target.vocab_size)
        self.model.to(device=target.device, dtype=target.dtype).eval()
        pack_linears(self.model)
        self.model.borrow(target.model.get_output_embeddings())
        self.target, self._hidden = target, target.keep_hidden_states((target.config.num_hidden_layers,))

    def check_target(self, config: PretrainedConfig, vocab_size: int) -> None:
        """Raise ValueError if the network was made for a target of other sizes."""
        hidden = self.model.hidden_size, config.hidden_size
        check_made_for(self._source, {"hidden size": hidden, "vocabulary": (self.model.vocab_size, vocab_size)})

    def prefill(self, state: BatchState) -> None:
        """Nothing is kept."""

    def observe(self, state: BatchState, verdict: Verdict) -> None:
        """Nothing is kept."""

    def graph_key(self) -> Hashable | None:
        """What `propose` depends on beside the state: where the hidden states lie. None before there are any."""
        return None if self._hidden.empty else (self.target.cache.capacity, self._hidden.place)

    def _last_hidden(self, state: BatchState) -> Tensor | None:
        """[B, 1, H], of the position before the pending token; None before the target has read anything."""
        if self._hidden.empty:
            return None
        return self._hidden.gather(state.rows, state.seq_lens[:, None] - 1)

    def _draw(self, state: BatchState, logits: Tensor, step: int) -> Proposal:
        """Drafts from rows [B, W, V], the first of which is for draft number `step`."""
        can_draft = (state.seq_lens > 0)[:, None]
        proposal = drafts_of(state, logits, step, self.greedy or state.all_greedy)
        return proposal._replace(tokens=proposal.tokens.where(can_draft, -1))
