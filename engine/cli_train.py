"""`python -m engine train`: a drafter that is made for a target."""

import sys
from shlex import quote
from typing import Annotated, Any

import typer

from . import cli_options as options
from .default_model import usual_target
from .hub import user_path
from .prompt_files import Prompt, read_prompts
from .training.options import LOSSES, METHODS, TrainingOptions

ANSWERS, TRAINING = "Answers of the target", "Training"
_DEFAULT = TrainingOptions("eagle3", "target")


def _option(name: str, help: str, panel: str | None = TRAINING, **more: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel=panel, **more)


def _unanswered(index: int, prompt: Prompt) -> Prompt:
    """A chat without the answer at its end: that is for the target to give."""
    answered = not isinstance(prompt, str) and prompt[-1].get("role") == "assistant"
    if answered and len(prompt) == 1:
        raise ValueError(f"prompts[{index}] must hold a message to answer, got nothing but an assistant's")
    return prompt[:-1] if answered else prompt


def train(
    method: Annotated[str, typer.Argument(help=f"What to train: {', '.join(METHODS)}.", metavar="METHOD")],
    prompts: Annotated[
        str,
        _option(
            "--prompts",
            options.PROMPTS_HELP,
            None,
            metavar="FILE",
        ),
    ],
    out: Annotated[
        str, _option("--out", "Folder for the drafter; a run that was stopped goes on.", None, metavar="FOLDER")
    ],
    target: options.Target = None,
    dtype: options.Dtype = _DEFAULT.dtype,
    device: options.Device = _DEFAULT.device,
    chat: Annotated[
        bool, _option("--chat/--no-chat", "Wrap prompts in the chat template, if the target has one.", ANSWERS)
    ] = _DEFAULT.chat,
    temperatures: Annotated[
        list[float] | None,
        _option(
            "--temperatures",
            "Prompts are answered at these in turn; give the option once for each.",
            ANSWERS,
            show_default=" and ".join(map(str, _DEFAULT.temperatures)),
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, _option("--max-new-tokens", "Maximum number of new tokens of each answer.", ANSWERS)
    ] = _DEFAULT.max_new_tokens,
    max_length: Annotated[
        int, _option("--max-length", "Maximum length of a prompt with its answer.", ANSWERS)
    ] = _DEFAULT.max_length,
    batch_size: Annotated[
        int, _option("--batch-size", "Prompts that are answered together.", ANSWERS)
    ] = _DEFAULT.batch_size,
    validation_share: Annotated[
        float, _option("--validation-share", "Share of the prompts, from the end, that is held out.")
    ] = _DEFAULT.validation_share,
    draft_vocab_size: Annotated[
        int,
        _option(
            "--draft-vocab-size",
            "eagle3: size of the draft vocabulary, the most frequent tokens of the answers; a head to start from that has an "
            "output matrix keeps its own tokens.",
        ),
    ] = _DEFAULT.draft_vocab_size,
    layers: Annotated[
        list[int] | None,
        _option(
            "--layers",
            "eagle3: hidden states that it reads, from 0, the embeddings, to the number of layers, what the target's head reads, "
            "ascending; give the option once for each. Other servers take three, the last of them not among them.",
            show_default="the three of EAGLE-3",
        ),
    ] = None,
    start_from: Annotated[
        str | None,
        _option(
            "--start-from",
            "eagle3: a head to begin with instead of new weights: a folder, a hub id or the name of a packaged one.",
            metavar="HEAD",
        ),
    ] = None,
    freeze_head: Annotated[
        bool,
        _option(
            "--freeze-head/--no-freeze-head",
            "eagle3: the output matrix stays the target's, so that all tokens of a text can be drafted behind it; for this "
            "engine alone.",
        ),
    ] = _DEFAULT.freeze_head,
    num_steps: Annotated[
        int, _option("--num-steps", "eagle3, medusa, mlp: drafts in a chain while training.")
    ] = _DEFAULT.num_steps,
    num_layers: Annotated[
        int, _option("--num-layers", "draft-model: layers of the target to keep.")
    ] = _DEFAULT.num_layers,
    learn_prompts: Annotated[
        bool,
        _option(
            "--learn-prompts/--no-learn-prompts",
            "Learn what follows in the prompts too, for prompts that read like what the target writes.",
        ),
    ] = _DEFAULT.learn_prompts,
    loss: Annotated[
        str,
        _option(
            "--loss",
            f"What is minimised, {' or '.join(LOSSES)}: the divergence from the target's distribution, or the negative logarithm "
            "of the acceptance rate.",
        ),
    ] = _DEFAULT.loss,
    epochs: Annotated[int, _option("--epochs", "Times that every answer is learned from.")] = _DEFAULT.epochs,
    learning_rate: Annotated[float, _option("--learning-rate", "Peak learning rate.")] = _DEFAULT.learning_rate,
    tokens_per_batch: Annotated[
        int, _option("--tokens-per-batch", "Tokens in a batch, padding included.")
    ] = _DEFAULT.tokens_per_batch,
    seed: Annotated[
        int, _option("--seed", "Random seed: of answers, first weights and the order of texts.")
    ] = _DEFAULT.seed,
    max_disk_gb: Annotated[
        float | None,
        _option(
            "--max-disk-gb",
            "Most GB of hidden states on disk; the target reads the remaining texts again in each epoch.",
            show_default="as many as there are",
        ),
    ] = None,
    debug: options.Debug = False,
) -> None:
    """Train a drafter for a target, on what the target answers to prompts.

    The target answers the prompts and reads prompts and answers once more, for its hidden states; then the drafter learns.
    Stopped at any time, the same command goes on.
    """
    texts = [_unanswered(index, prompt) for index, prompt in enumerate(read_prompts([], prompts))]
    chosen = TrainingOptions(
        method=method, target=usual_target(target), chat=chat,
        temperatures=tuple(temperatures or _DEFAULT.temperatures),
        max_new_tokens=max_new_tokens, max_length=max_length, batch_size=batch_size, validation_share=validation_share,
        draft_vocab_size=draft_vocab_size, layers=tuple(layers or ()), start_from=start_from,
        freeze_head=freeze_head, num_steps=num_steps, num_layers=num_layers, learn_prompts=learn_prompts,
        loss=loss, epochs=epochs, learning_rate=learning_rate, tokens_per_batch=tokens_per_batch, seed=seed,
        max_disk_gb=max_disk_gb, dtype=dtype, device=device,
    )  # fmt: skip
    from transformers.utils import logging

    from .threads import use_all_cores
    from .training.run import train_drafter

    use_all_cores()
    logging.set_verbosity_error()
    if user_path(chosen.target).exists():  # a download keeps its bars
        logging.disable_progress_bar()
    try:
        train_drafter(texts, out, chosen)
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on from what is in {out}", file=sys.stderr)
        raise
    folder = user_path(out)
    place = str(folder) if folder.is_absolute() else f"./{folder}"  # a bare name may be that of another drafter
    hint = ", behind generate --chat if the target has a chat template," if chat else ""
    print(
        f"the {method} drafter is in {folder}: use it{hint} with --target {quote(chosen.target)} --drafter {quote(place)}"
    )
