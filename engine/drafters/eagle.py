"""Drafting with an EAGLE head, as a chain; the network is in `eagle_model.py`."""

import logging
from collections.abc import Hashable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ..config import check_bool, check_instance
from ..cpu_layers import fuse_cpu_layers
from ..graphs import bucket
from ..hidden_states import HiddenStates
from ..model import RaggedModel, last_valid
from ..model_support import has_dynamic_rope
from ..packing import pack_linears
from ..penalty import penalise_repetition
from ..state import BatchState, Proposal, Verdict
from ..transfers import to_device
from .draft_vocabulary import DraftVocabulary, SeenTokens
from .eagle_files import build
from .eagle_model import EagleModel, usual_layers
from .head_files import HeadFiles, check_made_for, read_head
from .proposals import any_reaches, check_min_reach, confidence, draws_of, likeliest, nothing, side_by_side

logger = logging.getLogger(__name__)

# Where a draft is less likely than this to be accepted, the next is not worth a step of a tenth of a target call.
MIN_REACH = 0.3


class EagleDrafter:
    """An EAGLE-1, 2 or 3 head as a chain of drafts (Li et al., arXiv 2401.15077, 2406.16858, 2503.01840).

    Its K/V at position j comes from the target's hidden state there and from the token after it. While it drafts, it has no
    hidden states of the target, and writes K/V from its own features; that is written again when the target's are known.

    Args:
        model: the head; it is moved to the target's device and dtype by `attach`, and on a CPU its weights are packed.
        layers: the target's hidden states that it reads, in the counting of `HiddenStates` up to L, which is behind the last
            norm or before it as the model's config says; None: those that EAGLE trains with (the last for EAGLE-1 and 2;
            layers 2, L/2 and L-3 for EAGLE-3).
        greedy: propose what is likeliest instead of drawing from the head's distribution.
        min_reach: in [0, 1]. On a CPU, drafting ends when in every row the product of the head's probabilities of its drafts has
            fallen below this; only of greedy drafts, and where the state says that drafts may end early.
        source: where the head is from, for messages.

    Raises:
        ValueError: naming the argument, the value and the rule.
    """

    observes_width_only = True  # see `Drafter`

    def __init__(
        self,
        model: EagleModel,
        layers: tuple[int, ...] | None = None,
        greedy: bool = False,
        min_reach: float = MIN_REACH,
        source: Any = "drafter",
    ) -> None:
        check_instance("model", model, EagleModel)
        check_bool("greedy", greedy)
        check_min_reach(min_reach)
        count = model.config.num_features if model.config.eagle == 3 else 1
        if layers is not None and len(layers) != count:
            raise ValueError(
                f"layers must be {count} hidden states, as the head was made for this many, got {layers!r}"
            )
        self.model, self.greedy, self.min_reach, self._source = model, greedy, min_reach, source
        self.layers = layers
        # From `attach` on:
        self.ragged: RaggedModel  # the head over its cache
        self._hidden: HiddenStates  # of the target
        self._vocabulary: DraftVocabulary
        self._filled: Tensor  # [slots] int64: positions whose K/V here comes from the target's hidden states
        self._behind = 0  # at most so many more positions of a row have hidden states by now

    @classmethod
    def from_files(cls, files: HeadFiles, **options: Any) -> "EagleDrafter":
        """From a checkpoint in the speculators format or the EAGLE repository's layout.

        Raises:
            ValueError: for tensors that are missing, extra or of another shape than the config says.
        """
        model, layers = build(files)
        return cls(model, **{"layers": layers, "source": files.folder, **options})

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> "EagleDrafter":
        """From a folder, see `from_files`."""
        return cls.from_files(read_head(Path(folder)), **options)

    def attach(self, target: RaggedModel) -> None:
        """Move to the target's device and dtype, and borrow its embeddings, and its head if there is none here.

        Raises:
            ValueError: if the head was made for a target of another size.
        """
        self.check_target(target.config, target.vocab_size)
        config, count = self.model.config, target.config.num_hidden_layers
        layers = self._layers_of(count)
        if self.layers is None and config.num_features > 1:
            logger.info(
                "%s does not say which hidden states it reads, so it gets those of most heads, %s; if few of its drafts are "
                "accepted, try others: engine.EagleDrafter.from_pretrained(folder, layers=(...))",
                self._source,
                list(layers),
            )
        self.model.place(target.device, target.dtype)
        output = self._borrow(target)
        self._vocabulary = DraftVocabulary(self.model.target_ids, target.vocab_size, output)
        pack_linears(self.model)
        fuse_cpu_layers(self.model)
        if not config.last_state_normed:
            layers = tuple(layer + (layer == count) for layer in layers)
        self._hidden = target.keep_hidden_states(layers)
        self.ragged = RaggedModel(self.model, target.num_slots, role="drafter")
        if not has_dynamic_rope(config):  # such rotary embeddings go on; heads are often trained on short texts
            self.ragged.context_length = max(self.ragged.context_length, target.context_length)
        self._filled = torch.zeros(target.num_slots, dtype=torch.int64, device=target.device)

    def check_target(self, config: PretrainedConfig, vocab_size: int) -> None:
        """Raise ValueError if the head was made for a target of other sizes."""
        own, count = self.model.config, config.num_hidden_layers
        layers = self._layers_of(count)
        if min(layers) < 0 or max(layers) > count:
            raise ValueError(
                f"drafter must be made for the target: {self._source} reads hidden states {list(layers)}, but the target "
                f"has {count} layers"
            )
        hidden = own.feature_size, config.hidden_size
        check_made_for(self._source, {"hidden size": hidden, "vocabulary": (own.vocab_size, vocab_size)})

    def _layers_of(self, count: int) -> tuple[int, ...]:
        """Those hidden states of a target of so many layers that are read; unless told, those that most heads like it read."""
        reads_last = self.model.config.eagle != 3 or not self.model.config.fuses
        return self.layers or ((count,) if reads_last else usual_layers(count))

    def _borrow(self, target: RaggedModel) -> Tensor | None:
        """Take from the target what the checkpoint has not.

        Returns:
            The target's output matrix [V, H], if the head's consists of some of its rows; None otherwise.
        """
        model, config = self.model, self.model.config
        embeddings: Any = target.model.get_input_embeddings()
        head: Any = target.model.get_output_embeddings()
        head_size = getattr(head, "in_features", None) or head.weight.shape[1]  # a packed weight is unpacked to be read
        for name, missing, size in (
            ("embed_tokens.weight", model.own_embeddings is None, embeddings.weight.shape[1]),
            ("lm_head.weight", model.head_is_targets or config.eagle != 3, head_size),
        ):
            if missing and size != config.hidden_size:
                raise ValueError(
                    f"{self._source} must hold {name}, as the target's is of size {size} and not {config.hidden_size}"
                )
        model.borrow(embeddings, None if config.eagle == 3 else head)
        if not model.head_is_targets:
            return None
        tied = getattr(target.config, "tie_word_embeddings", False)
        output: Any = (embeddings if tied else head).weight.detach()  # a packed head's is a copy
        if hasattr(output, "full_tensor"):  # a DTensor, of which each rank has a slice; rows are looked up in all of it
            output = output.full_tensor()
        model.lm_head = torch.nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False, device="meta")
        model.lm_head.weight = torch.nn.Parameter(output[model.target_ids], requires_grad=False)
        whole: Tensor = output
        return whole if config.draft_vocab_size < config.vocab_size else None

    def reserve(self, length: int) -> None:
        """Make room for rows of this length."""
        self.ragged.cache.reserve(length)

    @torch.inference_mode()
    def prefill(self, state: BatchState) -> None:
        """Read the prompts, but for the last position that has a hidden state: `propose` begins with that."""
        self.reserve(state.max_limit)
        self.ragged.cache.begin_rows(state.rows)
        spans = [(0, max(length - 2, 0)) for length in state.prompt_lengths]
        if any(end for _, end in spans):
            self.ragged.prefill(state.tokens[:, 1:], spans, state.rows, lambda at: self._features(state, at))
        self._filled[state.rows] = to_device([end for _, end in spans], self._filled.device)
        self._behind = max(self._behind, 1)

    def propose(self, state: BatchState, num_draft_tokens: int) -> Proposal:
        """Draw token after token, each row under its own temperature and filters."""
        steps = list(self.steps(state, num_draft_tokens))
        return side_by_side(steps) if steps else nothing(state)

    def steps(self, state: BatchState, num_draft_tokens: int) -> Iterator[Proposal]:
        """The columns of `propose` one by one, [B, 1] each: whoever has enough of them stops reading."""
        if self._hidden.empty:  # all texts so far were of one token
            return
        hidden = self._catch_up(state)
        can_draft = (state.seq_lens > 0)[:, None]  # a text of one token has no hidden state yet
        reach = torch.ones_like(can_draft, dtype=torch.float32)
        drafts, seen = state.tokens[:, :0], self._vocabulary.seen(state)
        for step in range(num_draft_tokens):
            if step:
                at = state.seq_lens + step - 1
                inside = ((at < state.limits) & can_draft[:, 0]).long()
                hidden = self._call(state, drafts[:, -1:], at, inside, step, hidden)
            logits = self._logits(hidden, seen)
            if state.penalised:
                logits = penalise_repetition(logits, state, drafts, partial(self._vocabulary.places, seen=seen))
            proposal, sure = self._draw(state, logits, seen, step)
            drafts = torch.cat([drafts, proposal.tokens], dim=1)
            yield proposal._replace(tokens=proposal.tokens.where(can_draft, -1))
            if self.ends_early(state):
                reach = reach * sure
                if not any_reaches(reach, state, self.min_reach):
                    return

    def ends_early(self, state: BatchState) -> bool:
        """See `min_reach`."""
        return state.can_look and (self.greedy or state.all_greedy or state.may_end_early) and self.min_reach > 0

    def observe(self, state: BatchState, verdict: Verdict) -> None:
        """Every new token of a row is one more position to read; a round with drafts began by reading those before."""
        width = verdict.tokens.shape[1]
        self._behind = width if width > 1 else self._behind + 1

    def graph_key(self) -> Hashable | None:
        """What `propose` depends on beside the state: where buffers end, and in how many columns it catches up.

        None before there are hidden states: nothing is drafted then, and no buffers are made.
        """
        if self._hidden.empty or not self.ragged.capturable:
            return None
        return self.ragged.cache.capacity, self._hidden.place, self._catch_up_width

    @property
    def _catch_up_width(self) -> int:
        """Columns in which positions are caught up with where their number is not looked at: few widths, as each is a graph."""
        return bucket(self._behind, 4)

    def _catch_up(self, state: BatchState) -> Tensor:
        """Read the positions that got their hidden states since the last draft; returns the feature [B, 1, H] after the last."""
        filled = self._filled[state.rows]
        missing = (state.seq_lens - filled) * state.active
        width = int(missing.max()) if state.can_look else min(self._catch_up_width, state.max_text_length)
        at = filled[:, None] + torch.arange(max(width, 1), device=filled.device)
        features = self._features(state, at)["hidden_states"]
        tokens = state.gather((at + 1).clamp(max=state.tokens.shape[1] - 1))  # rows that lack less end sooner
        hidden = self._call(state, tokens, filled, missing, 0, features)
        self._filled[state.rows] = torch.where(state.active, state.seq_lens, filled)
        return last_valid(hidden, missing)

    def _features(self, state: BatchState, at: Tensor) -> dict[str, Tensor]:
        return {"hidden_states": self.model.fuse(self._hidden.gather(state.rows, at))}

    def _call(
        self, state: BatchState, tokens: Tensor, start: Tensor, valid: Tensor, extra: int, features: Tensor
    ) -> Tensor:
        return self.ragged.call(
            tokens.clamp(min=0), start, valid, state.rows, state.max_text_length + extra, with_head=False,
            hidden_states=features.to(self.ragged.dtype),
        )  # fmt: skip

    def _logits(self, hidden: Tensor, seen: SeenTokens | None) -> Tensor:
        """[B, 1, V_draft] and, behind, those of the seen tokens."""
        normed = self.model.normed(hidden)
        return self._vocabulary.widened(self.model.get_output_embeddings()(normed), normed, seen)

    def _draw(self, state: BatchState, logits: Tensor, seen: SeenTokens | None, step: int) -> tuple[Proposal, Tensor]:
        """The draft of a step by draft logits [B, 1, V], -1 where those are no distribution, and how sure the head is of it."""
        greedy, vocabulary = self.greedy or state.all_greedy, self._vocabulary
        if greedy and state.can_look:
            found = likeliest(logits)
            tokens, sure = vocabulary.target_ids(found.tokens, seen), found.confidence
            assert sure is not None
            return Proposal(tokens, confidence=sure), sure
        if state.coupled and not greedy:  # the target's noise goes by its ids
            tokens, _, logprobs = draws_of(state, vocabulary.of_target(logits, seen), step, return_logprobs=True)
            assert logprobs is not None
            return Proposal(tokens), confidence(logprobs)
        if self.greedy:
            state = replace(state, temperature=torch.zeros_like(state.temperature))
        tokens, stats, logprobs = draws_of(state, logits, step, return_logprobs=True)
        assert logprobs is not None
        sure = confidence(logprobs)
        if greedy:
            return Proposal(vocabulary.target_ids(tokens, seen), confidence=sure), sure
        ids = vocabulary.target_ids(torch.cat([tokens, stats.argmax.clamp(min=0)], dim=1), seen)
        stats = stats._replace(argmax=ids[:, 1:])
        return Proposal(ids[:, :1], vocabulary.of_target(logits, seen), stats), sure
