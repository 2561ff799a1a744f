"""Drafting with Medusa heads (Cai et al., arXiv 2401.10774), as a chain."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from ..config import check_int
from ..state import BatchState, Proposal
from .head_files import HeadFiles, fill, write_head
from .hidden_head import HeadModel, HiddenHeadDrafter
from .proposals import nothing


class Layout(NamedTuple):
    """How a checkpoint calls things: a block's linear layer, a head's output matrix; numbers in its config.json."""

    block: str
    output: str
    in_block: re.Pattern[str]  # of a tensor; group 1: the head
    num_heads: str
    num_blocks: str


LAYOUTS = {
    "medusa": Layout(
        block="{head}.{block}.linear",
        output="{head}.{num_blocks}",
        in_block=re.compile(r"(\d+)\.\d+\.linear\.\w+"),
        num_heads="medusa_num_heads",
        num_blocks="medusa_num_layers",
    ),
    "vllm": Layout(
        block="blocks.{head}.layers.{block}",
        output="lm_heads.{head}",
        in_block=re.compile(r"blocks\.(\d+)\.layers\.\d+\.\w+"),
        num_heads="num_heads",
        num_blocks="num_hidden_layers",
    ),
}
_SHARED = "lm_head"  # one output matrix for all heads
_PREFIX = re.compile(r"medusa_heads?\.")


class MedusaHeads(HeadModel):
    """Head i predicts token number i after the pending one, from the hidden state that predicted the pending one.

    x = x + silu(linear(x)) in each block, which is the identity when it is new; then an output matrix.

    Args:
        hidden_size: of the target.
        vocab_size: of the target; None only where the heads use its output matrix.
        num_heads: the longest draft.
        num_blocks: of each head.
        bias: whether the blocks' linear layers have one.
        output: "own": each head has an output matrix; "shared": one for all; "target": they use the target's.
        draft_vocab_size: rows of an output matrix, if fewer than `vocab_size`; then `token_map` [draft_vocab_size] int64
            holds their target ids, which are distinct.
        layout: names of the tensors, "medusa" (the Medusa repository's) or "vllm".

    Raises:
        ValueError: naming the argument, the value and the rule.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int | None,
        num_heads: int = 4,
        num_blocks: int = 1,
        *,
        bias: bool = True,
        output: str = "own",
        draft_vocab_size: int | None = None,
        layout: str = "medusa",
    ) -> None:
        super().__init__()
        for name, value in dict(hidden_size=hidden_size, num_heads=num_heads, num_blocks=num_blocks).items():
            check_int(name, value, 1)
        if output not in ("own", "shared", "target") or layout not in LAYOUTS:
            raise ValueError(
                f"output must be 'own', 'shared' or 'target' and layout one of {list(LAYOUTS)}, got {output!r}, {layout!r}"
            )
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.num_heads, self.num_blocks = num_heads, num_blocks
        self.output, self.layout, self.extra = output, layout, {}
        self._borrowed: dict[str, nn.Module] = {}
        for head in range(num_heads):
            for block in range(num_blocks):
                linear = nn.Linear(hidden_size, hidden_size, bias=bias)
                nn.init.zeros_(linear.weight)
                if bias:
                    nn.init.zeros_(linear.bias)
                _place(self, self._block(head, block), linear)
        if output == "target":
            return
        if vocab_size is None:
            raise ValueError(f"vocab_size must be an int >= 1 where output is {output!r}, got None")
        rows = draft_vocab_size or vocab_size
        for name in map(self._output, range(num_heads)) if output == "own" else [_SHARED]:
            _place(self, name, nn.Linear(hidden_size, rows, bias=False))
        if draft_vocab_size is not None:
            self.register_buffer("token_map", torch.arange(draft_vocab_size))

    def borrow(self, lm_head: nn.Module) -> None:
        """The target's head; it is no part of this module's own tensors."""
        if self.output == "target":
            self._borrowed["lm_head"] = lm_head

    def forward(self, hidden: Tensor, num_heads: int | None = None) -> Tensor:
        """Logits [..., N, V] of the first N heads, for hidden states [..., H]."""
        heads = range(self.num_heads if num_heads is None else num_heads)
        features = []
        for head in heads:
            feature = hidden
            for block in range(self.num_blocks):
                feature = feature + silu(self.get_submodule(self._block(head, block))(feature))
            features.append(feature)
        if self.output == "own":
            own = [self.get_submodule(self._output(head)) for head in heads]
            logits = torch.stack([head(feature) for head, feature in zip(own, features, strict=True)], dim=-2)
        else:  # one reading of the matrix serves all
            shared = self._borrowed["lm_head"] if self.output == "target" else self.get_submodule(_SHARED)
            logits = shared(torch.stack(features, dim=-2))
        return self._of_target(logits)

    def _of_target(self, logits: Tensor) -> Tensor:
        token_map = self._buffers.get("token_map")
        if token_map is None or self.vocab_size is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        whole[..., token_map] = logits
        return whole

    def _block(self, head: int, block: int) -> str:
        return LAYOUTS[self.layout].block.format(head=head, block=block)

    def _output(self, head: int) -> str:
        return LAYOUTS[self.layout].output.format(head=head, num_blocks=self.num_blocks)


class MedusaDrafter(HiddenHeadDrafter):
    """Medusa heads as a chain: all see the same hidden state, and none what the others draft.

    At most as many tokens are drafted as there are heads. Where drafts are sampled, each is drawn from its head's
    distribution, independently of the others; that is the distribution which verification is told.

    Args:
        model: the heads; they are moved to the target's device and dtype by `attach`, and on a CPU their weights are packed.
        greedy: propose what is likeliest instead of drawing from the heads' distributions.
        source: where the heads are from, for messages.
    """

    model: MedusaHeads

    def __init__(self, model: MedusaHeads, greedy: bool = False, source: Any = "drafter") -> None:
        super().__init__(model, greedy, source)

    @staticmethod
    def matches(files: HeadFiles) -> bool:
        """Whether the config, or else the names of the tensors, are those of Medusa heads."""
        config = files.config
        if "medusa_num_heads" in config or config.get("model_type") == "medusa":
            return True
        return "model_type" not in config and any(_layout(name) is not None for name in map(_bare, files.tensors))

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
        return self._draw(state, logits, 0)


def build(files: HeadFiles) -> MedusaHeads:
    """The heads in a folder.

    A file may hold more heads than its config says (the first that were published do); all are used.

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
    if config.get("original_lm_head") and "lm_head.weight" not in tensors and "lm_heads.0.weight" in tensors:
        tensors["lm_head.weight"] = tensors.pop("lm_heads.0.weight")
    layout = LAYOUTS[kind]
    num_heads = 1 + max(int(found[1]) for name in tensors if (found := layout.in_block.fullmatch(name)))
    num_heads, num_blocks = max(num_heads, files.number(layout.num_heads, 1)), files.number(layout.num_blocks, 1)
    first = next(value for name, value in tensors.items() if _layout(name))
    outputs = [layout.output.format(head=head, num_blocks=num_blocks) + ".weight" for head in range(num_heads)]
    output, rows = _output(tensors, outputs)
    vocab_size = files.number("vocab_size", rows) if rows or "vocab_size" in config else None
    token_map = tensors.get("token_map")
    if token_map is not None:
        _check_token_map(token_map, vocab_size, files.folder)
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


def _place(root: nn.Module, path: str, module: nn.Module) -> None:
    """Make it a submodule, at a dotted path."""
    *parents, last = path.split(".")
    for name in parents:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    root.add_module(last, module)
