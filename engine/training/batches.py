"""Texts in batches: padded, in an order that depends on the seed and the epoch alone."""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .hidden_files import Text

_GROUPS_AT_A_TIME = 4  # mixed with each other; so many are in memory


class TextGroups(Protocol):
    """Groups of texts, which may be read when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sequence[Text]: ...


class Batch(NamedTuple):
    """Texts side by side, padded at the end."""

    tokens: Tensor  # [B, T] int64
    hidden: Tensor  # [B, T, F], of the target's dtype
    lengths: Tensor  # [B] int64
    prompt_lengths: Tensor  # [B] int64

    def to(self, device: torch.device) -> "Batch":
        """The same on a device."""
        return Batch(*(tensor.to(device) for tensor in self))


def batches(
    groups: TextGroups, tokens_per_batch: int, seed: int, epoch: int, learn_prompts: bool = False
) -> Iterator[Batch]:
    """All texts once, on the CPU; those of a batch have prompts of like length.

    Args:
        tokens_per_batch: padding included; a text that is longer is a batch of its own.
        learn_prompts: a prompt counts as part of its answer.
    """
    rng = random.Random(f"{seed}/{epoch}")
    order = list(range(len(groups)))
    rng.shuffle(order)
    for begin in range(0, len(order), _GROUPS_AT_A_TIME):
        texts = [text for index in order[begin : begin + _GROUPS_AT_A_TIME] for text in groups[index]]
        if learn_prompts:
            texts = [text._replace(prompt_length=0) for text in texts]
        texts.sort(key=lambda text: (text.prompt_length, len(text.tokens)))
        neighbours = list(_neighbours(texts, tokens_per_batch))
        rng.shuffle(neighbours)
        yield from map(collate, neighbours)


def collate(texts: Sequence[Text]) -> Batch:
    """Pad texts to the longest of them."""
    return Batch(
        pad_sequence([text.tokens for text in texts], batch_first=True),
        pad_sequence([text.hidden for text in texts], batch_first=True),
        torch.tensor([len(text.tokens) for text in texts]),
        torch.tensor([text.prompt_length for text in texts]),
    )


def _neighbours(texts: Sequence[Text], tokens_per_batch: int) -> Iterator[list[Text]]:
    """As many as stay within so many tokens with padding."""
    group: list[Text] = []
    for text in texts:
        longest = max(len(text.tokens), *(len(other.tokens) for other in group), 0)
        if group and longest * (len(group) + 1) > tokens_per_batch:
            yield group
            group = []
        group.append(text)
    if group:
        yield group
