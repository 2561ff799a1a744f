"""What a user says about a training. Imports neither torch nor transformers."""

from dataclasses import dataclass, field, fields
from typing import Any

from ..config import MAX_TEMPERATURE, check_bool, check_int, check_ints, is_number, is_temperature, set_fields

METHODS = ("eagle3", "medusa", "mlp", "draft-model")
LOSSES = ("kl", "lk")  # see `losses.draft_loss`
# Options of some methods only; elsewhere they must have their defaults.
ONLY_FOR = {
    "draft_vocab_size": ("eagle3",),
    "layers": ("eagle3",),
    "start_from": ("eagle3",),
    "freeze_head": ("eagle3",),
    "num_steps": ("eagle3", "medusa", "mlp"),
    "num_layers": ("draft-model",),
}
_AT_LEAST_ONE = (
    "max_new_tokens", "batch_size", "draft_vocab_size", "num_steps", "num_layers", "epochs", "tokens_per_batch",
)  # fmt: skip


def check_loss(loss: Any) -> None:
    """Raise ValueError unless it is one of LOSSES."""
    if loss not in LOSSES:
        raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {loss!r}")


@dataclass(frozen=True)
class TrainingOptions:
    """What to train, on what, and how.

    Attributes:
        method: one of METHODS.
        target: hub id, folder or GGUF file.
        chat: prompts that are plain text are wrapped in the tokenizer's chat template, if it has one.
        temperatures: the prompts are answered at these in turn.
        max_new_tokens: of each answer.
        max_length: of a prompt with its answer; at most the target's context counts.
        batch_size: prompts that are answered together.
        validation_share: of the prompts, the last ones; nothing is learned from them. At least one, and not all.
        draft_vocab_size: eagle3: so many of the answers' most frequent tokens can be drafted; see `start_from`.
        layers: eagle3: the hidden states that it reads, ascending, in the counting of `HiddenStates`; empty: the three of EAGLE-3,
            2, L/2 and L-3 of a target of L layers. Other servers load heads that read three of them, without L, which is what the
            target's head reads; any other head is for this engine alone. With `start_from`, in the order of that head.
        start_from: eagle3: folder or hub id of a head, or the name of a packaged one, to begin with instead of new weights; its
            `layers` are read, and its draft vocabulary is kept where it has an output matrix of its own.
        freeze_head: eagle3: the output matrix stays that of the target, and is not saved. The tokens that a text has can then be
            drafted, too, whatever the draft vocabulary. For this engine alone.
        num_steps: eagle3, medusa, mlp: drafts in a chain while training; for medusa and mlp the longest draft ever.
        num_layers: draft-model: of the target's.
        learn_prompts: what follows in the prompts is learned too: much more to learn from in the same time, where prompts read
            like what the target writes.
        loss: one of LOSSES: "kl", that the drafter's distribution be like the target's, or "lk", that its drafts be accepted.
        epochs: times that every answer is learned from.
        learning_rate: the highest.
        tokens_per_batch: padding included.
        seed: of answers, first weights and the order of texts.
        max_disk_gb: hidden states take so many GB (10^9 bytes) of the disk at most; texts for which there is no more room are read
            by the target again in each epoch. None: all are kept. It may differ when a run is taken up again.
        dtype: of the target, see `engine.load`; drafters are trained in float32 (with autocast) and saved in bfloat16.
        device: of the target and of the training, see `engine.load`. It may differ when a run is taken up again.

    Raises:
        ValueError: naming the option, the value and the rule.
    """

    method: str
    target: str
    chat: bool = True
    temperatures: tuple[float, ...] = (0.0, 0.7)
    max_new_tokens: int = 160
    max_length: int = 768
    batch_size: int = 64
    validation_share: float = 0.05
    draft_vocab_size: int = 8192
    layers: tuple[int, ...] = ()
    start_from: str | None = None
    freeze_head: bool = False
    num_steps: int = 4
    num_layers: int = 4
    learn_prompts: bool = False
    loss: str = "kl"
    epochs: int = 4
    learning_rate: float = 1e-3
    tokens_per_batch: int = 4096
    seed: int = 0
    max_disk_gb: float | None = field(default=None, metadata={"part_of_settings": False})
    dtype: str = "auto"
    device: str = field(default="auto", metadata={"part_of_settings": False})

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        if not isinstance(self.target, str) or not self.target:
            raise ValueError(f"target must be a hub id, a folder or a GGUF file, got {self.target!r}")
        check_loss(self.loss)
        self._check_method_takes()
        checked: dict[str, Any] = {name: check_int(name, getattr(self, name), 1) for name in _AT_LEAST_ONE}
        checked["max_length"] = check_int("max_length", self.max_length, 2)
        checked["seed"] = check_int("seed", self.seed, 0, 2**62)
        checked["layers"] = layers = check_ints("layers", self.layers, 0)
        if self.start_from is None and list(layers) != sorted(set(layers)):
            raise ValueError(f"layers must be ascending, each once, got {list(layers)}")
        for name in ("chat", "freeze_head", "learn_prompts"):
            check_bool(name, getattr(self, name))
        if not is_number(self.validation_share) or not 0 < self.validation_share < 1:
            raise ValueError(f"validation_share must be in (0, 1), got {self.validation_share!r}")
        if not is_number(self.learning_rate) or not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be a finite number > 0, got {self.learning_rate!r}")
        if self.max_disk_gb is not None and not (is_number(self.max_disk_gb) and self.max_disk_gb >= 0):
            raise ValueError(f"max_disk_gb must be a finite number >= 0, or None, got {self.max_disk_gb!r}")
        checked |= {"validation_share": float(self.validation_share), "learning_rate": float(self.learning_rate)}
        given = self.temperatures
        if not isinstance(given, list | tuple) or not given or not all(map(is_temperature, given)):
            raise ValueError(
                f"temperatures must be a list of at least one finite number, all >= 0 and <= {MAX_TEMPERATURE:g}, got {given!r}"
            )
        checked["temperatures"] = tuple(map(float, given))
        set_fields(self, checked)

    def _check_method_takes(self) -> None:
        """Options of other methods must have their defaults."""
        for option in fields(self):
            value, methods = getattr(self, option.name), ONLY_FOR.get(option.name, METHODS)
            if self.method not in methods and value != option.default:
                raise ValueError(
                    f"{option.name} must not be given for the method {self.method}, got {value!r}: it is an option of "
                    f"{', '.join(methods)}"
                )
