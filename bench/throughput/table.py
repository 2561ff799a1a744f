"""A run as Markdown."""

import statistics
from collections.abc import Sequence
from typing import Any

from bench.markdown import table
from bench.throughput.command_line import command
from bench.throughput.match import PLAINS
from bench.throughput.methods import OUR_PLAIN, Contest
from bench.throughput.summary import Summary, overall

HEADER = ["category", "method", "calls", "median", "mean", "worst", "median to our plain", "worst to our plain"]
HEADER += ["tokens/s", "after prefill", "prefill, ms"]
HEADER += ["acceptance", "tokens per target call", *(f"same text as {plain}" for plain in PLAINS), "largest gap"]
PARTS = ["method", "draft, ms", "verify, ms", "overhead, ms", "outside forwards", "draft token / plain step"]
PARTS += ["acceptance by position"]
NOTES = """\
*median*, *mean*, *worst*: tokens/s of a call divided by those of "{relative_to}" for the same prompts, in the same run, method
after method on each prompt; *to our plain*: divided by those of "ours plain" instead. *tokens/s*: all tokens divided by all
seconds, reading the prompts included; *after prefill* without it (and without the tokens that reading the prompt gives: ours
gives none, others one or more). Tokens are counted as ids, the end of sequence included. *prefill*: median. *acceptance*:
accepted / proposed draft tokens. *same text*: token ids; texts are compared where they are meant to be the same: greedy, and
sampled with the rule `coupled`, then with our plain decoding by that rule. *largest gap*, of greedy texts: how much likelier the
target holds one of the two tokens at which texts part, in nats, from one plain call over what they have in common. In bfloat16,
logits between 16 and 32 lie 0.125 apart: a gap of that size is rounding."""
SYNTHETIC_NOTE = """\
**"not a real drafter"**: it knows plain's text and corrupts it, each token with a given probability. Its rows say what the
engine costs at a given acceptance, and nothing of what a drafter reaches."""
EXACT_NOTE = """\
It needs a text that it can be right about: all of ours is `exact` in this run. Plain decoding's calls have the shape of those
that verify, which costs it time on a CPU, and the verified text is plain's bit for bit."""
NOT_EXACT_NOTE = """\
**This run was not `exact`**: where rounding parts the verified text from plain's, the drafter is wrong from there on, and the
acceptance falls below what was asked for."""
PARTS_NOTE = """\
Times of a round of the whole batch, mean of a call and median of the calls. *overhead*: all that is neither prefill, nor
drafting, nor the target's call with its verification. *outside forwards*: the share of all three that is not spent in forward
passes, the target's and those of a draft model or a head. So masks, the verification, the cache's and the drafter's books and
all that a lookup does count, beside the overhead; "-": not measured, as on a GPU and in runs before there was this figure.
*draft token / plain step*: seconds to draft a token, by the tokens that were drafted (a drafter that is not sure drafts fewer than
K), divided by those of a round of plain decoding: the cost ratio c of Leviathan et al. \
*acceptance by position*: of the rounds that
proposed an i-th token, the share that took it, whether or not those before it stood (`bench.acceptance` has the share where they
did)."""

PLOTS_NOTE = """\
Dashed in the plots against K: the tokens per target call that equation 1 of Leviathan et al. (arXiv 2211.17192) expects of
drafts that stand with one probability, fitted to all K; and with it the acceptance, and by theorem 3.8, with the measured cost
ratio, the speedup. It takes every round to propose K tokens, which n-gram drafters do not, nor heads that stop where they are not
sure; and a target call to cost the same for one token and for K+1."""


def markdown(
    run: dict[str, Any], out: str, summaries: dict[Contest, list[Summary]], plots: Sequence[str], notes: Sequence[str]
) -> str:
    """The whole report; `out` names the folder that it is for."""
    options = run["options"]
    lines = ["# Throughput", "", "```", command(options, out), "```", ""]
    if not run["complete"]:
        lines += ["**This run is not complete: what follows is what it measured so far.**", ""]
    for about in (options, run["environment"]):
        lines += [
            f"{name.replace('_', ' ')}: {_plain(value)}  "
            for name, value in about.items()
            if value not in (None, [], {})
        ]
    for contest, found in summaries.items():
        lines += ["", f"## {contest.label}", "", *table(HEADER, [cells(summary) for summary in found])]
        if parts := part_rows(overall(found)):
            lines += ["", *table(PARTS, parts)]
        if any(summary.synthetic for summary in found):
            lines += ["", SYNTHETIC_NOTE, EXACT_NOTE if options["exact"] else NOT_EXACT_NOTE]
    lines += ["", "## How to read this", "", NOTES.format(relative_to=options["relative_to"]), "", PARTS_NOTE]
    for title, entries in (("Left out", left_out(run)), ("Notes", notes)):
        if entries:
            lines += ["", f"## {title}", "", *(f"- {entry}" for entry in entries)]
    if plots:
        lines += ["", "## Plots", ""]
        lines += [PLOTS_NOTE, ""] if any(name.startswith("drafts") for name in plots) else []
        lines += [f"![{name}]({name})" for name in plots]
    return "\n".join([*lines, ""])


def left_out(run: dict[str, Any]) -> list[str]:
    """For each reason, the methods that took no part; and where, if they were not the same ones each time."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for entry in run["skipped"]:
        reasons.setdefault(entry["reason"], {}).setdefault(entry["contest"], []).append(entry["method"])
    lines = []
    for reason, by_contest in reasons.items():
        alike = {tuple(methods) for methods in by_contest.values()}
        if len(alike) == 1:
            lines.append(f"{', '.join(alike.pop())}: {reason}")
        else:
            lines += [f"{', '.join(methods)} ({contest}): {reason}" for contest, methods in by_contest.items()]
    return lines


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items() if item is not None)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def cells(summary: Summary) -> list[str]:
    """A summary as a row under HEADER."""
    if not summary.calls:
        return [summary.category, summary.method, f"{summary.errors} failed", *[""] * (len(HEADER) - 3)]
    ratios: Sequence[float] = summary.ratios
    shown = (
        [f"{ratio:.2f}x" for ratio in (statistics.median(ratios), statistics.mean(ratios), min(ratios))]
        if ratios
        else [""] * 3
    )
    calls = str(len(summary.calls)) + (f" ({summary.errors} failed)" if summary.errors else "")
    return [
        summary.category,
        summary.method,
        calls,
        *shown,
        *_to_plain(summary),
        f"{summary.tokens_per_second:.1f}",
        _shown(summary.decode_tokens_per_second, ".1f"),
        _shown(summary.prefill_seconds, ".0f", 1e3),
        _shown(summary.acceptance, ".0%"),
        _shown(summary.block_efficiency, ".2f"),
        *(_same(summary, plain) for plain in PLAINS),
        _largest_gap(summary),
    ]


def _to_plain(summary: Summary) -> list[str]:
    ratios = summary.ratios_to_plain
    return [f"{ratio:.2f}x" for ratio in (statistics.median(ratios), min(ratios))] if ratios else [""] * 2


def _shown(value: float | None, form: str, scale: float = 1.0) -> str:
    return "" if value is None else format(value * scale, form)


def _same(summary: Summary, plain: str) -> str:
    compared = summary.compared_with(plain)
    return f"{sum(difference is None for difference in compared)} of {len(compared)}" if compared else ""


def _largest_gap(summary: Summary) -> str:
    if any(row["contest"]["temperature"] for row in summary.rows):
        return ""  # there noise decides as well: tokens whose logits are far apart can be nearly equal
    differences = [d for plain in PLAINS for d in summary.compared_with(plain) if d is not None]
    gaps = [abs(d["log_prob_gap"]) for d in differences if d["log_prob_gap"] is not None]
    return f"{max(gaps):.2g}" if gaps else ""


def part_rows(summaries: Sequence[Summary]) -> list[list[str]]:
    """Rows under PARTS, of the methods that tell."""
    rows = []
    plain = next((s.parts_per_round() for s in summaries if s.method == OUR_PLAIN), None)
    for summary in summaries:
        parts = summary.parts_per_round()
        if parts is None:
            continue
        cost = cost_ratio(summary, plain)
        by_position = " ".join(f"{rate:.2f}" for rate in summary.acceptance_per_position)
        times = [f"{1e3 * parts[name]:.2f}" for name in ("draft", "verify", "overhead")]
        outside = "-" if summary.outside_forwards is None else f"{summary.outside_forwards:.1%}"
        rows.append([summary.method, *times, outside, "" if cost is None else f"{cost:.3f}", by_position])
    return rows


def cost_ratio(summary: Summary, plain: dict[str, float] | None) -> float | None:
    """Seconds to draft a token divided by those of a round of plain decoding; None where K is chosen by the engine."""
    parts, drafted, rounds = summary.parts_per_round(), summary.total("draft_tokens"), summary.total("rounds")
    if parts is None or plain is None or not isinstance(summary.num_draft_tokens, int) or not drafted or not rounds:
        return None
    return parts["draft"] / (drafted / rounds) / sum(plain.values())
