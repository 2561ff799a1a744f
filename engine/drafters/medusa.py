"""Drafting with Medusa heads (Cai et al., arXiv 2401.10774), as a chain; the network is in `medusa_model.py`."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..penalty import penalise_drafter
from ..state import BatchState, Proposal
from .head_files import HeadFiles, fill, write_head
from .hidden_head import HiddenHeadDrafter
from .medusa_model import LAYOUTS, MedusaHeads
from .proposals import nothing

_PREFIX = re.compile(r"medusa_heads?\.")


class MedusaDrafter(HiddenHeadDrafter):
    """Medusa heads as a chain: all see the same hidden state, and none what the others draft.

    At most as many tokens are drafted as there are heads. Where drafts are sampled, each is drawn from its head's
    distribution, independently of the others; that is the distribution which verification is told.

    Args:
        model: the heads; they are moved to the target's device and dtype by `attach`, and on a CPU their weights are packed.
        greedy: propose what is likeliest instead of drawing from the heads' distributions.
        source: where the heads are from, for messages.

    Raises:
        ValueError: naming the argument, the value and the rule.
    """

    model: MedusaHeads

    @staticmethod
    def matches(config: dict[str, Any], names: Collection[str]) -> bool:
        """Whether the config, or else the names of the tensors, are those of Medusa heads."""
        if "medusa_num_heads" in config or config.get("model_type") == "medusa":
            return True
        return "model_type" not in config and any(_layout(name) is not None for name in map(_bare, names))

    @classmethod
    def from_files(cls, files: HeadFiles, **options: Any) -> Self:
        """From a checkpoint of the Medusa repository (Medusa-1), or one as vLLM reads it.

        Raises:
            ValueError: for tensors that are missing, extra or of another shape than the config says.
        """
        return cls(build(files), **{"source": files.folder, **options})

    def save(self, folder: str | Path) -> None:
        """Write config.json and the heads, in the layout that they were read in, for `from_pretrained` and others.

        Raises:
            ValueError: if the folder holds other *.safetensors files.
            OSError: if there is no room; the folder then holds what it held before.
        """
        model = self.model
        config: dict[str, Any] = dict(hidden_size=model.hidden_size)
        if model.vocab_size is not None:
            config["vocab_size"] = model.vocab_size
        layout, tensors = LAYOUTS[model.layout], model.state_dict()
        config |= {layout.num_heads: model.num_heads, layout.num_blocks: model.num_blocks}
        if model.layout == "vllm":
            config |= dict(model_type="medusa", architectures=["MedusaModel"], original_lm_head=model.output != "own")
            config["medusa_fc_bias"] = any(name.endswith(".bias") for name in tensors)
        if "token_map" in tensors:
            config["truncated_vocab_size"] = len(tensors["token_map"])
        file_name = "medusa_lm_head.safetensors" if model.layout == "medusa" else "model.safetensors"
        write_head(folder, model.extra | config, tensors, file_name)

    @torch.inference_mode()
    def propose(self, state: BatchState, num_draft_tokens: int) -> Proposal:
        """See the class."""
        hidden = self._last_hidden(state)
        if hidden is None:
            return nothing(state)
        logits = self.model(hidden[:, 0], min(num_draft_tokens, self.model.num_heads))
        return self._draw(state, penalise_drafter(logits, state), 0)  # no head knows the others' drafts


def build(files: HeadFiles) -> MedusaHeads:
    """The heads in a folder.

    A file may hold more heads than its config says (the first that were published do), or blocks; all are used.

    Raises:
        ValueError: for tensors that are missing, extra or of another shape than the config says.
    """
    config, tensors = files.config, {_bare(name): value for name, value in files.tensors.items()}
    kind = next(filter(None, map(_layout, tensors)), None)
    if kind is None:
        raise ValueError(
            f"{files.folder} must hold tensors of Medusa heads, such as 0.0.linear.weight or blocks.0.layers.0.weight, got "
            f"{sorted(files.tensors)[:5]}"
        )
    if any(".self_attn." in name for name in tensors):
        raise ValueError(f"{files.folder} must hold Medusa heads alone, got a whole model with heads")
    if config.get("original_lm_head") and "lm_head.weight" not in tensors and "lm_heads.0.weight" in tensors:
        of_all = tensors["lm_heads.0.weight"]  # others that are there say nothing
        tensors = {name: value for name, value in tensors.items() if not name.startswith("lm_heads.")}
        tensors["lm_head.weight"] = of_all
    if numbers := sorted(name for name, value in files.tensors.items() if not value.dim()):
        raise ValueError(f"{files.folder} must hold tensors of at least one dimension, got a number as {numbers[:5]}")
    layout = LAYOUTS[kind]
    places = [found.groups() for name in tensors if (found := layout.in_block.fullmatch(name))]
    num_heads = max(1 + max(int(head) for head, _ in places), files.number(layout.num_heads, 1))
    num_blocks = max(1 + max(int(block) for _, block in places), files.number(layout.num_blocks, 1))
    first = next(value for name, value in tensors.items() if _layout(name))
    outputs = [layout.output.format(head=head, num_blocks=num_blocks) + ".weight" for head in range(num_heads)]
    output, rows = _output(tensors, outputs)
    vocab_size = files.number("vocab_size", rows) if rows or "vocab_size" in config else None
    token_map = tensors.get("token_map")
    if token_map is not None:
        _check_token_map(token_map, vocab_size, files.folder)
        if len(token_map) == vocab_size:  # no token is left out
            del tensors["token_map"]
            token_map = None
    if token_map is not None:
        tensors |= {
            name: tensors[name][token_map]
            for name in (*outputs, "lm_head.weight")
            if name in tensors and len(tensors[name]) == vocab_size
        }
    with torch.device("meta"):
        model = MedusaHeads(
            files.number("hidden_size", first.shape[0]),
            vocab_size,
            num_heads,
            num_blocks,
            bias=any(name.endswith(".bias") for name in tensors),
            output=output,
            draft_vocab_size=None if token_map is None else len(token_map),
            layout=kind,
        )
    model.to(first.dtype).to_empty(device="cpu")
    fill(model, tensors, files.folder)
    model.extra = dict(config)
    return model


def _output(tensors: dict[str, Tensor], names: Iterable[str]) -> tuple[str, int | None]:
    """Whose output matrices the heads use, and the rows of one, if there is one here."""
    if "lm_head.weight" in tensors:
        return "shared", len(tensors["lm_head.weight"])
    found = [tensors[name] for name in names if name in tensors]
    return ("own", len(found[0])) if found else ("target", None)


def _check_token_map(token_map: Tensor, vocab_size: int | None, source: Path) -> None:
    ids = token_map.tolist() if token_map.dim() == 1 and not token_map.is_floating_point() else [-1]
    if vocab_size is None or len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(f"{source}: token_map must hold distinct ids in [0, {vocab_size}), got {ids[:5]}, ...")


def _layout(name: str) -> str | None:
    return next((layout for layout in LAYOUTS if LAYOUTS[layout].in_block.fullmatch(name)), None)


def _bare(name: str) -> str:
    return _PREFIX.sub("", name, count=1) if _PREFIX.match(name) else name
