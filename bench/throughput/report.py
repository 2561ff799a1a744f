"""From a run's records to `table.md` and plots."""

from pathlib import Path

from bench.markdown import table
from bench.out_file import write_whole
from bench.throughput import plots
from bench.throughput.methods import Contest
from bench.throughput.records import TABLE, read_records, read_run
from bench.throughput.summary import overall, summarize
from bench.throughput.table import HEADER, cells, left_out, markdown


def write_report(folder: Path) -> str:
    """Write table and plots; returns the figures over all categories, to be shown.

    Raises:
        ValueError: if the folder holds no run, or a damaged one.
    """
    run, records = read_run(folder), read_records(folder)
    if isinstance(run["finished"], dict):  # a list in runs of earlier versions
        # Under two labels if a dtype was named and also what "auto" came to.
        counts = {Contest(**kept["contest"]): kept["records"] for kept in run["finished"].values()}
        run["complete"] &= len(records) == sum(counts.values())  # unless some are lost
    relative_to = run["options"]["relative_to"]
    summaries = summarize(records, relative_to)
    drawn: list[str] = []
    notes = []
    if not any(summary.ratios for found in summaries.values() for summary in found):
        notes.append(f'no ratios: "{relative_to}" has no calls')
    if plots.available():
        drawn = plots.draw_all(summaries, relative_to, folder)
    else:
        notes.append(plots.MISSING)
    write_whole(folder / TABLE, markdown(run, folder.name, summaries, drawn, notes))
    lines = []
    for contest, found in summaries.items():
        lines += ["", contest.label, "", *table(HEADER[1:], [cells(summary)[1:] for summary in overall(found)])]
    skipped = [f"left out: {line}" for line in left_out(run)]
    state = [] if run["complete"] else ["This run is not complete."]
    written = ", ".join([TABLE, *drawn])
    return "\n".join([*lines, "", *skipped, *notes, *state, f"{folder}: {len(records)} records, {written}"])
