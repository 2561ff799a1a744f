"""`engine.training.loop`: every step, rate and validation of a whole training, against the textbook's loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.training import loop
from engine.training.batches import batches
from engine.training.hidden_files import Text
from engine.training.loop import CLIP, learning_rate, train
from engine.training.options import TrainingOptions


class Toy(nn.Module):
    """Learns the mean of a batch's tokens, whose squares give gradients that have to be clipped."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -1.0, 4.0]))

    def forward(self, batch: Any) -> Any:
        mean = batch.tokens.float().sum() / batch.lengths.sum()
        loss = ((self.weight - mean) ** 2).sum() * (1 if int(batch.tokens[0, 0]) % 2 else 1e-3)
        count = torch.tensor(len(batch.tokens))
        return loss, [torch.stack([count, count // 2])]


class Groups(list[Any]):
    """Stands for `KeptTexts`."""

    @property
    def num_tokens(self) -> int:
        return sum(len(text.tokens) for group in self for text in group)


def groups_of(values: range) -> Any:
    """A group of one text for each value, which says nothing else, one to three times."""
    return Groups([[Text(torch.full((1 + v % 3,), v), torch.zeros(1 + v % 3, 2), 0)] for v in values])


def test_training_is_the_textbooks_loop(tmp_path: Path) -> None:
    """Each epoch in its own order, at the rate of its schedule, with gradients of one batch; validation over its own texts.

    A drafter that was trained otherwise still works, and is only worse.
    """
    texts, validation = groups_of(range(1, 30)), groups_of(range(1000, 1005))
    options = TrainingOptions("medusa", "target", epochs=3, learning_rate=0.3, tokens_per_batch=8, seed=5)
    module, expected = Toy(), Toy()
    log = train(module, texts, validation, tmp_path, options)
    ends = [record["validation"]["loss"] for record in log if "validation" in record]
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.01)
    tokens, rates, losses = 0, [], []
    for epoch in range(3):
        for batch in batches(texts, 8, 5, epoch):
            rates.append(0.3 * learning_rate(tokens / (3 * texts.num_tokens)))
            optimizer.param_groups[0]["lr"] = rates[-1]
            optimizer.zero_grad()
            loss, _ = expected(batch)
            losses.append(loss.item())
            loss.backward()
            nn.utils.clip_grad_norm_(expected.parameters(), CLIP)
            optimizer.step()
            tokens += int(batch.lengths.sum())
        with torch.no_grad():
            found = [(expected(batch)[0].item(), len(batch.tokens)) for batch in batches(validation, 8, 0, 0)]
        assert ends[epoch] == pytest.approx(sum(loss * count for loss, count in found) / 5, rel=1e-5)
    steps = [record for record in log if "validation" not in record]
    assert [step["rate"] for step in steps] == rates
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(module.weight, expected.weight)


def test_checkpoints_come_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here in every sixth step, and at the end; after each step, they would take longer than the training."""
    clock, save, saved = iter(range(0, 10**6, 10)), torch.save, []
    monkeypatch.setattr(loop, "_now", lambda: next(clock))
    monkeypatch.setattr(torch, "save", lambda *given: saved.append(1) or save(*given))
    options = TrainingOptions("medusa", "target", epochs=1, tokens_per_batch=1)
    log = train(Toy(), groups_of(range(60)), groups_of(range(2)), tmp_path, options)
    assert len(log) == 61 and 8 <= len(saved) <= 11
