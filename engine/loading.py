"""From what a user names (hub id, folder, GGUF file, live model) to an engine."""

import itertools
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from . import parallel
from .backend import check_kernels
from .checkpoints import Checkpoint, check_checkpoint, locate, read_checkpoint, read_config, read_tokenizer
from .config import EngineConfig, check_bool
from .drafters import CascadeDrafter, Drafter, DraftModel
from .drafters.base import stages_of
from .drafters.by_tokenizer import check_draft_model, draft_model
from .drafters.named import STAGED, named, split_stages
from .drafters.reencoding import ReencodingDraftModel
from .engine import Engine
from .model_support import context_length

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def load(
    target: str | Path | PreTrainedModel,
    drafter: str | Path | PreTrainedModel | Drafter | None = "ngram",
    num_draft_tokens: int | str = 5,
    verification: str = "rejection",
    exact: bool | None = None,
    max_batch_size: int = 8,
    max_length: int | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    tokenizer: Any = None,
    tensor_parallel: bool = False,
    compile: bool = False,
) -> Engine:
    """Make an engine.

    The target's generation config gives end-of-sequence tokens and the repetition_penalty. Temperature, filters and lengths
    come with each request; other settings that change what `transformers` generates, such as suppress_tokens, are not applied, and
    a logged warning lists them.

    Args:
        target: hub id, local folder, GGUF file, or a live model (used as it is, in eval mode from here on). Here and below, a hub
            id is owner/name, or owner/name@revision for another branch than main, a tag or a commit. Of a model that takes images,
            too, the text side is served.
        drafter: what proposes tokens:

            - None: nothing does, which is plain decoding;
            - "ngram", "suffix": what followed the text's last tokens earlier, in this text or (suffix) also in earlier outputs;
            - a hub id or folder of a learned drafter that was made for the target: an EAGLE or Medusa head or an MLP speculator,
              recognised by its config; or the name of a head that comes with the package, in `engine.heads`;
            - MODEL, the hub id, folder or GGUF file of a draft model, with the target's tokenizer or another one;
            - "staged:MODEL": a draft model with the target's tokenizer that is itself decoded speculatively, by n-gram lookup;
            - "layer_skip:N": the target's own first N layers; or a set of its layers, counted from 0: "layer_skip:0-7,28,29";
            - "ngram+X", "suffix+X": lookup, and where that finds nothing X, any of the names above;
            - a live draft model, which must have the target's vocabulary;
            - an object with `prefill`, `propose` and `observe`, see `engine.Drafter`.
        num_draft_tokens: tokens proposed in a round (K), >= 0; "auto": chosen for the highest expected tokens per second, from the
            acceptance and times measured so far; may be 0.
        verification: "rejection"; "block", which accepts more of a draft model's longer drafts; or "coupled", which
            accepts less, and whose sampled text depends on the seed alone, not on the drafter, K or the batch.
            Temperature 0 is greedy under each.
        exact: greedy text, and under "coupled" sampled text too, is bit for bit the same with and without speculation, for any
            drafter and K. Under "rejection" and "block" a sampled text has the same distribution, and depends on the drafts.
            Every target call then has one shape. None: True on an accelerator, where that is nearly free, False on CPU.
        max_batch_size: rows that decode together; more prompts wait for a free one.
        max_length: prompt and new tokens together; None: the model's context.
        dtype: "auto" (the checkpoint's own; bfloat16 for GGUF; a live model's own), a torch dtype or its name. Calls of the engine
            are in this one, whatever `torch.autocast` says.
        device: "auto" (CUDA if there is one, else CPU; a live model's own), or a torch device.
        tokenizer: of a live model, or to replace the checkpoint's: an object, or a folder or hub id that has one. None: prompts
            of a live model are token ids.
        tensor_parallel: spread the target over all processes that torchrun has started, each with a GPU of its own (or, if
            there is none, on CPUs). Each reads its slices of the weights only. All of them must call `load` and `generate`
            with the same arguments, and get the same outputs. A draft model is held whole by each.
        compile: have `torch.compile` compile the target's decode calls while loading, on a CPU: some 70 s for 30 layers on 2 cores
            the first time, 25 s when torch has the code in its cache. They then take up to a tenth less time for a small
            model (more where layers are not fused, see engine/cpu_layers.py), and round differently. Needs a C++ compiler. (GPUs
            capture whole rounds instead.)

    Raises:
        ValueError: for an argument out of its range, a damaged checkpoint, a live draft model of another vocabulary, or an
            ENGINE_KERNELS that is not available.
        FileNotFoundError: for a path that does not exist.
        UnsupportedModelError: for an architecture that cannot be decoded over a ragged cache, or compiled (a ValueError).
        EngineError: if compiling fails.
        OSError: for an inaccessible hub id, or a cache folder in which no converted GGUF file can be written.
        ImportError: for a GGUF file, quantized weights, an adapter beside the weights or a tokenizer.model without the packages
            that read them.
    """
    config = EngineConfig(
        num_draft_tokens=num_draft_tokens,
        verification=verification,
        exact=exact,
        max_batch_size=max_batch_size,
        max_length=max_length,
        compile=compile,
    )
    dtype, num_ranks = _dtype(dtype, target), _num_ranks(tensor_parallel, target, device)
    device = _device(device, target)
    check_kernels(device)
    if compile and (tensor_parallel or device.type != "cpu"):
        raise ValueError(
            f"compile must be False with tensor_parallel and on an accelerator, got device={str(device)!r}"
        )
    tokenizer, stages = _tokenizer(tokenizer), _stages(drafter)
    target = locate(target, "target", dtype)
    model_config = target.config if isinstance(target, PreTrainedModel) else read_config(target, "target")
    _check_length(model_config.get_text_config(), config.max_length)
    _check_target(model_config.get_text_config(), drafter, stages)
    with torch.autocast("cpu", enabled=False):  # layers are fused and compiled by what they give
        main = read_checkpoint(target, "target", dtype, device, tokenizer, num_ranks)
        drafters = [_drafter(main, stage) for stage in stages]
        whole = drafters[0] if len(drafters) == 1 else CascadeDrafter(*drafters) if drafters else None
        return Engine(main.model, main.tokenizer, whole, config)


def _tokenizer(tokenizer: Any) -> Any:
    """What was given, read if it is a folder or a hub id; None stays None."""
    if isinstance(tokenizer, str | Path) and str(tokenizer):
        tokenizer = read_tokenizer(str(tokenizer), "tokenizer")
    is_tokenizer = callable(tokenizer) and hasattr(tokenizer, "decode") and not isinstance(tokenizer, type)
    if tokenizer is not None and not is_tokenizer:
        raise ValueError(f"tokenizer must be a tokenizer of transformers, a folder or a hub id, got {tokenizer!r:.100}")
    if callable(getattr(tokenizer, "added_tokens_decoder", None)):  # mistral-common's do not tell their special tokens
        raise ValueError(
            f"tokenizer must be one with special tokens and a chat template, got a {type(tokenizer).__name__}: "
            f"AutoTokenizer.from_pretrained(..., mistral_format=False) gives one"
        )
    return tokenizer


def check_drafter(drafter: Any) -> None:
    """Raise what `load` would for such a drafter before it looks at the target."""
    _stages(drafter)


def _stages(drafter: Any) -> list[Any]:
    """Of a cascade, or the only one: drafters, and live models and locations of draft models, which need the target at hand."""
    if drafter is not None and not isinstance(drafter, str | Path | PreTrainedModel | Drafter):
        raise ValueError(
            f"drafter must be a name, None, a hub id, a path, a PreTrainedModel, or have prefill, propose and observe; "
            f"got {type(drafter).__name__}"
        )
    if isinstance(drafter, type):
        raise ValueError(f"drafter must be an object, got the class {drafter.__name__}")
    if drafter == "none":
        raise ValueError("drafter must be None for plain decoding, got 'none'")
    if not isinstance(drafter, str | Path):
        return [] if drafter is None else [drafter]
    parts = split_stages(str(drafter)) if isinstance(drafter, str) else [str(drafter)]
    if not all(parts):
        raise ValueError(f"drafter must be a name, a hub id or a path, also after a '+', got {drafter!r}")
    stages = [named(part, before_another=number < len(parts)) for number, part in enumerate(parts, 1)]
    for stage in stages:
        if isinstance(stage, str):
            check_checkpoint(stage.removeprefix(STAGED), "drafter")
    return stages


def _check_length(target: PretrainedConfig, max_length: int | None) -> None:
    context = context_length(target)
    if max_length is not None and max_length > context:
        raise ValueError(f"max_length must be <= {context}, the target's context, got {max_length}")


def _check_target(target: PretrainedConfig, drafter: Any, stages: list[Any]) -> None:
    """Raise ValueError where a stage of a drafter was not made for such a target, before its weights are read."""
    for part in itertools.chain.from_iterable(map(stages_of, stages)):
        check = getattr(part, "check_target", None)
        if check is None:
            continue
        try:
            check(target, target.vocab_size)
        except ValueError as error:
            if not isinstance(drafter, str):
                raise
            raise ValueError(f"drafter {drafter!r}: {error}") from error


def _drafter(main: Checkpoint, stage: Any) -> Drafter:
    """A stage, made into a drafter for this target if it is none yet, and checked against it."""
    if isinstance(stage, str):
        draft = read_checkpoint(stage.removeprefix(STAGED), "drafter", main.model.dtype, main.model.device, None)
        stage = draft_model(main, draft, staged=stage.startswith(STAGED))
    elif isinstance(stage, PreTrainedModel):
        stage = draft_model(main, Checkpoint(stage, None))
    for part in stages_of(stage):
        if isinstance(part, DraftModel | ReencodingDraftModel):
            check_draft_model(main, part)
    found: Drafter = stage
    return found


def _dtype(dtype: Any, target: Any) -> Any:
    """ "auto" or a torch dtype, which a live target must have."""
    if isinstance(dtype, str) and dtype == "auto":
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or found not in DTYPES:
        names = ", ".join(repr(str(each).removeprefix("torch.")) for each in DTYPES)
        raise ValueError(f"dtype must be 'auto', {names} or such a torch dtype, got {dtype!r}")
    if isinstance(target, PreTrainedModel) and target.dtype != found:
        raise ValueError(f"dtype must be 'auto' for a live target, which is in {target.dtype}, got {dtype!r}")
    return found


def _device(device: Any, target: Any) -> torch.device:
    """The device that is meant, on which a live target must be."""
    try:
        wanted = None if device == "auto" else torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"device must be 'auto' or a torch device such as 'cuda:0', got {device!r}") from error
    if isinstance(target, PreTrainedModel):
        if wanted is not None and wanted not in (target.device, torch.device(target.device.type)):
            raise ValueError(f"device must be 'auto' for a live target, which is on {target.device}, got {device!r}")
        if target.device.type not in ("cpu", "cuda"):
            raise ValueError(f"target must be on a CPU or a CUDA device, got one on {target.device}")
        return target.device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted is None:
        return torch.device("cuda" if count else "cpu")
    if wanted.type not in ("cpu", "cuda") or (wanted.type == "cuda" and (wanted.index or 0) >= count):
        raise ValueError(f"device must be 'cpu' or one of the {count} CUDA devices that torch finds, got {device!r}")
    return wanted


def _num_ranks(tensor_parallel: Any, target: Any, device: Any) -> int | None:
    """Processes that the target is to be spread over; None without tensor parallelism."""
    check_bool("tensor_parallel", tensor_parallel)
    if not tensor_parallel:
        return None
    if isinstance(target, PreTrainedModel) or str(target).lower().endswith(".gguf"):
        kind = "a GGUF file" if isinstance(target, str | Path) else f"a live {type(target).__name__}"
        raise ValueError(
            f"target must be a hub id or a folder with safetensors, of which each process reads its slices, for "
            f"tensor_parallel, got {kind}"
        )
    if device != "auto":
        raise ValueError(f"device must be 'auto' for tensor_parallel: each process has its own, got {device!r}")
    return parallel.world_size()
