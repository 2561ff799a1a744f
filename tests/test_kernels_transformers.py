"""`rejection` and the filters against what transformers' own generate() does, at the sizes that it meets."""

from inspect import signature

import pytest
import torch
from chains import FILTERS, Chain, Filters, Probe, drawn_law, g_test, law, random_chain, rows
from tiny_models import tiny
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import _speculative_sampling

from engine.kernels import ops, reference
from engine.kernels.rows import Rows

VOCAB, NUM_DRAFTS = 5, 2
# transformers before 5.18 also asks whether the text ends with the drafts.
NOT_DONE = {"is_done_candidate": False} if "is_done_candidate" in signature(_speculative_sampling).parameters else {}


def drawn_drafts(chain: Chain, count: int) -> Tensor:
    """Drafts for `count` rounds, drawn with torch's generator: [count, K]."""
    drafts = torch.empty(count, 0, dtype=torch.int64)
    for i in range(chain.num_drafts):
        q = law(chain.rows_of(chain.draft[: i + 1], drafts)[:, i], chain.filters)
        drafts = torch.cat([drafts, torch.multinomial(q, 1)], dim=1)
    return drafts


def rounds_of_transformers(chain: Chain, drafts: Tensor) -> Tensor:
    """What transformers emits in a round for each row of drafts: [B, K+1], -1 behind the end."""
    target, draft = (law(chain.rows_of(tables, drafts), chain.filters).log() for tables in (chain.target, chain.draft))
    emitted = torch.full((len(drafts), NUM_DRAFTS + 1), -1)
    for i in range(len(drafts)):
        tokens, _ = _speculative_sampling(
            drafts[i : i + 1], draft[i : i + 1], NUM_DRAFTS, target[i : i + 1], **NOT_DONE
        )
        emitted[i, : tokens.shape[1]] = tokens[0]
    return emitted


def our_rounds(chain: Chain, drafts: Tensor) -> Tensor:
    target, draft = (chain.rows_of(tables, drafts) for tables in (chain.target, chain.draft))
    where = dict(seed=torch.arange(len(drafts)), position=torch.full((len(drafts),), 3))
    return ops.verify(target, drafts, draft, **where, **rows(chain.filters, len(drafts))).tokens


def agreement(emitted: Tensor, exact: list[Tensor]) -> float:
    """The p-value of what rounds emit [N, K+1] against its law, as `drawn_law` gives it."""
    numbered = torch.cat([part.flatten() for part in exact])
    lengths = (emitted >= 0).sum(dim=1)
    digits = emitted.clamp(min=0) * VOCAB ** (lengths[:, None] - 1 - torch.arange(NUM_DRAFTS + 1)).clamp(min=0)
    first = torch.tensor([0, *(part.numel() for part in exact)]).cumsum(dim=0)
    return g_test(first[lengths - 1] + digits.sum(dim=1), numbered)


@pytest.mark.parametrize("filters", ["plain", "all"])
def test_a_round_of_transformers_has_the_law_of_ours(monkeypatch: pytest.MonkeyPatch, filters: str) -> None:
    """Which drafts stand and which token comes next, from their code and from ours, has the exact law of `rejection`;
    and not the one that it would have if the drafts were drawn from another q."""
    chain = random_chain(31, VOCAB, NUM_DRAFTS, "any", FILTERS[filters])
    with monkeypatch.context() as patch:
        probe = Probe(patch, "rejection")
        exact, other = drawn_law(probe, chain), drawn_law(probe, chain, lambda q: q * 0.7)
    torch.manual_seed(7)
    drafts = drawn_drafts(chain, 200_000)
    theirs, ours = rounds_of_transformers(chain, drafts[:10_000]), our_rounds(chain, drafts)
    assert agreement(theirs, exact) > 1e-3 and agreement(ours, exact) > 1e-3
    assert agreement(theirs, other) < 1e-9


COMBINATIONS: list[Filters] = [
    dict(top_k=50),
    dict(temperature=0.7, top_k=50, top_p=0.9),
    dict(temperature=0.8, top_p=0.95, min_p=0.02),
    dict(temperature=1.5, top_k=1000, min_p=0.001),
    dict(temperature=0.6, top_k=20_000, top_p=0.99, min_p=1e-5),
    dict(temperature=1.3, top_k=300, top_p=0.8, min_p=0.05),
    dict(top_p=0.999),
]


def kept_by_generate(logits: Tensor, filters: Filters, slack: float = 0.0) -> Tensor:
    """Logits [V] as generate() warps them for these settings, with bounds on the mass that are looser by `slack`."""
    bounds = {}
    if "top_p" in filters:
        bounds["top_p"] = filters["top_p"] + slack
    if "min_p" in filters:
        bounds["min_p"] = filters["min_p"] * (1 - slack)
    config = GenerationConfig(do_sample=True, **{"top_k": 0, **filters, **bounds})
    return tiny()._get_logits_processor(config, input_ids_seq_length=1)(None, logits[None])[0]


def real_looking_logits(generator: torch.Generator, batch: int, vocab_size: int) -> Tensor:
    """A head of a few likely tokens and a long tail: -log(rank) and noise, in random order."""
    logits = -torch.arange(1, vocab_size + 1).log() + torch.randn(batch, vocab_size, generator=generator)
    return torch.stack([row[torch.randperm(vocab_size, generator=generator)] for row in logits]) + 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [49_152, 151_936])
def test_filters_keep_what_generate_keeps(vocab_size: int, dtype: torch.dtype) -> None:
    """For rows with filters of their own in one batch. generate() warps in float32 too, so that a token may fall to
    either side of a bound on the mass that it meets to 1e-5: ours lies between its sets for a bound that is so much
    tighter and one so much looser. Ties with the last kept token (many in bf16) all stay in ours."""
    logits = real_looking_logits(torch.Generator().manual_seed(5), len(COMBINATIONS), vocab_size).to(dtype)
    off = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    batch = {name: torch.tensor([filters.get(name, off[name]) for filters in COMBINATIONS]) for name in off}
    stats = reference.row_stats(logits, **batch)
    ours = Rows.of(logits.float(), batch["temperature"], stats=stats).log_prob()
    for row, filters, log_p in zip(logits.float(), COMBINATIONS, ours, strict=True):
        theirs, tighter, looser = (kept_by_generate(row, filters, slack) for slack in (0, -1e-5, 1e-5))
        smallest, *bounds = (row[scores > -torch.inf].min() for scores in (theirs, looser, tighter))
        kept = log_p > -torch.inf
        assert bounds[0] <= row[kept].min() <= bounds[1]
        if bounds[0] == bounds[1]:  # nothing near a bound: the same tokens and ties
            extra = kept & (theirs == -torch.inf)
            assert kept[theirs > -torch.inf].all() and (row[extra] == smallest).all()
            if not extra.any():
                torch.testing.assert_close(log_p, theirs.log_softmax(dim=-1), rtol=1e-5, atol=1e-5)
