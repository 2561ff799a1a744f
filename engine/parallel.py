"""Tensor parallelism: several processes ("ranks"), each with a slice of every layer, serve one target together.

All ranks run the same program with the same prompts. transformers' plan slices the layers, sums their partial results over
the ranks, and gathers the slices of the logits, so every rank has the same whole logits; the random numbers depend on seeds
and positions alone (`kernels/philox.py`). So every rank takes the same decisions by itself, and none are sent around. What
that rests on is compared: the prompts and parameters of a call, and the tokens of each round. What would differ is rank 0's
to say: fresh seeds, and measured times.
"""

import atexit
import hashlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig, PreTrainedModel

from .errors import EngineError, UnsupportedModelError
from .file_digest import file_digest
from .graphs import clear_all

TIMEOUT = timedelta(hours=1)  # for one rank to wait for another; from a slow disk, some load far later than others
_SETTINGS = ("config.json", "generation_config.json")
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


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
    """Check that `size` ranks can share a model, as far as its config tells.

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
        clear_all()
        dist.destroy_process_group()
        # A few runs of a script that had succeeded were aborted at exit, too rarely to find out why for certain. The threads of a
        # group live on where a model's slices refer to it, and one of them may wait for the interpreter, to free the last
        # message: it gets the time.
        time.sleep(0.1)


def require_same_checkpoint(folder: Path, revision: str | None, role: str) -> None:
    """Compare what the ranks are about to read: slices of a stale folder on one of several nodes would make, with those of a new
    one, a model that is neither. All of them call this.

    Args:
        revision: the commit, of a hub id, whose weights may not have been fetched yet; None: they are in the folder.

    Raises:
        ValueError: on every rank, if they differ.
    """
    files = [file for file in folder.iterdir() if file.name in _SETTINGS or file.suffix == ".safetensors"]
    read = [(file.name, file_digest(file)) for file in sorted(files)] if revision is None else revision
    heard: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(heard, read)
    if others := [rank for rank, value in enumerate(heard) if value != heard[0]]:
        raise ValueError(
            f"{role} must be the same checkpoint on every rank, but that of ranks {others} of {len(heard)} differs from rank 0's; "
            f"here it is {folder}"
        )


class Ranks:
    """The ranks that share a target; just this process, to which everything here costs nothing, where it is not shared.

    They talk over the hosts (gloo), so that nobody waits for a device, and a device's rounds for nobody.

    Attributes:
        size: how many they are.
        rank: which of them this is.
    """

    def __init__(self, size: int = 1, rank: int = 0, group: dist.ProcessGroup | None = None) -> None:
        self.size, self.rank, self._group = size, rank, group

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Ranks":
        """Those that a loaded model is spread over. All of them call this.

        Raises:
            UnsupportedModelError: if these are not all processes, or the model's slices do not make a whole.
        """
        size = model.tp_size or 1
        if size == 1:
            return cls()
        if size != dist.get_world_size():
            raise UnsupportedModelError(
                f"target must be spread over all {dist.get_world_size()} processes, got one over {size}"
            )
        from torch.distributed.tensor import DTensor  # not in every build of torch

        head = model.get_output_embeddings()
        (name,) = (name for name, module in model.named_modules() if module is head)
        if name in model.tp_plan and not isinstance(head.weight, DTensor):  # every rank would compute all logits ...
            raise UnsupportedModelError(  # ... and the plan would gather each of them from all ranks
                f"target of type {model.config.model_type!r} has a head tied to embeddings that its tensor parallel plan "
                f"does not slice"
            )
        on_cpu = model.device.type == "cpu"
        return cls(size, dist.get_rank(), None if on_cpu else dist.new_group(backend="gloo", timeout=TIMEOUT))

    def require_same(self, what: str, value: object) -> None:
        """Compare what the ranks were given.

        Args:
            what: its name, for the message.
            value: anything whose repr says it all.

        Raises:
            ValueError: on every rank, if they differ.
        """
        if self.size > 1:
            self._compare(value, (), ValueError, f"{what} must be the same on every rank")

    @contextmanager
    def told_errors(self, what: str) -> Iterator[None]:
        """While this is entered, what the ranks were given is checked. If all is well, `require_same` of the same name is to
        follow; a ValueError is compared here instead, as the others would wait for this rank.
        """
        try:
            yield
        except ValueError as error:
            self.require_same(what, str(error))
            raise

    def agree_on(self, values: Sequence[int]) -> list[int]:
        """Rank 0's values (int64), on every rank. All give equally many."""
        if self.size == 1 or not values:
            return list(values)
        shared = torch.tensor(values, dtype=torch.int64, device="cpu")
        dist.broadcast(shared, src=0, group=self._group)
        return shared.tolist()

    def end_round(self, rows: Sequence[object], seconds: Sequence[float]) -> list[float]:
        """Compare a round's result, and learn how long it took rank 0: decisions that depend on times depend on its times.

        One message of a few bytes from each rank, after the result has come to the host; on GPUs the next round is under
        way by then.

        Args:
            rows: what the running rows emitted; anything whose repr says it all.
            seconds: measured by this rank; or other numbers that decisions depend on.

        Returns:
            Rank 0's.

        Raises:
            EngineError: on every rank, naming those that differ from rank 0.
        """
        if self.size == 1:
            return list(seconds)
        nanoseconds = [round(1e9 * value) for value in seconds]
        heard = self._compare(rows, nanoseconds, EngineError, "all ranks must come to the same tokens in a round")
        return [value / 1e9 for value in heard]

    def _compare(self, value: object, told: Sequence[int], error: type[Exception], rule: str) -> list[int]:
        """Raise the error unless all ranks have the same value; returns what rank 0 tells."""
        digest = hashlib.blake2b(repr(value).encode(), digest_size=7).digest()
        # Each rank fills its part.
        message = torch.zeros(self.size + len(told), dtype=torch.int64, device="cpu")
        message[self.rank] = int.from_bytes(digest)
        if self.rank == 0:
            message[self.size :] = torch.tensor(told, dtype=torch.int64, device="cpu")
        dist.all_reduce(message, group=self._group)
        heard = message.tolist()
        others = [rank for rank in range(self.size) if heard[rank] != heard[0]]
        if others:
            raise error(f"{rule}, but ranks {others} of {self.size} differ from rank 0")
        return heard[self.size :]
