"""What a user asks for: frozen dataclasses that check themselves."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

VERIFICATION_METHODS = ("rejection", "block", "coupled")
GREEDY_BELOW = 1e-5  # temperature
MAX_TEMPERATURE = 3e38  # temperature, which is a float32
MAX_INT = 2**63 - 1
MAX_BATCH_SIZE = 2**16 - 1  # of the kernels' grids


def is_int(value: Any) -> bool:
    """Whether it is an integer of any type, but not a bool."""
    # Python's own is seen at once: to be asked for an abstract class costs 1 us.
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def check_int(name: str, value: Any, minimum: int, maximum: int | None = None, limit: int = MAX_INT) -> int:
    """`value` as an int.

    Args:
        name: of the option, for messages.
        maximum: None: there is none that users need to know of.
        limit: what the number must not exceed for technical reasons. Only the message about that names it.

    Raises:
        ValueError: unless it is an integer of any type (not a bool) in [minimum, maximum] that does not exceed the limit.
    """
    rule = f">= {minimum}" if maximum is None else f"in [{minimum}, {maximum}]"
    if not is_int(value):
        raise ValueError(f"{name} must be an int {rule}, got {value!r}")
    number = int(value)
    if number < minimum or (maximum is not None and number > maximum):
        raise ValueError(f"{name} must be {rule}, got {number}")
    if number > limit:
        raise ValueError(f"{name} must be <= {limit}, got {number}")
    return number


def check_ints(name: str, values: Any, minimum: int, maximum: int | None = None) -> tuple[int, ...]:
    """`values` as ints; ValueError unless they are a list, tuple or range of such integers."""
    if not isinstance(values, list | tuple | range):
        raise ValueError(f"{name} must be a list of ints, got {values!r}")
    return tuple(check_int(name, value, minimum, maximum) for value in values)


def check_bool(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_instance(name: str, value: Any, kind: type) -> None:
    """Raise ValueError unless `value` is of this class."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be of the class {kind.__name__}, got {value!r:.100}")


def is_number(value: Any) -> bool:
    """Whether it is a finite real number of any type (not a bool) that a float can hold."""
    try:
        plain = type(value) is float or type(value) is int  # see is_int
        return (plain or (not isinstance(value, bool) and isinstance(value, Real))) and math.isfinite(value)
    except OverflowError:
        return False


def is_temperature(value: Any) -> bool:
    """Whether it is a number from 0 to the hottest temperature."""
    return is_number(value) and 0 <= value <= MAX_TEMPERATURE


def _check_float(name: str, value: Any, rule: str, allowed: bool) -> float:
    if not allowed:
        raise ValueError(f"{name} must be {rule}, got {value!r}")
    return float(value)


def check_repetition_penalty(name: str, value: Any) -> float:
    """`value` as a float; ValueError unless it is a number in [0.01, 100], with which logits stay finite."""
    return _check_float(name, value, "in [0.01, 100]", is_number(value) and 0.01 <= value <= 100)


def set_fields(frozen: Any, values: dict[str, Any]) -> None:
    """Give a frozen dataclass what its fields were converted to."""
    for name, value in values.items():
        object.__setattr__(frozen, name, value)


@dataclass(frozen=True)
class SamplingParams:
    """How one prompt is continued.

    Attributes:
        temperature: in [0, 3e38]. 0 is greedy, and so is anything below 1e-5, where logit / T could overflow.
        top_k: keep the k likeliest tokens; 0: off.
        top_p: keep the smallest set of likeliest tokens with at least this mass, in (0, 1]; 1: off.
        min_p: keep tokens with at least this share of the likeliest one's probability, in [0, 1]; 0: off.
        max_new_tokens: at most this many tokens, >= 1.
        seed: in [0, 2**63); determines the random numbers, independently of the batch. Under "rejection" and "block" the sampled
            text also depends on the drafts, so with num_draft_tokens="auto" (which uses measured times) or drafter="suffix" (which
            uses earlier outputs) it can differ between calls. Requests with one seed share their random numbers, so for one prompt
            they give the same text, except where their neighbours in a batch change drafts or rounding: to sample a prompt several
            times, use several seeds. None: a fresh seed for each request.
        stop: the text ends before the first of these strings, even if it spans several tokens. Matching is on the text, without
            special tokens; a string that is exactly a special token of the tokenizer, such as "<|im_end|>", counts as one of
            `stop_token_ids`.
        ignore_eos: do not end at the model's end-of-sequence tokens.
        stop_token_ids: end at any of these tokens, as at an end-of-sequence token: it is the last of the output's `token_ids`, and
            the output's text does not show it.
        repetition_penalty: in [0.01, 100]; 1: off; None: what the target's generation config says, else 1. Logits of tokens that
            the prompt or the answer so far has are divided by this number if they are above 0, and multiplied by it otherwise, as
            in `transformers` (Keskar et al., arXiv 1909.05858). Every verification rule is lossless with respect to these modified
            logits.
        logprobs: report, for each new token, the log of the probability that the target gave it.
        logits_processor: a `LogitsProcessor` or `LogitsProcessorList` of `transformers`, or any function like one. It gets
            input_ids [1, T] int64, the text so far, and scores [1, V] float32 (float64 of a target in float64), the logits after
            the repetition penalty, both on the target's device. It returns scores [1, V], to which temperature and filters are
            applied. It must depend on these two arguments alone: it is called for every position that a draft may decide,
            including positions after drafts that are later rejected (but never after a token to which it gave -inf). Verification
            is lossless with respect to the logits that it returns. It is called on the host, row by row; drafters do not know of
            it.

    Raises:
        ValueError: naming the field, the value and the rule.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 128
    seed: int | None = None
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    repetition_penalty: float | None = None
    logprobs: bool = False
    logits_processor: Callable[[Any, Any], Any] | None = field(default=None, hash=False)  # a list of them has no hash

    def __post_init__(self) -> None:
        t, p, m = self.temperature, self.top_p, self.min_p
        temperature = _check_float(
            "temperature", t, f"a finite number >= 0 and <= {MAX_TEMPERATURE:g}", is_temperature(t)
        )
        checked: dict[str, Any] = {
            "temperature": temperature if temperature >= GREEDY_BELOW else 0.0,
            "top_k": check_int("top_k", self.top_k, 0),
            "top_p": _check_float("top_p", p, "in (0, 1]", is_number(p) and 0 < p <= 1),
            "min_p": _check_float("min_p", m, "in [0, 1]", is_number(m) and 0 <= m <= 1),
            "max_new_tokens": check_int("max_new_tokens", self.max_new_tokens, 1),
            "seed": None if self.seed is None else check_int("seed", self.seed, 0, MAX_INT),
        }
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop must be one or a list of non-empty strings, got {self.stop!r}")
        check_bool("ignore_eos", self.ignore_eos)
        check_bool("logprobs", self.logprobs)
        processor = self.logits_processor
        if processor is not None and (not callable(processor) or isinstance(processor, type)):
            raise ValueError(
                f"logits_processor must be callable as a LogitsProcessor of transformers is, or None, got {processor!r}; several "
                f"go into one LogitsProcessorList"
            )
        checked |= {"stop": tuple(stop), "stop_token_ids": check_ints("stop_token_ids", self.stop_token_ids, 0)}
        if self.repetition_penalty is not None:
            checked["repetition_penalty"] = check_repetition_penalty("repetition_penalty", self.repetition_penalty)
        set_fields(self, checked)


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs: the arguments of `engine.load` about serving.

    Attributes:
        num_draft_tokens: tokens proposed in a round, >= 0; "auto": chosen at run time for the highest expected speed.
        verification: "rejection"; "block", which accepts more of a draft model's longer drafts; or "coupled", which
            accepts less, and whose sampled text depends on the seed alone, not on the drafter, K or the batch.
            Temperature 0 is greedy under each.
        exact: all decode calls have one shape, 8 tokens per row (more than 7 drafts take several calls). Greedy text, and under
            "coupled" sampled text too, is then bit for bit the same with and without speculation. Under "rejection" and "block"
            sampled text still depends on the drafts, but its distribution does not. None: True on an accelerator, False on CPU.
        max_batch_size: rows that decode together, in [1, 65535].
        max_length: prompt and new tokens together, >= 2; None: the model's context.
        compile: on a CPU, the target runs compiled by `torch.compile`.

    Raises:
        ValueError: naming the field, the value and the rule.
    """

    num_draft_tokens: int | str = 5
    verification: str = "rejection"
    exact: bool | None = None
    max_batch_size: int = 8
    max_length: int | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        check_bool("compile", self.compile)
        checked = {"max_batch_size": check_int("max_batch_size", self.max_batch_size, 1, limit=MAX_BATCH_SIZE)}
        if is_int(self.num_draft_tokens):
            checked["num_draft_tokens"] = check_int("num_draft_tokens", self.num_draft_tokens, 0)
        elif not isinstance(self.num_draft_tokens, str) or self.num_draft_tokens != "auto":
            raise ValueError(f"num_draft_tokens must be 'auto' or an int >= 0, got {self.num_draft_tokens!r}")
        if self.verification not in VERIFICATION_METHODS:
            methods = ", ".join(VERIFICATION_METHODS)
            raise ValueError(f"verification must be one of {methods}, got {self.verification!r}")
        if self.exact is not None and not isinstance(self.exact, bool):
            raise ValueError(f"exact must be True, False or None, got {self.exact!r}")
        if self.max_length is not None:
            checked["max_length"] = check_int("max_length", self.max_length, 2)
        set_fields(self, checked)
