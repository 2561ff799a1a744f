"""What drafters share that read one hidden state of the target and keep nothing themselves."""

import json
import os
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from ..backend import DRAFT, SAMPLE, RowStats, row_stats, sample
from ..model import RaggedModel
from ..packing import pack_linears
from ..state import BatchState, Proposal, Verdict
from .head_files import HeadFiles, read_head

_BELOW_ONE = 1 - 2**-24  # the largest float32


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

    def __init__(self, model: HeadModel, greedy: bool, source: Any) -> None:
        if not isinstance(greedy, bool):
            raise ValueError(f"greedy must be True or False, got {greedy!r}")
        self.model, self.greedy, self._source = model, greedy, source
        self._target: RaggedModel | None = None

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
        for name, own, theirs in (
            ("hidden size", self.model.hidden_size, target.config.hidden_size),
            ("vocabulary", self.model.vocab_size, target.vocab_size),
        ):
            if own not in (None, theirs):
                raise ValueError(f"{self._source} was made for a target of {name} {own}, but the target has {theirs}")
        self.model.to(device=target.device, dtype=target.dtype).eval()
        pack_linears(self.model)
        self.model.borrow(target.model.get_output_embeddings())
        self._target, self._hidden = target, target.keep_hidden_states((target.config.num_hidden_layers,))

    @property
    def target(self) -> RaggedModel:
        """The model whose hidden states are read; `attach` comes first."""
        assert self._target is not None
        return self._target

    def prefill(self, state: BatchState) -> None:
        """Nothing is kept."""

    def observe(self, state: BatchState, verdict: Verdict) -> None:
        """Nothing is kept."""

    def graph_key(self) -> Hashable | None:
        """What `propose` depends on beside the state: where the hidden states lie."""
        return self.target.cache.capacity

    def _last_hidden(self, state: BatchState) -> Tensor | None:
        """[B, 1, H], of the position before the pending token; None before the target has read anything."""
        if not self._hidden.states.numel():
            return None
        return self._hidden.gather(state.rows, state.seq_lens[:, None] - 1)

    def _draw(self, state: BatchState, logits: Tensor, step: int) -> Proposal:
        """Drafts from rows [B, W, V], the first of which is for draft number `step`."""
        can_draft = (state.seq_lens > 0)[:, None]
        if self.greedy or state.all_greedy:
            likeliest = row_stats(logits)
            tokens = likeliest.argmax.where(likeliest.lse.isfinite() & can_draft, -1)
            chosen = logits.gather(-1, likeliest.argmax[..., None])[..., 0]
            confidence = (chosen.float() - likeliest.lse.float()).exp().nan_to_num(0.0)
            return Proposal(tokens, confidence=confidence.clamp(0, _BELOW_ONE))
        origin, stream = (None, SAMPLE) if state.coupled else (state.position, DRAFT)
        position = state.position + step
        draws = sample(logits, **state.sampling, seed=state.seed, position=position, origin=origin, stream=stream)
        tokens = draws.tokens.where(can_draft, -1)
        return Proposal(tokens) if state.coupled else Proposal(tokens, logits, draws.stats)


def nothing(state: BatchState) -> Proposal:
    """The empty proposal."""
    return Proposal(state.tokens[:, :0])


def side_by_side(steps: Sequence[Proposal]) -> Proposal:
    """One proposal [B, K] of one-column ones, which all have the same fields."""
    tokens, logits, stats, confidence = zip(*steps, strict=True)
    return Proposal(
        torch.cat(tokens, dim=1),
        None if logits[0] is None else torch.cat(logits, dim=1),
        None if stats[0] is None else RowStats(*(torch.cat(field, dim=1) for field in zip(*stats, strict=True))),
        None if confidence[0] is None else torch.cat(confidence, dim=1),
    )


def write_head(folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], file_name: str) -> None:
    """A checkpoint that `read_head` reads. Both files are complete before either takes its place.

    Args:
        folder: made if it is not there; what it holds under these names is replaced.
        file_name: of the weights, ending in .safetensors.

    Raises:
        ValueError: if it holds other *.safetensors files, which would be read with this one.
        OSError: if there is no room; the folder then holds what it held before.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    others = sorted(path.name for path in folder.glob("*.safetensors") if path.name != file_name)
    if others:
        raise ValueError(f"folder must hold no other *.safetensors than {file_name}, got {folder} with {others}")
    whole = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    dtype = next((str(value.dtype) for value in whole.values() if value.is_floating_point()), "")
    config = {key: dtype.removeprefix("torch.") if key in ("dtype", "torch_dtype") else config[key] for key in config}
    new = {folder / file_name: folder / f".{file_name}.new", folder / "config.json": folder / ".config.json.new"}
    weights, text = new.values()
    try:
        save_file(whole, weights, metadata={"format": "pt"})
        text.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for place, complete in new.items():
            os.replace(complete, place)
    except SafetensorError as error:  # its own kind of error for a full disk
        raise OSError(f"{weights} could not be written: {error}") from error
    finally:
        for complete in new.values():
            complete.unlink(missing_ok=True)
