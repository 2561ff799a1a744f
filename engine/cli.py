"""The command line: `python -m engine demo | generate | chat | check | train`, also installed as `speculative-engine`."""

import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import cli_options as options
from .cli_train import train
from .default_model import usual_drafter, usual_target
from .errors import EngineError
from .prompt_files import read_prompts

if TYPE_CHECKING:
    from .engine import Engine

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
UsageError: Any = typer.BadParameter.__base__  # click's, or that of the copy of click that newer typers carry


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status: 0, 1 for a failure, 2 for bad input, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as with `<&-` or `>&-`
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (for as long as the process lasts)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # better a question mark than no text at all
    if hasattr(sys.stdin, "reconfigure"):  # bytes that are no text spoil one prompt, as in arguments, and no other
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape", newline="\n")  # as files are
    try:
        status = int(app(words, standalone_mode=False) or 0)
        sys.stdout.flush()
        return status
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # the reader has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (UsageError, ValueError, FileNotFoundError) as error:
        return _fail(error, status=2)
    except (EngineError, OSError, ImportError, MemoryError) as error:
        return _fail(error, status=1)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, of a GPU; torch need not be imported by now
            raise
        return _fail(error, status=1)


def _fail(error: Any, status: int) -> int:
    """Report an error in one line, or with its traceback if that was asked for."""
    if options.shows_tracebacks():
        traceback.print_exception(error)
    message = f"{error.format_message()}{_given(error)}" if isinstance(error, UsageError) else str(error)
    print(f"error: {' '.join(message.split()) or type(error).__name__}", file=sys.stderr)
    return status


def _given(error: Exception) -> str:
    """The value that newer typers leave out of what they say; it is in the error of pydantic's that they began with."""
    errors = getattr(error.__context__, "errors", None)
    return f", got {errors()[0]['input']!r}" if callable(errors) else ""


def _show_version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        print(f"speculative-engine {__version__}")
        raise typer.Exit()


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Lossless speculative decoding for Hugging Face causal language models."""


@app.command()
def demo(
    target: options.Target = None,
    drafter: options.ComparedDrafter = None,
    num_draft_tokens: options.NumDraftTokens = "auto",
    exact: options.Exact = None,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "auto",
    max_new_tokens: options.MaxNewTokens = 128,
    repeats: Annotated[int, typer.Option(help="Timed runs of each prompt, with and without speculation.")] = 3,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Answer a question, summarize a text and edit code, then time plain against speculative decoding."""
    from .demo import DemoOptions, run

    if drafter == "none":
        raise ValueError("--drafter must be a drafter, which the demo compares with plain decoding, got 'none'")
    run(
        DemoOptions(
            target=target,
            drafter=_drafter(target, drafter),
            num_draft_tokens=_integer(num_draft_tokens),
            exact=exact,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            dtype=dtype,
            device=device,
            as_json=as_json,
        )
    )


@app.command()
def generate(
    prompts: options.Prompts = None,
    prompts_file: options.PromptsFile = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap each prompt in the chat template.")] = False,
    target: options.Target = None,
    tokenizer: options.Tokenizer = None,
    drafter: options.Drafter = None,
    num_draft_tokens: options.NumDraftTokens = "auto",
    verification: options.Verification = "rejection",
    exact: options.Exact = None,
    max_batch_size: options.MaxBatchSize = None,
    max_length: options.MaxLength = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    compile: options.Compile = False,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = None,
    max_new_tokens: options.MaxNewTokens = 128,
    seed: options.Seed = None,
    stop: options.Stop = None,
    stop_token_ids: options.StopTokenIds = None,
    ignore_eos: options.IgnoreEos = False,
    logprobs: options.Logprobs = False,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Continue prompts: from the command line, a file or standard input.

    With --json, each prompt gives a line: index, text, token_ids, finish_reason, stats, and logprobs if asked for; or an "error".
    """
    from .config import SamplingParams

    if logprobs and not as_json:
        raise ValueError("--logprobs must be used with --json, which shows them")
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        max_new_tokens=max_new_tokens,
        seed=seed,
        stop=stop or (),
        ignore_eos=ignore_eos,
        stop_token_ids=stop_token_ids or (),
        repetition_penalty=repetition_penalty,
        logprobs=logprobs,
    )
    texts = read_prompts(prompts or [], prompts_file)
    items = [[{"role": "user", "content": text}] if chat and isinstance(text, str) else text for text in texts]
    llm = _load(
        target,
        drafter=_drafter(target, drafter),
        num_draft_tokens=_integer(num_draft_tokens),
        verification=verification,
        exact=exact,
        max_batch_size=min(8, len(items)) if max_batch_size is None else max_batch_size,
        max_length=max_length,
        dtype=dtype,
        device=device,
        tokenizer=tokenizer,
        compile=compile,
    )
    from .cli_output import serve, stream_one  # not before: it brings the engine, and torch

    llm.check(items, params)
    if len(items) == 1 and not as_json:
        stream_one(llm, items[0], params)
        return 0
    return serve(llm, items, params, as_json)


@app.command()
def chat(
    target: options.Target = None,
    tokenizer: options.Tokenizer = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    drafter: options.Drafter = None,
    num_draft_tokens: options.NumDraftTokens = "auto",
    verification: options.Verification = "rejection",
    exact: options.Exact = None,
    max_length: options.MaxLength = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    compile: options.Compile = False,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = None,
    max_new_tokens: options.MaxNewTokens = 512,
    seed: options.Seed = None,
    stop: options.Stop = None,
    stop_token_ids: options.StopTokenIds = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Talk to a model. Lines may also be piped in; with --json, each message gives one line: the answer, or an "error"."""
    from .chat import Chat
    from .config import SamplingParams
    from .prompts import check_unicode

    if system is not None:
        check_unicode(system, "--system")
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        max_new_tokens=max_new_tokens,
        seed=seed,
        stop=stop or (),
        stop_token_ids=stop_token_ids or (),
        repetition_penalty=repetition_penalty,
    )
    llm = _load(
        target,
        drafter=_drafter(target, drafter),
        num_draft_tokens=_integer(num_draft_tokens),
        verification=verification,
        exact=exact,
        max_batch_size=1,
        max_length=max_length,
        dtype=dtype,
        device=device,
        tokenizer=tokenizer,
        compile=compile,
    )
    return Chat(llm, params, system, as_json).run()


@app.command()
def check(
    prompts: options.OwnPrompts = None,
    prompts_file: options.PromptsFile = None,
    target: options.Target = None,
    tokenizer: options.Tokenizer = None,
    drafter: options.Drafter = None,
    num_draft_tokens: options.NumDraftTokens = "5",
    exact: options.Exact = None,
    max_length: options.MaxLength = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    compile: options.Compile = False,
    max_new_tokens: options.MaxNewTokens = 64,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Check that a target's greedy text is that of transformers, and that a drafter does not change it.

    Where two texts differ, the gap between the log-probabilities of the two tokens is shown: tiny if rounding decided. The exit
    status is 1 if a gap is larger, or if texts differ that `exact` makes equal. (For timings, see the demo.)
    """
    from .check import CheckOptions, run

    chosen = _drafter(target, drafter)
    settings = dict(
        num_draft_tokens=_integer(num_draft_tokens),
        exact=exact,
        max_length=max_length,
        dtype=dtype,
        device=device,
        tokenizer=tokenizer,
        compile=compile,
    )
    given = read_prompts(prompts or [], prompts_file) if prompts or prompts_file else []
    target = usual_target(target)
    return run(CheckOptions(target, None if chosen == "none" else chosen, settings, given, max_new_tokens, as_json))


app.command()(train)  # help lists the commands in this order


def _integer(text: str) -> Any:
    """An int where the text is one; any other word is for the engine to judge."""
    try:
        return int(text)
    except ValueError:
        return text


def _drafter(target: str | None, drafter: str | None) -> str:
    """What was asked for, or what suits the target."""
    return usual_drafter(target) if drafter is None else drafter


def _load(target: str | None, drafter: str, **settings: Any) -> "Engine":
    import engine

    from .terminal import loading
    from .threads import use_all_cores

    use_all_cores()
    target = usual_target(target)
    with loading(target, drafter):
        return engine.load(target, drafter=None if drafter == "none" else drafter, **settings)
