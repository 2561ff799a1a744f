"""From the start of a process to the first token of an answer: ours, and transformers' own classes.

    python -m bench.first_token --out first_token.json

Every run is a fresh process, and the contenders take turns. One run of each goes before and is not counted: after it the
checkpoint lies in the page cache, and bytecode on the disk. Of a GGUF file ours keeps a converted copy, while transformers
de-quantises the file at every load; so that this is not what is compared, transformers is held against ours from a plain folder
of safetensors (the copy that ours keeps), and its load of the GGUF file has a row of its own.
"""

# The processes that are measured import this file too, so that nothing slow may stand here.
import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "The sky is blue because"
GOAL = 1.3  # times transformers', at most
OURS, OURS_PLAIN, THEIRS, THEIRS_GGUF = "ours", "ours, no drafter", "transformers", "transformers, GGUF file"
PARTS = ("start", "import", "load", "first token")  # start: of Python itself
LIMIT = 600  # seconds for a run

Spec = dict[str, Any]  # what a fresh process is told: "library", "target", "dtype", and "drafter" or "gguf_file"


def contenders(target: str | None, drafter: str | None) -> dict[str, Spec]:
    """Who is measured, by name.

    Args:
        target: hub id, folder or GGUF file; None: the command line's own.
        drafter: None: the command line's own for this target.
    """
    from engine.default_model import find_model, usual_drafter
    from engine.hub import split_revision

    drafter = drafter or usual_drafter(target)
    target = target or find_model()
    path = Path(target).expanduser()
    is_gguf = path.is_file()
    target = str(path.resolve()) if path.exists() else target
    dtype = "bfloat16" if is_gguf else "auto"
    plain: Spec = dict(target=target, dtype=dtype)
    found = {
        OURS: plain | dict(library="ours", drafter=drafter),
        OURS_PLAIN: plain | dict(library="ours", drafter=None),
    }
    if is_gguf:
        import torch

        from engine.gguf import converted

        found[THEIRS] = dict(library="transformers", target=str(converted(path, torch.bfloat16, "target")), dtype=dtype)
        gguf = dict(target=str(path.resolve().parent), gguf_file=path.name)
        found[THEIRS_GGUF] = plain | dict(library="transformers") | gguf
    else:
        source, revision = split_revision(target)
        at = {} if revision is None else dict(revision=revision)
        found[THEIRS] = plain | dict(library="transformers", target=source) | at
    return found


def ours(spec: Spec) -> Iterator[list[int] | None]:
    """Stops after each part; the last one gives the new tokens."""
    import engine

    load, params = engine.load, engine.SamplingParams(max_new_tokens=1)  # names are imported when they are first used
    yield None
    # As the command line does it.
    llm = load(spec["target"], drafter=spec["drafter"], num_draft_tokens="auto", dtype=spec["dtype"])
    yield None
    yield llm.generate(PROMPT, params).token_ids


def theirs(spec: Spec) -> Iterator[list[int] | None]:
    """Likewise, as its documentation does it."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    yield None
    more: dict[str, Any] = {name: spec[name] for name in ("gguf_file", "revision") if name in spec}
    tokenizer = AutoTokenizer.from_pretrained(spec["target"], **more)
    # Newer releases keep the blocks packed unless told otherwise.
    if "gguf_file" in more and hasattr(transformers, "GgufConfig"):
        more["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(spec["target"], dtype=spec["dtype"], **more)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    yield None
    inputs = tokenizer(PROMPT, return_tensors="pt").to(model.device)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=1)
    yield output[0, inputs["input_ids"].shape[1] :].tolist()


def fresh_process() -> None:
    """What the processes that are measured run: prints the seconds of each part, and the tokens."""
    marks, tokens = [time.time()], None
    spec = json.loads(sys.argv[1])
    try:
        for result in (ours if spec["library"] == "ours" else theirs)(spec):
            marks.append(time.time())
            tokens = result
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")  # the last line that it says
    print(json.dumps({"marks": marks, "cpu": time.process_time(), "tokens": tokens}))


def measure(spec: Spec) -> dict[str, Any]:
    """One run: seconds in all, of each part, and of processor time, and the tokens.

    Raises:
        RuntimeError: if the process fails, with what it said last, or takes longer than LIMIT.
    """
    # In the user's folder, as a drafter's name may have relative paths, but with none of its modules.
    call = "from bench.first_token import fresh_process; fresh_process()"
    command = [sys.executable, "-P", "-c", call, json.dumps(spec)]
    folders = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    began = time.time()  # a clock that all processes share
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{spec} took more than {LIMIT} s") from error
    if done.returncode:
        raise RuntimeError(f"{spec} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    said = json.loads(done.stdout.splitlines()[-1])
    marks = [began, *said["marks"]]
    parts = dict(zip(PARTS, (after - before for before, after in pairwise(marks)), strict=True))
    return {"seconds": marks[-1] - began, **parts, "cpu": said["cpu"], "tokens": said["tokens"]}


def run(specs: dict[str, Spec], runs: int) -> dict[str, list[dict[str, Any]]]:
    """The runs of each contender, in turns; who goes first changes from one turn to the next.

    Raises:
        ValueError: if contenders differ in the first token.
    """
    began = time.time()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in specs}
    names, expected = list(specs), None
    for turn in range(runs + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            one = measure(specs[name])
            counted = f"run {turn} of {runs}" if turn else "not counted"
            parts = ", ".join(f"{part} {one[part]:.2f}" for part in PARTS)
            print(f"[{time.time() - began:5.0f} s] {name}, {counted}: {one['seconds']:.2f} s ({parts})", flush=True)
            expected = expected or one["tokens"]
            if one["tokens"] != expected:
                raise ValueError(f"{name} begins with {one['tokens']}, but {names[0]} with {expected}")
            if turn:
                found[name].append(one)
    return found


def summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians in seconds, and ratios of medians to transformers'."""
    medians = {
        name: {part: statistics.median(one[part] for one in runs) for part in ("seconds", *PARTS, "cpu")}
        for name, runs in found.items()
    }
    ratios = {
        f"{own} / {other}": medians[own]["seconds"] / medians[other]["seconds"]
        for other in (THEIRS, THEIRS_GGUF)
        for own in (OURS, OURS_PLAIN)
        if other in medians
    }
    headline = ratios[f"{OURS} / {THEIRS}"]
    return {"ratio": headline, "goal": f"<= {GOAL}", "met": headline <= GOAL, "ratios": ratios, "medians": medians}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.first_token", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", "-t", metavar="MODEL", help="hub id, folder or GGUF file (SmolLM2-135M-Instruct)")
    parser.add_argument("--drafter", "-d", metavar="DRAFTER", help="default: the command line's for this target")
    parser.add_argument("--runs", type=int, default=5, help="of each contender (default: 5)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON with all runs, versions and the machine")
    options = parser.parse_args(arguments)
    if options.runs < 1:
        parser.error(f"--runs must be >= 1, got {options.runs}")

    import torch

    from bench.out_file import check_out, write_whole
    from bench.report import environment
    from bench.throughput.options import by_name

    about = environment("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if options.out is not None:
            check_out(options.out)
        specs = contenders(options.target, options.drafter)
        found = run(specs, options.runs)
    except (ValueError, OSError, RuntimeError) as error:
        parser.error(" ".join(str(error).split()))
    result = summary(found)
    for name, medians in result["medians"].items():
        print(f"{name}: " + ", ".join(f"{part} {value:.2f}" for part, value in medians.items()))
    for name, ratio in result["ratios"].items():
        print(f"{name}: {ratio:.2f}x")
    print(f"goal {result['goal']}x: {'met' if result['met'] else 'not met'}")
    if options.out is not None:
        # Files by their names: where they lie is this machine's affair.
        told = {
            name: spec | {role: by_name(spec[role]) for role in ("target", "drafter") if spec.get(role)}
            for name, spec in specs.items()
        }
        text = {"prompt": PROMPT, "environment": about, "contenders": told, **result, "runs": found}
        write_whole(options.out, json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
