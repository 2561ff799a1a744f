"""The target reads prompts and answers; its hidden states go to safetensors files, the material of training.

A file holds some texts, one after the other. For token t of the file: `tokens[t]` int64 and `hidden[t]`, the hidden states
[len(layers) * H] asked for, of the target's dtype, the last of them what the target's head reads. Text i is
[offsets[i], offsets[i + 1]), and its answer begins after `prompt_lengths[i]` tokens.
"""

import itertools
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from .answers import Answer
from .files import replacing

# At most of one group, of which several are in memory at once; a single text may take more bytes.
TEXTS_PER_GROUP, BYTES_PER_GROUP = 256, 10**9
_TOKENS_PER_CALL = 4096


class Text(NamedTuple):
    """One prompt with its answer."""

    tokens: Tensor  # [T] int64
    hidden: Tensor  # [T, F]
    prompt_length: int


class KeptTexts:
    """Texts with their hidden states, in groups: a group is in its file or, where there is none, the target reads it each
    time that it is asked for.

    Args:
        layers: in the counting of `HiddenStates`, the last one that of the head's input.
        folder: of the files.
        max_length: texts are cut to so many tokens.

    Raises:
        ValueError: if a file that is there is damaged.
    """

    def __init__(
        self, model: PreTrainedModel, answers: Sequence[Answer], layers: Sequence[int], folder: Path, max_length: int
    ) -> None:
        self._model, self._layers, self._max_length = model, layers, max_length
        self._groups = list(self._grouped(answers))
        self._folder = folder
        self.files = [folder / f"hidden-{index:05}.safetensors" for index in range(len(self._groups))]
        for file in self.files:
            if file.exists():
                check_file(file)

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int) -> list[Text]:
        if self.files[index].exists():
            return read_texts(self.files[index])
        with self._bar(self._tokens(self._groups[index]), leave=False) as bar:
            return self._read(index, bar)

    @property
    def num_tokens(self) -> int:
        """Of all texts."""
        return sum(map(self._tokens, self._groups))

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(map(self._bytes, self._groups))

    def write(self, room: float = math.inf) -> None:
        """Make the files that are not there yet, one after the other, as long as all files take at most `room` bytes; those
        beyond, of a call with more room, go.

        Raises:
            OSError: before any work, if the disk has not as much; or if a file cannot be written. What is there stays.
        """
        sizes = list(itertools.accumulate(map(self._bytes, self._groups)))
        for file, size in zip(self.files, sizes, strict=True):
            if size > room:
                file.unlink(missing_ok=True)
        todo = [i for i, size in enumerate(sizes) if size <= room and not self.files[i].exists()]
        needed = sum(self._bytes(self._groups[i]) for i in todo)
        free = shutil.disk_usage(self._folder).free
        if needed > 0.95 * free:
            raise OSError(
                f"hidden states need {needed / 1e9:.1f} GB in {self._folder}, where {free / 1e9:.1f} GB are free: give a lower "
                f"max_disk_gb, fewer prompts or another --out"
            )
        with self._bar(sum(self._tokens(self._groups[i]) for i in todo)) as bar:
            for index in todo:
                _write(self.files[index], self._read(index, bar))

    def _grouped(self, answers: Sequence[Answer]) -> Iterator[list[Answer]]:
        group: list[Answer] = []
        size = 0
        for answer in answers:
            more = self._bytes([answer])
            if group and (len(group) == TEXTS_PER_GROUP or size + more > BYTES_PER_GROUP):
                yield group
                group, size = [], 0
            group.append(answer)
            size += more
        if group:
            yield group

    def _bytes(self, group: Sequence[Answer]) -> int:
        width: int = len(self._layers) * self._model.config.get_text_config().hidden_size * self._model.dtype.itemsize
        return self._tokens(group) * (width + 8)

    def _tokens(self, group: Sequence[Answer]) -> int:
        return sum(min(len(a.prompt_token_ids) + len(a.token_ids), self._max_length) for a in group)

    @staticmethod
    def _bar(tokens: int, leave: bool = True) -> tqdm:
        return tqdm(total=tokens, unit="token", unit_scale=True, desc="hidden states", leave=leave)

    def _read(self, index: int, bar: tqdm) -> list[Text]:
        return list(_read(self._model, self._groups[index], self._layers, self._max_length, bar))


def _read(
    model: PreTrainedModel, group: Sequence[Answer], layers: Sequence[int], max_length: int, bar: tqdm
) -> Iterator[Text]:
    """The texts of a group. Those of like length are read together, with little padding; the longest first."""
    texts = sorted(((a.prompt_token_ids + a.token_ids)[:max_length], len(a.prompt_token_ids)) for a in group)
    texts.sort(key=lambda text: len(text[0]))
    while texts:
        count = max(1, sum(len(texts[-1][0]) * (i + 1) <= _TOKENS_PER_CALL for i in range(len(texts))))
        batch, texts = texts[-count:], texts[:-count]
        lengths = torch.tensor([len(tokens) for tokens, _ in batch])
        padded = torch.tensor([tokens + [0] * (int(lengths.max()) - len(tokens)) for tokens, _ in batch])
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        with torch.inference_mode():
            states = model.base_model(
                input_ids=padded.to(model.device), attention_mask=mask.to(model.device), output_hidden_states=True,
                use_cache=False,
            ).hidden_states  # fmt: skip
            hidden = torch.cat([states[layer] for layer in layers], dim=-1).cpu()
        for row, (tokens, prompt_length) in enumerate(batch):
            yield Text(torch.tensor(tokens), hidden[row, : len(tokens)], min(prompt_length, len(tokens)))
            bar.update(len(tokens))


def _write(file: Path, texts: Sequence[Text]) -> None:
    """Under another name first: a file that is there is whole."""
    lengths = torch.tensor([0, *(len(text.tokens) for text in texts)])
    tensors = {
        "tokens": torch.cat([text.tokens for text in texts]),
        "hidden": torch.cat([text.hidden for text in texts]),
        "offsets": lengths.cumsum(0),
        "prompt_lengths": torch.tensor([text.prompt_length for text in texts]),
    }
    with replacing(file) as partial:
        save_file(tensors, partial)


def check_file(file: Path) -> None:
    """Raise ValueError if a file of texts is damaged."""
    with _opened(file) as found:
        found.get_tensor("offsets")


def read_texts(file: Path) -> list[Text]:
    """All texts of a file.

    Raises:
        ValueError: if the file is damaged.
    """
    with _opened(file) as found:
        tokens, hidden = found.get_tensor("tokens"), found.get_tensor("hidden")
        offsets, prompts = found.get_tensor("offsets").tolist(), found.get_tensor("prompt_lengths").tolist()
    return [
        Text(tokens[begin:end], hidden[begin:end], prompt)
        for begin, end, prompt in zip(offsets, offsets[1:], prompts, strict=False)
    ]


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, "pt") as found:
            yield found
    except SafetensorError as error:
        raise ValueError(
            f"{file} must hold the hidden states of some texts: {error}; delete that file to recreate it"
        ) from error
