"""Who meets whom: the contests of a run and the methods in each."""

import itertools
from collections.abc import Iterator

from bench.throughput.methods import Contest, Method
from bench.throughput.options import DEFAULT_K, Options, draws, is_draft_model
from bench.throughput.other_engines import Economize, FlashSpec
from bench.throughput.ours import Ours
from bench.throughput.transformers_methods import Transformers, TransformersAssisted


def contests(options: Options, dtype: str) -> list[Contest]:
    """All combinations of batch size, temperature and length in one dtype."""
    return [
        Contest(dtype, batch, temperature, length, options.batches_per_call, options.top_p)
        for temperature, length, batch in itertools.product(
            options.temperatures, options.max_new_tokens, options.batch_sizes
        )
    ]


def methods(options: Options, contest: Contest) -> list[Method]:
    """Ours first, plain before all others."""
    found = [*_ours(options, contest), *_baselines(options)]
    names = [method.name for method in found]
    if options.relative_to not in names:
        raise ValueError(f"relative_to must be one of the methods ({', '.join(names)}), got {options.relative_to!r}")
    return found


def _ours(options: Options, contest: Contest) -> Iterator[Method]:
    common = dict(
        exact=options.exact,
        load_options=options.load_options,
        max_length=options.max_prompt_tokens + contest.max_new_tokens,
        seed=options.seed,
    )
    yield Ours(None, **common)  # type: ignore[arg-type]
    if contest.temperature and "coupled" in options.verification:
        yield Ours(None, verification="coupled", **common)  # type: ignore[arg-type]
    # At temperature 0 every rule is greedy: one of them is enough.
    rules = options.verification if contest.temperature else ("rejection",)
    for drafter in options.drafters:
        ways = _ways_to_draft(options, contest, drafter)
        for rule, way, k in itertools.product(rules, ways, options.num_draft_tokens):
            yield Ours(drafter, k, rule, way, **common)  # type: ignore[arg-type]


def _ways_to_draft(options: Options, contest: Contest, drafter: str) -> list[str]:
    """ "own" is greedy for a greedy target, and sampled for a sampling one; a drafter that knows no other way has its own."""
    other = "greedy" if contest.temperature else "sampled"
    knows_it = draws(drafter) if contest.temperature else is_draft_model(drafter)
    return list(dict.fromkeys(way if way == other and knows_it else "own" for way in options.drafts))


def _baselines(options: Options) -> Iterator[Method]:
    wanted = options.baselines
    widths = [k for k in options.num_draft_tokens if isinstance(k, int) and k > 0]
    if not widths and "auto" in options.num_draft_tokens:
        widths = [DEFAULT_K]
    for name, method in (
        ("plain", Transformers()),
        ("compiled", Transformers(compiled=True)),
        ("no-cache", Transformers(use_cache=False)),
    ):
        if name in wanted:
            yield method
    models = options.draft_models
    if "lookup" in wanted:
        yield from (TransformersAssisted(k) for k in widths)
    if "assistant" in wanted:
        yield from (TransformersAssisted(k, model) for model in models for k in widths)
    if "flashspec" in wanted:
        yield from (FlashSpec(k, model) for model in (None, *models) for k in widths)
        yield from (FlashSpec(None, model) for model in models)
    if "economize" in wanted:
        yield from (Economize(k, model) for model in (None, *models) for k in widths)
