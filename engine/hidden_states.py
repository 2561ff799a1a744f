"""Hidden states of the target, kept for drafters that build on them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .cache import RaggedCache, slot_numbers


class HiddenStates:
    """Hidden states of some layers for every token of every slot.

    They live as K/V do: what is at position j of a slot is valid if j is below the row's `seq_lens`, and rolling back
    touches nothing. There is one more place than rows can use, for what belongs to padding.

    Args:
        layers: in the counting of transformers' `hidden_states`: i < L is what layer i reads (0: the embeddings), L what
            the head reads, behind the last norm. L + 1 is what the last layer gives, before that norm.
        cache: whose slots and capacity these follow.

    Attributes:
        states: [slots, capacity + 1, len(layers) * H], of the target's dtype; the layers side by side.
    """

    def __init__(self, layers: Sequence[int], cache: RaggedCache) -> None:
        self.layers, self._cache = tuple(layers), cache
        self.states = torch.empty(0)

    @property
    def empty(self) -> bool:
        """Whether the target has read nothing so far."""
        return self.states.numel() == 0

    @property
    def place(self) -> int:
        """Where they lie, which changes with the first call of the target behind a growth of its cache."""
        return self.states.data_ptr()

    def write(self, hidden_states: Sequence[Tensor]) -> None:
        """Keep those of the call that the cache is planned for; hidden_states: all that `layers` counts, [n, W, H] each."""
        new = torch.cat([hidden_states[layer] for layer in self.layers], dim=-1)
        capacity = self._cache.capacity
        if self.empty or self.states.shape[1] <= capacity:
            old = self.states
            self.states = new.new_zeros(self._cache.num_slots, capacity + 1, new.shape[-1])
            if old.numel():
                self.states[:, : old.shape[1] - 1] = old[:, :-1]
        self._cache.plan.write(self.states, new)

    def gather(self, rows: slice | Tensor, positions: Tensor) -> Tensor:
        """[n, W, len(layers) * H] at positions [n, W] of these n slots; those below 0 count as 0."""
        return self.states[slot_numbers(rows, positions.device)[:, None], positions.clamp(0, self.states.shape[1] - 1)]
