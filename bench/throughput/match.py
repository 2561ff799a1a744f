"""One contest, prompt by prompt: each group of prompts goes through all methods in turn, and then to the next."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from bench.figures import tidy
from bench.throughput import plan
from bench.throughput.methods import OUR_PLAIN, Call, Contest, Method, synchronize
from bench.throughput.options import Options
from bench.throughput.ours import Ours
from bench.throughput.prompts import Group, Prompt, cut, groups, render, room_for_prompts
from bench.throughput.records import Records, unit_of
from bench.throughput.shared_models import SharedModels
from engine.text_difference import Comparer

PLAINS = (
    OUR_PLAIN,
    "transformers plain",
)  # what texts are compared with; for `coupled`, our plain decoding by that rule
WARMUP_TOKENS = 16


def say(text: str) -> None:
    """A line on stderr, above the progress bar."""
    tqdm.write(text, file=sys.stderr)


def skip(bar: Any, units: int) -> None:
    """Count units that were measured before: no work, so they say nothing of the time left."""
    bar.n, bar.initial, bar.last_print_n = bar.n + units, bar.initial + units, bar.last_print_n + units


class Match:
    """One contest, prompt by prompt."""

    def __init__(
        self, options: Options, records: Records, models: SharedModels, contest: Contest, prompts: Sequence[Prompt]
    ) -> None:
        self.options, self.records, self.models, self.contest = options, records, models, contest
        self.groups = groups(prompts, contest.prompts_per_call)
        self.prompt_limit = min(
            options.max_prompt_tokens, room_for_prompts(models.context_length, contest.max_new_tokens)
        )
        self.comparer = Comparer(models.target)

    def play(self, bar: Any) -> None:
        """Run every unit that has no records yet."""
        bar.set_description(self.contest.label)
        methods = self._ready()
        try:
            for repeat in range(self.options.repeats):
                for method in methods:
                    method.forget()
                for number, group in enumerate(self.groups, repeat * len(self.groups)):
                    unit = self._unit(group, repeat)
                    if self.records.has(unit, [method.name for method in methods], len(group.prompts)):
                        self._recall(methods, group, unit)
                        skip(bar, 1)
                        continue
                    self.records.drop(unit)
                    self.records.add(self._measure(methods, group, unit, number))
                    bar.update()
        finally:
            for method in methods:
                method.close()
            tidy()

    def _unit(self, group: Group, repeat: int) -> dict[str, Any]:
        lines = "-".join(str(prompt.index + 1) for prompt in group.prompts)
        return {"contest": asdict(self.contest), "group": lines, "turn": group.turn, "repeat": repeat}

    def _ready(self) -> list[Method]:
        """The methods that can take part, warm: all are loaded before the first is warmed up, as what others load may have
        torch.compile compile again.

        Raises:
            ValueError: if our plain decoding refuses an option, or no method can take part.
        """
        left_out: dict[str, list[str]] = {}

        def works(method: Method, step: Callable[[], str | None]) -> bool:
            """Whether a step towards taking part succeeds, and gives no reason against it."""
            try:
                reason = step()
            except Exception as error:  # a contender that fails is a result too
                method.close()
                if method.name == OUR_PLAIN and isinstance(error, ValueError):
                    raise  # of ours, which refuses an option
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            if reason is not None and self.records.skip(self.contest.label, method.name, reason):
                left_out.setdefault(reason, []).append(method.name)
            return reason is None

        loaded = [m for m in plan.methods(self.options, self.contest) if works(m, partial(self._load, m))]
        longest = max((g for g in self.groups if g.turn == 0), key=lambda g: max(map(len, self._prompts(g, 0))))
        given = self._prompts(longest, 0), self._seeds(longest, 0)
        plain_texts: dict[str, list[list[int]]] = {}
        ready = [m for m in loaded if works(m, partial(self._warm_up, m, *given, plain_texts))]
        for reason, names in left_out.items():
            say(f"left out: {', '.join(names)}: {reason}")
        if not ready:
            raise ValueError(f"no method could run ({self.contest.label}); the reasons are above")
        self.records.take_part(self.contest.label, [method.name for method in ready])
        return ready

    def _load(self, method: Method) -> str | None:
        """Load what a method needs, unless there is a reason not to, which is returned."""
        reason = method.unavailable(self.contest, self.models.device.type)
        if reason is None:
            method.prepare(self.models, self.contest)
        return reason

    def _warm_up(
        self, method: Method, prompts: list[list[int]], seeds: list[int], plain_texts: dict[str, list[list[int]]]
    ) -> None:
        """Continue these prompts once, or do all that has to be done once. Each leaves its texts, plain decoding's first."""
        if isinstance(method, Ours):
            method.plain_texts = plain_texts.get(method.plain, [])
        if method.full_warmup:
            for texts in self._calls_of_all_shapes(prompts):
                method.generate(texts, [self.options.seed] * len(texts), self.contest.max_new_tokens)
            return
        call = method.generate(prompts, seeds, min(WARMUP_TOKENS, self.contest.max_new_tokens))
        plain_texts[method.name] = [row.token_ids for row in call.rows]

    def _calls_of_all_shapes(self, prompts: list[list[int]]) -> list[list[list[int]]]:
        """The longest first turns in calls of all sizes, as the last one may have fewer rows. Of later turns nobody knows yet how
        long they are: where there are some, the prompts are filled up to the most tokens that one may have.
        """
        limit = self.prompt_limit if any(group.turn for group in self.groups) else 0
        filled = [(ids * -(-limit // max(len(ids), 1)))[:limit] if len(ids) < limit else ids for ids in prompts]
        sizes = sorted({len(group.prompts) for group in self.groups}, reverse=True)
        return [[filled[i % len(filled)] for i in range(size)] for size in sizes]

    def _prompts(self, group: Group, repeat: int) -> list[list[int]]:
        """Token ids; earlier turns are answered by our own plain decoding, so that all methods get the same prompts."""
        made = []
        for prompt in group.prompts:
            answers = [self._answer(prompt, turn, repeat) for turn in range(group.turn)]
            ids = render(self.models.tokenizer, prompt.turns[: group.turn + 1], answers, self.options.template)
            made.append(cut(ids, self.prompt_limit))
        return made

    def _answer(self, prompt: Prompt, turn: int, repeat: int) -> str:
        for record in self.records.records:
            if (record["method"], record["line"], record["turn"], record["repeat"]) == (
                OUR_PLAIN, prompt.index + 1, turn, repeat,
            ) and record["contest"] == asdict(self.contest):  # fmt: skip
                return record.get("text") or ""  # a call that failed has none
        return ""

    def _seeds(self, group: Group, repeat: int) -> list[int]:
        return [self.options.seed + 1000 * prompt.index + 100 * group.turn + repeat for prompt in group.prompts]

    def _recall(self, methods: Sequence[Method], group: Group, unit: dict[str, Any]) -> None:
        """What was measured before an interruption, for methods that learn from their answers."""
        prompts, seeds = self._prompts(group, unit["repeat"]), self._seeds(group, unit["repeat"])
        known = [record for record in self.records.records if unit_of(record) == unit]
        for method in methods:
            texts = {r["line"]: r.get("token_ids", []) for r in known if r["method"] == method.name}
            method.recall(prompts, seeds, [texts[prompt.index + 1] for prompt in group.prompts])

    def _measure(
        self, methods: Sequence[Method], group: Group, unit: dict[str, Any], number: int
    ) -> list[dict[str, Any]]:
        """All methods on one group. Who goes first changes; synthetic drafters come last, they need plain's text."""
        prompts, seeds = self._prompts(group, unit["repeat"]), self._seeds(group, unit["repeat"])
        first = number % len(methods)
        order = sorted([*methods[first:], *methods[:first]], key=lambda method: method.synthetic)
        calls: dict[str, Call | None] = {}
        seconds: dict[str, float] = {}
        errors: dict[str, str] = {}
        for method in order:
            if isinstance(method, Ours) and method.synthetic:
                plain = calls.get(method.plain)
                method.plain_texts = [row.token_ids for row in plain.rows] if plain else [[] for _ in prompts]
            try:
                calls[method.name], seconds[method.name] = timed(
                    partial(method.generate, prompts, seeds, self.contest.max_new_tokens), self.models.device
                )
            except Exception as error:
                calls[method.name] = None
                errors[method.name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                say(f"{method.name} failed: {errors[method.name]}")
        made = []
        for method in methods:
            for place, prompt in enumerate(group.prompts):
                about = {
                    **unit, "method": method.name, "drafter": method.drafter, "num_draft_tokens": method.num_draft_tokens,
                    "synthetic": method.synthetic, "line": prompt.index + 1, "question_id": prompt.question_id,
                    "category": prompt.category, "group_category": group.category, "prompt_tokens": len(prompts[place]),
                    "error": errors.get(method.name),
                }  # fmt: skip
                call = calls[method.name]
                if call is not None:
                    about |= self._figures(call, place, seconds[method.name])
                    about["differences"] = self._differences(method, call.rows[place].token_ids, place, prompts, calls)
                made.append(about)
        return made

    def _figures(self, call: Call, place: int, seconds: float) -> dict[str, Any]:
        row = call.rows[place]
        known = [call.prefill_seconds, call.draft_seconds, call.verify_seconds]
        overhead = None if None in known else seconds - sum(known)  # type: ignore[arg-type]
        return {
            "new_tokens": len(row.token_ids), "call_tokens": sum(len(r.token_ids) for r in call.rows),
            "seconds": seconds, "prefill_seconds": call.prefill_seconds, "prefill_tokens": call.prefill_tokens,
            "draft_seconds": call.draft_seconds, "verify_seconds": call.verify_seconds, "overhead_seconds": overhead,
            "forward_seconds": call.forward_seconds,
            "rounds": row.rounds, "draft_tokens": row.draft_tokens, "accepted_tokens": row.accepted_tokens,
            "acceptance_per_position": row.acceptance_per_position, "rounds_per_position": row.rounds_per_position,
            "token_ids": row.token_ids, "text": self.models.tokenizer.decode(row.token_ids, skip_special_tokens=True),
        }  # fmt: skip

    def _differences(
        self, method: Method, tokens: list[int], place: int, prompts: list[list[int]], calls: dict[str, Call | None]
    ) -> dict[str, Any]:
        """From each plain decoding that took part; only where the texts are meant to be the same."""
        found = {}
        for name in PLAINS:
            plain = calls.get(method.plain if name == OUR_PLAIN and isinstance(method, Ours) else name)
            if plain is None or plain is calls[method.name] or not self._same_text_is_meant(method, name):
                continue
            difference = self.comparer.difference(prompts[place], tokens, plain.rows[place].token_ids)
            found[name] = None if difference is None else asdict(difference)
        return found

    def _same_text_is_meant(self, method: Method, plain: str) -> bool:
        if self.contest.temperature == 0:
            return True
        return plain == OUR_PLAIN and isinstance(method, Ours) and method.verification == "coupled"


def timed(call: Callable[[], Call], device: torch.device) -> tuple[Call, float]:
    """A call's result and its seconds, until the device has finished."""
    synchronize(device)
    begin = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - begin
