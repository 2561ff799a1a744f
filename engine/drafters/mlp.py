"""Drafting with an MLP speculator (Wertheimer et al., arXiv 2404.19124)."""

import math
import re
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, rms_norm

from ..config import check_int
from ..penalty import penalise_drafter
from ..state import BatchState, Proposal
from .head_files import HeadFiles, fill, write_head
from .hidden_head import HeadModel, HiddenHeadDrafter
from .proposals import any_reaches, check_min_reach, nothing, side_by_side

MIN_REACH = 0.1  # drafting ends where a draft is less likely than this to be accepted, on a CPU, where looking is free
_ARCHITECTURE = "MLPSpeculatorPreTrainedModel"
_PART = re.compile(r"(emb|proj|head|ln)\.(\d+)\.(\w+)")


class ScaleNorm(nn.Module):
    """x / rms(x), then scale and shift: a layer norm that does not subtract the mean."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same."""
        return rms_norm(x, x.shape[-1:], self.weight, eps=1e-6) + self.bias


class MlpSpeculator(HeadModel):
    """A recurrent network: each step reads the token that was drafted last, and has weights of its own.

    The first state is the target's hidden state. In step i, with a weight a close to 1 (by the last step the target's hidden
    state makes up half of the state's square)

        state = gelu(ln_i(a * proj_i(state) + sqrt((1 - a^2) * inner_size / 2) * emb_i(token))),   logits = head_i(state)

    Args:
        hidden_size: of the target.
        vocab_size: of the target.
        num_steps: the longest draft; `n_predict` in config.json.
        inner_size: of the state; None: that of the target's.
        tie_weights: all steps share their weights, except that the first has a `proj` of its own.
        scale_input: the target's hidden state is first divided by its root mean square and by sqrt(2).

    Raises:
        ValueError: naming the argument, the value and the rule.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        num_steps: int = 3,
        inner_size: int | None = None,
        tie_weights: bool = False,
        scale_input: bool = False,
    ) -> None:
        super().__init__()
        inner = hidden_size if inner_size is None else inner_size
        sizes = dict(hidden_size=hidden_size, vocab_size=vocab_size, num_steps=num_steps, inner_size=inner)
        for name, value in sizes.items():
            check_int(name, value, 1)
        self.hidden_size, self.vocab_size, self.num_steps, self.inner_size = hidden_size, vocab_size, num_steps, inner
        self.tie_weights, self.scale_input, self.extra = bool(tie_weights), bool(scale_input), {}
        kinds = 1 if tie_weights else num_steps
        self.emb = nn.ModuleList(nn.Embedding(vocab_size, inner) for _ in range(kinds))
        self.proj = nn.ModuleList(
            nn.Linear(inner if step else hidden_size, inner, bias=False)
            for step in range(min(2, num_steps) if tie_weights else num_steps)
        )
        self.ln = nn.ModuleList(ScaleNorm(inner) for _ in range(kinds))
        self.head = nn.ModuleList(nn.Linear(inner, vocab_size, bias=False) for _ in range(kinds))
        for matrix in (*self.emb, *self.proj, *self.head):
            nn.init.normal_(matrix.weight, std=inner**-0.5)
        self._state_weight = 0.5 ** (0.5 / num_steps)
        self._token_weight = math.sqrt((1 - self._state_weight**2) * (inner / 2))

    def first_state(self, hidden: Tensor) -> Tensor:
        """From the target's hidden states [..., H]."""
        return rms_norm(hidden, hidden.shape[-1:], eps=1e-6) * 0.5**0.5 if self.scale_input else hidden

    def forward(self, step: int, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The state [..., inner_size] after a step, and its logits [..., V]; `tokens` [...] int64 are those before it."""
        emb, proj, ln, head = (parts[min(step, len(parts) - 1)] for parts in (self.emb, self.proj, self.ln, self.head))
        state = gelu(ln(self._state_weight * proj(state) + self._token_weight * emb(tokens)))
        return state, head(state)


class MlpSpeculatorDrafter(HiddenHeadDrafter):
    """An MLP speculator as a chain: each step reads the target's hidden state and what was drafted so far.

    At most as many tokens are drafted as it has steps.

    Args:
        model: the network; it is moved to the target's device and dtype by `attach`, and on a CPU its weights are packed.
        greedy: propose what is likeliest instead of drawing from the network's distributions.
        min_reach: on a CPU, and where drafts are greedy, drafting ends when the product of the network's probabilities of its
            drafts falls below this in every row; in [0, 1].
        source: where the network is from, for messages.

    Raises:
        ValueError: naming the argument, the value and the rule.
    """

    model: MlpSpeculator

    def __init__(
        self, model: MlpSpeculator, greedy: bool = False, min_reach: float = MIN_REACH, source: Any = "drafter"
    ) -> None:
        super().__init__(model, greedy, source)
        check_min_reach(min_reach)
        self.min_reach = min_reach

    @staticmethod
    def matches(config: dict[str, Any]) -> bool:
        """Whether the config is that of an MLP speculator."""
        return config.get("model_type") == "mlp_speculator" or _ARCHITECTURE in _architectures(config)

    @classmethod
    def from_files(cls, files: HeadFiles, **options: Any) -> Self:
        """From a checkpoint of model_type "mlp_speculator".

        Raises:
            ValueError: for another architecture; for tensors that are missing, extra or of another shape than the config says.
        """
        return cls(build(files), **{"source": files.folder, **options})

    def save(self, folder: str | Path) -> None:
        """Write config.json and the network, for `from_pretrained` and others.

        Raises:
            ValueError: if the folder holds other *.safetensors files.
            OSError: if there is no room; the folder then holds what it held before.
        """
        model = self.model
        config: dict[str, Any] = {"top_k_tokens_per_head": [1] * model.num_steps, "n_candidates": 1, **model.extra}
        config |= dict(
            model_type="mlp_speculator",
            architectures=[_ARCHITECTURE],
            emb_dim=model.hidden_size,
            inner_dim=model.inner_size,
            vocab_size=model.vocab_size,
            n_predict=model.num_steps,
            tie_weights=model.tie_weights,
            scale_input=model.scale_input,
        )
        tensors = {f"speculator.{name}": value for name, value in model.state_dict().items()}
        write_head(folder, config, tensors, "model.safetensors")

    @torch.inference_mode()
    def propose(self, state: BatchState, num_draft_tokens: int) -> Proposal:
        """Draw token after token, each row under its own temperature and filters."""
        hidden = self._last_hidden(state)
        if hidden is None:
            return nothing(state)
        inner, tokens = self.model.first_state(hidden), state.pending[:, None]
        steps: list[Proposal] = []
        reach: Tensor | float = 1.0
        for step in range(min(num_draft_tokens, self.model.num_steps)):
            inner, logits = self.model(step, inner, tokens)
            logits = penalise_drafter(logits, state, [drawn.tokens for drawn in steps])
            steps.append(self._draw(state, logits, step))
            tokens = steps[-1].tokens.clamp(min=0)
            if steps[-1].confidence is not None and state.can_look:
                reach = reach * steps[-1].confidence
                if not any_reaches(reach, state, self.min_reach):
                    break
        return side_by_side(steps)

    def ends_early(self, state: BatchState) -> bool:
        """Where drafts are greedy and can be looked at; see `min_reach`."""
        return state.can_look and (self.greedy or state.all_greedy) and self.min_reach > 0


def build(files: HeadFiles) -> MlpSpeculator:
    """The network in a folder.

    Raises:
        ValueError: for another architecture; for tensors that are missing, extra or of another shape than the config says.
    """
    architectures = _architectures(files.config)
    if architectures and _ARCHITECTURE not in architectures:
        raise ValueError(f"{files.folder} must hold the architecture {_ARCHITECTURE}, got {architectures}")
    tensors = {name.removeprefix("speculator."): value for name, value in files.tensors.items()}
    tied = bool(files.config.get("tie_weights"))
    if tied:
        tensors = _once(tensors, files.folder)
    hidden = files.number("emb_dim")
    with torch.device("meta"):
        model = MlpSpeculator(
            hidden,
            files.number("vocab_size"),
            files.number("n_predict"),
            files.number("inner_dim") if files.config.get("inner_dim") else hidden,
            tied,
            bool(files.config.get("scale_input")),
        )
    dtype = next((value.dtype for value in tensors.values() if value.is_floating_point()), torch.float32)
    model.to(dtype).to_empty(device="cpu")
    fill(model, tensors, files.folder)
    model.extra = dict(files.config)
    return model


def _once(tensors: dict[str, Tensor], source: Path) -> dict[str, Tensor]:
    """Without the repetitions of tied tensors.

    Raises:
        ValueError: if one differs from what it is tied to.
    """
    kept = {}
    for name, value in tensors.items():
        found = _PART.fullmatch(name)
        # The first proj is of another size, so that it stands alone, and those behind it are tied to the second.
        first = 1 if found and found[1] == "proj" and found[2] != "0" else 0
        tied_to = f"{found[1]}.{first}.{found[3]}" if found else name
        if tied_to == name:
            kept[name] = value
        elif tied_to in tensors and not torch.equal(value, tensors[tied_to]):
            raise ValueError(f"{source}: {name} must equal {tied_to}, as the config says tie_weights, but it does not")
    return kept


def _architectures(config: dict[str, Any]) -> list[str]:
    found = config.get("architectures") or []
    return [found] if isinstance(found, str) else list(found)
