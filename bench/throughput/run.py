"""A run: all contests of all dtypes, one after another."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench import timing
from bench.figures import tidy
from bench.report import code_digest, digest, environment
from bench.throughput import plan
from bench.throughput.match import Match, say, skip
from bench.throughput.options import Options
from bench.throughput.prompts import Prompt, groups, read_prompts, room_for_prompts
from bench.throughput.records import Records, no_other_run
from bench.throughput.shared_models import load_models
from engine.checkpoints import check_checkpoint
from engine.default_model import find_model

CODE = ("engine", "kernels", "bench/throughput")
PACKAGES = ("torch", "triton", "numba", "transformers", "flashspec", "economize")  # that records depend on


def describe(options: Options, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """All that a record depends on."""
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    found = environment(usual if options.device == "auto" else options.device)
    found["versions"] = {name: found["versions"].get(name) for name in ("python", "cuda", "hip", *PACKAGES)}
    for package in PACKAGES:
        try:
            found["versions"][package] = version(package)
        except PackageNotFoundError:
            found["versions"][package] = None
    found["code"] = code_digest(*CODE)
    texts = digest(*(json.dumps(asdict(prompt)) for prompt in prompts))
    sources = {"target": [options.target]}
    for name in options.draft_checkpoints:  # in different folders two may have the same name
        sources.setdefault(f"drafter {Path(name).name}", []).append(name)
    there = {
        role: [name for name in names if name and Path(name).expanduser().exists()] for role, names in sources.items()
    }
    models = {role: " ".join(map(_files, names)) for role, names in there.items() if names}
    chosen = options.as_dict()
    chosen["target"] = chosen["target"] or Path(find_model()).name
    about = {"options": chosen, "prompts": f"{len(prompts)} prompts, {texts}", "environment": found}
    return about | {"models": models}


def _files(model: str) -> str:
    """The state of a checkpoint on disk, without reading its gigabytes."""
    path = Path(model).expanduser()
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    stats = [(file.relative_to(path), file.stat()) for file in files if file.is_file()]
    return digest(*(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats))


def run(options: Options, restart: bool = False) -> Records:
    """Measure all that is not measured yet.

    Raises:
        ValueError: for options that do not fit the prompts, the models or the run in the folder, or if another run works there.
    """
    prompts = options.select(read_prompts(options.prompts))
    for contest in plan.contests(options, ""):
        plan.methods(options, contest)  # so that a name that is wrong in one of them is told before anything is done
    check_checkpoint(options.target or find_model(), "target")  # before a run that is there is discarded
    for model in options.shared_models:
        check_checkpoint(model, "drafter")
    timing.use_all_cores()
    with no_other_run(options.out):
        records = Records(options.out, describe(options, prompts), restart)
        _measure(options, records, prompts)
    return records


def _measure(options: Options, records: Records, prompts: Sequence[Prompt]) -> None:
    if records.run["complete"]:
        say(f"{options.out} holds this run, complete: nothing is measured again")
        return
    planned = plan.contests(options, "")
    units = sum(len(groups(prompts, contest.prompts_per_call)) for contest in planned) * options.repeats
    with tqdm(total=units * len(options.dtypes), unit="call", dynamic_ncols=True, smoothing=0) as bar:
        for dtype in options.dtypes:
            models = None
            for contest in plan.contests(options, dtype):
                if contest.label in records.run["finished"]:
                    skip(bar, len(groups(prompts, contest.prompts_per_call)) * options.repeats)
                    continue
                if models is None:
                    models = load_models(options, dtype)
                    for length in options.max_new_tokens:
                        # One too many is told before all others are measured.
                        room_for_prompts(models.context_length, length)
                known = replace(contest, dtype=models.dtype)
                Match(options, records, models, known, prompts).play(bar)
                records.finish(contest.label, asdict(known))
            del models
            tidy()
    records.save_run(complete=True)
