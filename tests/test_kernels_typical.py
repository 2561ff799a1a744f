"""The Triton verify under `typical`, whose limit comes from the entropy of a row, against its torch twin and float64."""

import pytest
import torch
from chains import FILTERS, law, rows
from kernel_cases import check_verify, random_rows, verify_case

from engine.kernels import reference

pytestmark = pytest.mark.usefixtures("poisoned_empty")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("limits", [(0.09, 0.3), (0.02, 0.9), (0.5, 0.05)], ids=str)
def test_what_typical_accepts(limits: tuple[float, float], filters: str) -> None:
    """p(x) > min(epsilon, delta exp(-H)), in float64 from transformers' distributions; outside the filters p is 0."""
    more = dict(method="typical", typical_epsilon=limits[0], typical_delta=limits[1])
    case = verify_case(generator(16), 400, 1, 40) | dict(temperature=None)
    case["target_logits"] *= torch.linspace(0.1, 2, 400)[:, None, None]  # from flat to peaked
    p = law(case["target_logits"][:, 0].double(), FILTERS[filters])
    case["draft_tokens"] = p.argsort(dim=-1, descending=True).gather(1, torch.arange(400)[:, None] % 13)
    case |= rows(FILTERS[filters], 400, torch.float32)
    entropy = -torch.xlogy(p, p).sum(dim=-1)
    stands = p.gather(1, case["draft_tokens"]).squeeze(1) > (limits[1] * torch.exp(-entropy)).clamp(max=limits[0])
    assert 20 < stands.sum() < 380
    verdict = reference.verify(**case, **more)
    assert torch.equal(verdict.num_accepted.bool(), stands) and (verdict.status == 0).all()
    check_verify({name: None if value is None else value[::150] for name, value in case.items()}, **more)


@pytest.mark.parametrize(
    ("vocab_size", "num_drafts", "filters"),
    [
        (2_500, 1, {}),
        (17_500, 17, {}),  # of so many rows few blocks are put together at once
        (2_500, 1, dict(top_k=700)),
        (17_500, 1, dict(top_k=700)),
    ],
    ids=str,
)
def test_the_entropy_of_several_blocks(vocab_size: int, num_drafts: int, filters: dict[str, float]) -> None:
    """The limit that it sets, 1% below and above p(x)."""
    filters = filters | dict(temperature=0.8)
    logits = torch.randn(1, num_drafts + 1, vocab_size, generator=generator(44))
    logits[0, 0, -1] = 6.0  # the largest is in the last block
    tokens = torch.full((1, num_drafts), -1)
    tokens[0, 0] = logits[0, 0].argsort(descending=True)[100]
    p = law(logits[0, 0].double(), filters)
    limit = p[tokens[0, 0]] * torch.exp(-torch.xlogy(p, p).sum())
    case = random_rows(1, generator(45)) | rows(filters, 1, torch.float32)
    case |= dict(target_logits=logits, draft_tokens=tokens)
    for factor in (0.99, 1.01):
        more = dict(method="typical", typical_epsilon=1.0, typical_delta=limit.item() * factor)
        assert check_verify(case, **more).num_accepted.item() == (factor < 1)


@pytest.mark.parametrize("num_drafts", [1, 32])
def test_blocks_masked_with_the_lowest_number(num_drafts: int) -> None:
    """finfo.min, by which models mask, in whole blocks, before and behind what is likely. What they add to the entropy is 0 times their
    distance, NaN where that is not finite: times a block's mass, or divided by a low temperature."""
    logits = torch.full((3, num_drafts + 1, 17_500), torch.finfo(torch.float32).min)
    logits[0, :, :10] = logits[1:, :, -10:] = torch.linspace(0, 2, 10)
    tokens = torch.tensor([[9], [17_499], [17_499]]).expand(3, num_drafts)
    case = random_rows(3, generator(43)) | dict(temperature=torch.tensor([1.0, 1.0, 0.5]))
    verdict = check_verify(case | dict(target_logits=logits, draft_tokens=tokens), method="typical")
    assert (verdict.num_accepted == num_drafts).all()


def test_an_impossible_draft_at_a_limit_of_0() -> None:
    """p = 0 is not above it."""
    case = verify_case(generator(40), 2, 1, 40) | dict(temperature=None)
    case["draft_tokens"] = case["target_logits"][:, 0].argsort(dim=-1)[:, :1]
    case["target_logits"][:, 0].scatter_(1, case["draft_tokens"], -torch.inf)
    verdict = check_verify(case, method="typical", typical_epsilon=0.0)
    assert verdict.num_accepted.tolist() == [0, 0]
