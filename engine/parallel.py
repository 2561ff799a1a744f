"""Tensor parallelism: several processes ("ranks"), each with a slice of every layer, serve one target together.

All ranks run the same program with the same prompts. transformers' plan slices the layers, sums their partial results over
the ranks, and gathers the slices of the logits, so every rank has the same whole logits; the random numbers depend on seeds
and positions alone (`kernels/philox.py`). So every rank takes the same decisions by itself, and none are sent around. What
that rests on is compared: the prompts and parameters of a call, and one number for each round's result. What may differ is
rank 0's to say: fresh seeds, and decisions that depend on measured times.
"""

import atexit
import hashlib
import os
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from .errors import EngineError, UnsupportedModelError

TIMEOUT = timedelta(hours=1)  # for one rank to wait for another; from a slow disk, some load far later than others
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_FACTOR = -7046029254386353131  # 2**64 / golden ratio, odd, as int64


def world_size() -> int:
    """Number of ranks: of the process group if there is one already, else as the launcher says.

    Raises:
        ValueError: outside of a launcher.
    """
    if not dist.is_available():
        raise ValueError("tensor_parallel needs a build of torch with torch.distributed")
    if dist.is_initialized():
        return dist.get_world_size()
    missing = [name for name in _LAUNCHER if name not in os.environ]
    if missing:
        raise ValueError(
            f"tensor_parallel must be used in processes that torchrun has started (torchrun --nproc-per-node N program.py), "
            f"but the environment has no {', '.join(missing)}"
        )
    return int(os.environ["WORLD_SIZE"])


def check_divisible(config: PretrainedConfig, size: int, role: str) -> None:
    """Whether `size` ranks can share a model, as far as its config tells.

    Raises:
        UnsupportedModelError: if transformers has no plan for the architecture.
        ValueError: if heads cannot be shared out evenly.
    """
    text = config.get_text_config()
    plan: dict[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    if not plan:
        raise UnsupportedModelError(f"{role} of type {config.model_type!r} has no tensor parallel plan in transformers")
    names = []
    if any(style == "colwise" and "att" in name for name, style in plan.items()):
        names += ["num_attention_heads", "num_key_value_heads"]
    if any(style.startswith("packed") for style in plan.values()):
        names += ["intermediate_size", "moe_intermediate_size"]
    for name in names:
        value = getattr(text, name, None)  # some architectures have one for each layer
        for count in value if isinstance(value, list | tuple) else [value or 0]:
            if count % size:
                raise ValueError(f"{role} must have {name} divisible by the {size} processes, got {count}")


def join() -> torch.device:
    """Become one of the ranks; returns this rank's device.

    Makes the process group, if the program has not, with NCCL on GPUs and gloo on CPUs, and takes it down at exit. A group
    that was there already is used as it is, and stays.

    Raises:
        ValueError: if this node has fewer GPUs than processes.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", 0))
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"tensor_parallel needs a GPU for each process of a node, got LOCAL_RANK={local} and "
                f"{torch.cuda.device_count()} visible GPUs"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "nccl"
        dist.init_process_group(backend, timeout=TIMEOUT, device_id=None if device.type == "cpu" else device)
        atexit.register(_leave)
    return device


def _leave() -> None:
    """Take our group down; not after an error, where that could wait for ranks that never come."""
    if dist.is_initialized() and not hasattr(sys, "last_type"):
        dist.destroy_process_group()


class Ranks:
    """The ranks that share a target; just this process, to which everything here costs nothing, where it is not shared.

    Attributes:
        size: how many they are.
        rank: which of them this is.
    """

    def __init__(self, size: int = 1, rank: int = 0, device: torch.device | None = None) -> None:
        self.size, self.rank, self._device = size, rank, device
        self._factors = torch.empty(0, dtype=torch.int64)

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Ranks":
        """Those that a loaded model is spread over.

        Raises:
            UnsupportedModelError: if these are not all processes, or the model's slices do not make a whole.
        """
        size = model.tp_size or 1
        if size == 1:
            return cls()
        from torch.distributed.tensor import DTensor  # not in every build of torch

        if size != dist.get_world_size():
            raise UnsupportedModelError(
                f"target must be spread over all {dist.get_world_size()} processes, got one over {size}"
            )
        head = model.get_output_embeddings()
        (name,) = (name for name, module in model.named_modules() if module is head)
        if name in model.tp_plan and not isinstance(head.weight, DTensor):  # every rank would compute all logits ...
            raise UnsupportedModelError(  # ... and the plan would gather each of them from all ranks
                f"target of type {model.config.model_type!r} has a head tied to embeddings that its tensor parallel plan "
                f"does not slice"
            )
        return cls(size, dist.get_rank(), model.device)

    def require_same(self, what: str, value: object) -> None:
        """Compare what the ranks were given.

        Args:
            what: its name, for the message.
            value: anything whose repr says it all.

        Raises:
            ValueError: on every rank, if they differ.
        """
        if self.size > 1:
            digest = hashlib.blake2b(repr(value).encode(), digest_size=7).digest()
            digests = self._gather(self._tensor([int.from_bytes(digest)])).tolist()
            self._compare(digests, ValueError, f"{what} must be the same on every rank")

    def agree_on(self, values: Sequence[int]) -> list[int]:
        """Rank 0's values (int64), on every rank. All give equally many."""
        if self.size == 1 or not values:
            return list(values)
        shared = self._tensor(values)
        dist.broadcast(shared, src=0)
        return shared.tolist()

    def broadcast_int(self, value: int) -> int:
        """Rank 0's value: for decisions that depend on what each rank has measured by itself."""
        return self.agree_on([value])[0]

    def read(self, packed: Tensor) -> list[list[int]]:
        """A round's packed result ([B, N] int64) on the host, in one copy, compared between the ranks on its way.

        A 64-bit hash of each rank's result is gathered on the device: 8 bytes from each, beside the megabytes that the
        layers have exchanged in the round.

        Raises:
            EngineError: on every rank, naming those that differ from rank 0.
        """
        if self.size == 1:
            return packed.tolist()
        flat = packed.flatten()
        if self._factors.shape != flat.shape:
            self._factors = torch.full_like(flat, _FACTOR).cumprod(0)  # int64 wraps around
        hashes = self._gather((flat * self._factors).sum(0, keepdim=True))
        values = torch.cat([flat, hashes]).tolist()
        self._compare(values[flat.numel() :], EngineError, "all ranks must come to the same tokens in a round")
        width = packed.shape[1]
        return [values[row * width : (row + 1) * width] for row in range(packed.shape[0])]

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _gather(self, own: Tensor) -> Tensor:
        """[1] int64 of this rank to [size], by rank."""
        everyone = own.new_zeros(self.size)
        everyone[self.rank] = own[0]
        dist.all_reduce(everyone)  # a sum; gathering into a tensor has another name in every other release of torch
        return everyone

    @staticmethod
    def _compare(values: list[int], error: type[Exception], rule: str) -> None:
        others = [rank for rank, value in enumerate(values) if value != values[0]]
        if others:
            raise error(f"{rule}, but ranks {others} of {len(values)} differ from rank 0")
