"""Pictures of a run, with matplotlib, which is an extra: `pip install matplotlib`."""

import importlib.util
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.throughput.methods import OUR_PLAIN, Contest
from bench.throughput.records import PLOTS
from bench.throughput.summary import Summary, overall
from bench.throughput.table import cost_ratio
from bench.throughput.theory import expected_acceptance, fitted_acceptance
from engine.metrics import expected_speedup, expected_tokens

# Okabe and Ito's colours, which people with any colour vision can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F", "#000000")
COLOUR_MAPS = {"ours": "Blues", "transformers": "Oranges", "flashspec": "Greens", "economize": "Purples"}
MARKERS = "osD^vPX*<>"
PART_COLOURS = {"draft": "#E69F00", "verify": "#0072B2", "overhead": "#7F7F7F"}
STYLE: Any = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#DDDDDD",
    "axes.axisbelow": True, "figure.dpi": 130, "savefig.bbox": "tight", "legend.frameon": False, "axes.titlesize": 10,
    "text.parse_math": False,  # a category may have dollars
}  # fmt: skip
MISSING = "plots were left out: matplotlib cannot be imported (pip install matplotlib, then --report-only)"

Figures = dict[Contest, list[Summary]]


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw_all(summaries: Figures, relative_to: str, folder: Path) -> list[str]:
    """Write every picture for which there are figures, and remove others of before; returns their names. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn = []

    def draw(name: str, picture: Callable[..., Any], *arguments: Any) -> None:
        with plt.rc_context(STYLE):
            figure = picture(plt, *arguments)
            if figure is not None:
                figure.savefig(folder / name)
                plt.close(figure)
                drawn.append(name)

    for number, (contest, found) in enumerate(summaries.items(), 1):
        suffix = "" if len(summaries) == 1 else f"-{number}"
        draw(f"speedup{suffix}.png", speedup_by_category, contest, found, relative_to)
        draw(f"drafts{suffix}.png", against_k, contest, overall(found), relative_to)
        draw(f"rounds{suffix}.png", parts_of_rounds, contest, overall(found))
    draw("batches.png", batch_scaling, summaries)
    for path in folder.iterdir():
        if PLOTS.fullmatch(path.name) and path.name not in drawn:  # of a discarded run, or of fewer contests
            path.unlink()
    return drawn


def colours(plt: Any, methods: Sequence[str]) -> dict[str, Any]:
    """A colour for each library, a shade for each of its methods."""
    made = {}
    for library, name in COLOUR_MAPS.items():
        mine = [method for method in methods if method.split()[0] == library]
        for number, method in enumerate(mine):
            made[method] = plt.get_cmap(name)(0.85 - 0.5 * number / max(len(mine) - 1, 2))
    return made


def speedup_by_category(plt: Any, contest: Contest, found: Sequence[Summary], relative_to: str) -> Any:
    """Median ratio of each method in each category, with the worst and the best call."""
    shown = [s for s in found if s.ratios and s.method != relative_to]
    if not shown:
        return None
    shades = colours(plt, list(dict.fromkeys(summary.method for summary in shown)))
    # From above: a line for a category's name, then one for each of its methods.
    place, places, headings = 0.0, [], {}
    for summary in shown:
        if summary.category not in headings:
            headings[summary.category] = place + 0.2
            place += 1.2
        places.append(place)
        place += 1
    figure, axes = plt.subplots(figsize=(8.5, 0.9 + 0.19 * place), layout="constrained")
    medians = [statistics.median(summary.ratios) for summary in shown]
    axes.barh(places, medians, 0.86, color=[shades[summary.method] for summary in shown])
    worst, best = ([chosen(summary.ratios) for summary in shown] for chosen in (min, max))
    axes.hlines(places, worst, best, color="#333333", linewidth=0.9)
    edge = axes.get_yaxis_transform()  # x in widths of the axes
    for category, height in headings.items():
        axes.text(-0.01, height, category, transform=edge, ha="right", va="center", weight="bold", fontsize=9)
    for height, median in zip(places, medians, strict=True):
        axes.text(1.01, height, f"{median:.2f}x", transform=edge, va="center_baseline", fontsize=7.5)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(places, [summary.method for summary in shown], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(place - 0.3, -0.3)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(left=0)
    axes.set_xlabel(f'tokens/s relative to "{relative_to}"; bar and figure: median, line: worst to best')
    axes.set_title(contest.label, loc="left")
    return figure


def against_k(plt: Any, contest: Contest, found: Sequence[Summary], relative_to: str) -> Any:
    """Speedup, tokens per target call and acceptance of our drafters against K, with what theory expects."""
    families: dict[str, dict[int, Summary]] = {}
    chosen: dict[str, Summary] = {}  # with K = auto
    for summary in found:
        k, family = summary.num_draft_tokens, summary.method.replace(f" K={summary.num_draft_tokens}", "")
        if summary.method.startswith("ours ") and summary.calls:
            if k == "auto":
                chosen[family] = summary
            elif isinstance(k, int) and k > 0:
                families.setdefault(family, {})[k] = summary
    if not any(len(by_k) > 1 for by_k in families.values()):
        return None  # nothing to see that the table does not say
    plain = next((s for s in found if s.method == OUR_PLAIN and s.calls), None)
    height = 3.6 + 0.1 * max(len(families) - 6, 0)  # of which the legend takes a part
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, height), layout="constrained")
    for number, (family, by_k) in enumerate(families.items()):
        colour, ks = COLOURS[number % len(COLOURS)], sorted(by_k)
        line = {"color": colour, "marker": "o", "linewidth": 1.6}
        if all(by_k[k].ratios for k in ks):
            left.plot(ks, [statistics.median(by_k[k].ratios) for k in ks], **line)
        measured = {k: tokens for k in ks if (tokens := by_k[k].block_efficiency) is not None}
        middle.plot(list(measured), list(measured.values()), **line, label=family)
        rates = {k: rate for k in ks if (rate := by_k[k].acceptance) is not None}
        right.plot(list(rates), list(rates.values()), **line)
        if (auto := chosen.get(family)) is not None and auto.ratios:
            left.axhline(statistics.median(auto.ratios), color=colour, linestyle=":", linewidth=1.6)
            middle.axhline(auto.block_efficiency or 1, color=colour, linestyle=":", label=f"{family} K=auto")
        if measured:
            _theory(left, middle, right, colour, by_k, measured, plain, contest)
    left.axhline(1, color="black", linewidth=1)
    left.set_ylabel(f'speedup over "{relative_to}"' if len(relative_to) < 22 else "speedup")
    middle.set_ylabel("tokens per target call")
    right.set_ylabel("accepted / proposed")
    right.set_ylim(0, 1.02)
    ticks = sorted({k for by_k in families.values() for k in by_k})
    for axes in (left, middle, right):
        axes.set_xlabel("K, tokens drafted in a round")
        axes.set_xticks(ticks)
        axes.set_xlim(0, max(ticks) + 0.8)
    left.set_ylim(bottom=0)
    middle.set_ylim(bottom=0)
    left.set_title(contest.label, loc="left")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8.5)
    return figure


def _theory(
    left: Any, middle: Any, right: Any, colour: str, by_k: dict[int, Summary], measured: dict[int, float],
    plain: Summary | None, contest: Contest,
) -> None:  # fmt: skip
    """Dashed: equation 1 of Leviathan et al. at one acceptance for all K, and theorem 3.8 with the measured cost ratio."""
    acceptance = fitted_acceptance(measured)
    whole = list(range(1, max(measured) + 2))
    dashed = {"color": colour, "linestyle": "--", "linewidth": 1.1}
    middle.plot(
        whole,
        [expected_tokens(acceptance, k) for k in whole],
        **dashed,
        label=f"theory, acceptance {acceptance:.2f} (fitted)",
    )
    right.plot(whole, [expected_acceptance(acceptance, k) for k in whole], **dashed)
    if plain is None or contest.batch_size > 1:
        return
    costs = [c for s in by_k.values() if (c := cost_ratio(s, plain.parts_per_round())) is not None]
    if costs and plain.ratios:
        # Theory's speedup is over our own plain decoding; the axis is relative to another one.
        cost, scale = statistics.median(costs), statistics.median(plain.ratios)
        left.plot(whole, [scale * expected_speedup(acceptance, k, cost) for k in whole], **dashed)


def parts_of_rounds(plt: Any, contest: Contest, found: Sequence[Summary]) -> Any:
    """The time of a round, split into its parts: of each the mean of a call, and the median of the calls."""
    shown = [(summary, parts) for summary in found if (parts := summary.parts_per_round()) is not None]
    if not shown:
        return None
    figure, axes = plt.subplots(figsize=(8.5, 1.3 + 0.36 * len(shown)), layout="constrained")
    names = [summary.method for summary, _ in shown]
    left = [0.0] * len(shown)
    for part, colour in PART_COLOURS.items():
        widths = [1e3 * parts[part] for _, parts in shown]
        axes.barh(names, widths, 0.7, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, (total, (summary, _)) in enumerate(zip(left, shown, strict=True)):
        tokens = summary.block_efficiency
        text = f"{total:.1f} ms" + (f", {tokens:.2f} tokens" if tokens else "")
        axes.annotate(text, (total, place), xytext=(4, 0), textcoords="offset points", va="center_baseline", fontsize=8)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.3 * max(left))
    axes.set_xlabel("ms per round (prefill apart), and tokens per row that it gives")
    axes.set_title(contest.label, loc="left")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8.5)
    return figure


def batch_scaling(plt: Any, summaries: Figures) -> Any:
    """Tokens/s of all rows together against the batch size."""
    rates: dict[Contest, dict[str, dict[int, float]]] = {}  # setting (as a contest of batch 0), method, batch size
    for contest, found in summaries.items():
        methods = rates.setdefault(replace(contest, batch_size=0), {})
        for summary in overall(found):
            if summary.calls:
                methods.setdefault(summary.method, {})[contest.batch_size] = summary.tokens_per_second
    for setting, methods in rates.items():
        rates[setting] = {name: rate for name, rate in methods.items() if len(rate) > 1}
    rates = {setting: methods for setting, methods in rates.items() if methods}
    if not rates:
        return None
    names = list(dict.fromkeys(name for methods in rates.values() for name in methods))
    shades = colours(plt, names)
    figure, grid = plt.subplots(1, len(rates), figsize=(4.2 * len(rates) + 3, 4), squeeze=False, layout="constrained")
    for axes, (setting, methods) in zip(grid[0], rates.items(), strict=True):
        for name, rate in methods.items():
            marker = MARKERS[names.index(name) % len(MARKERS)]  # shades of one colour are not told apart by themselves
            axes.plot(list(rate), list(rate.values()), marker=marker, color=shades[name], label=name)
        sizes = sorted({size for rate in methods.values() for size in rate})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("batch size")
        axes.set_ylabel("tokens/s, all rows")
        batches = f"{setting.batches_per_call} batches a call, " if setting.batches_per_call > 1 else ""
        axes.set_title(f"{setting.dtype}, {batches}{setting.rule}")
    handles = {
        label: handle for axes in grid[0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(list(handles.values()), list(handles), loc="outside right upper", fontsize=8)
    return figure
