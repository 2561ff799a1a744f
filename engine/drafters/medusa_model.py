"""Medusa heads (Cai et al., arXiv 2401.10774): the network, and what checkpoints call its parts."""

import re
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from ..config import check_int
from .hidden_head import HeadModel


class Layout(NamedTuple):
    """How a checkpoint calls things: a block's linear layer, a head's output matrix; numbers in its config.json."""

    block: str
    output: str
    in_block: re.Pattern[str]  # of a tensor; groups: the head, the block
    num_heads: str
    num_blocks: str


LAYOUTS = {
    "medusa": Layout(
        block="{head}.{block}.linear",
        output="{head}.{num_blocks}",
        in_block=re.compile(r"(\d+)\.(\d+)\.linear\.\w+"),
        num_heads="medusa_num_heads",
        num_blocks="medusa_num_layers",
    ),
    "vllm": Layout(
        block="blocks.{head}.layers.{block}",
        output="lm_heads.{head}",
        in_block=re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.\w+"),
        num_heads="num_heads",
        num_blocks="num_hidden_layers",
    ),
}
_SHARED = "lm_head"  # one output matrix for all heads


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
        draft_vocab_size: rows of an output matrix, below `vocab_size`; `token_map` [draft_vocab_size] int64 holds their target
            ids, which are distinct. None: as many rows as the target has ids, in their order.
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
        if draft_vocab_size is not None and check_int("draft_vocab_size", draft_vocab_size, 1) >= vocab_size:
            raise ValueError(
                f"draft_vocab_size must be below vocab_size = {vocab_size} or None, got {draft_vocab_size}"
            )
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


def _place(root: nn.Module, path: str, module: nn.Module) -> None:
    """Make it a submodule, at a dotted path."""
    *parents, last = path.split(".")
    for name in parents:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    root.add_module(last, module)
