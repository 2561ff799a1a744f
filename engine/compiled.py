"""A target that `torch.compile` has compiled, for CPUs.

A decode call of a small model consists of many small operations: of the 20 ms that SmolLM2-135M takes for one token in bf16
on 2 cores with AVX-512, with fused layers (cpu_layers.py), matrix products have 14 and attention 2. Compiled, what is between
those becomes few loops of C++.

Products of packed layers (packing.py) and attention over the cache (attention.py) stay what they are: in a graph, each is one
operator, which finds weights, lengths and slots when it runs. So no graph depends on these, and there are two: for one token,
and for several; `exact` calls have one shape, and one graph. Rounding differs from that of the model as it is. Graphs are of the
number of threads and of torch's settings (default dtype, determinism) at that time: if these change, torch makes others in the
next call.
"""

from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch._dynamo import maybe_mark_dynamic
from torch.nn.modules import module as every_module
from tqdm import tqdm
from transformers import PreTrainedModel

from .errors import EngineError, UnsupportedModelError
from .model_support import hooks_of_others

if TYPE_CHECKING:
    from .model import RaggedModel

_BEFORE = 4  # tokens of a text whose K/V is there already
# Whatever others have set: no error is left out, and the limit of graphs is one that a live model does not reach.
_AS_ASKED = {"suppress_errors": False, "fail_on_recompile_limit_hit": True, "recompile_limit": 64}
_MOST_ROUNDING = 0.3  # of the logits' norm; in bf16, 0.05 was seen


class CompiledForward:
    """A model's forward pass, compiled when it is first called with one token and with several.

    Args:
        one_shape: all calls have it.
    """

    def __init__(self, model: PreTrainedModel, one_shape: bool) -> None:
        self._model, self._one_shape = model, one_shape
        self._modules = [module for module in model.modules() if module is not model]
        self._hooks = self._inner_hooks()
        self._forward = torch.compile(_own_forward(model))

    def __call__(self, **arguments: Any) -> Any:
        """What calling the model gives, its hooks included."""
        if self._inner_hooks() != self._hooks:  # which a graph does not look at
            return self._model(**arguments)
        tokens, positions = arguments["input_ids"], arguments["position_ids"]
        if not self._one_shape and tokens.shape[1] > 1:
            # Only this number differs from call to call; `dynamic=True` takes constants for variables too, and gains nothing.
            maybe_mark_dynamic(tokens, 1)
            maybe_mark_dynamic(positions, 1)
        attributes = vars(self._model)
        own = attributes.get("forward")  # seldom: what others have put in place of the class's
        attributes["forward"] = self._forward
        try:
            return self._model(**arguments)
        finally:
            del attributes["forward"]
            if own is not None:
                attributes["forward"] = own

    def _inner_hooks(self) -> list[int]:
        """Those that others have put on modules in the model, and on all modules, by their numbers."""
        hooked = (module for module in self._modules if module._forward_hooks or module._forward_pre_hooks)
        inner = [number for module in hooked for number in hooks_of_others(module)]
        return [*every_module._global_forward_pre_hooks, *every_module._global_forward_hooks, *inner]


_codes = WeakKeyDictionary[PreTrainedModel, CodeType]()


def _own_forward(model: PreTrainedModel) -> Callable[..., Any]:
    """A model's forward pass as a function with code that no other model has. By the code torch.compile counts graphs: it makes
    eight and no more, and all models of a class have that of their `forward` in common."""
    forward = model.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    call.__code__ = _codes.setdefault(model, call.__code__.replace())  # a copy
    return call


@torch.inference_mode()  # as rounds are: a tensor made under it is another kind to torch.compile
def compile_now(target: "RaggedModel") -> None:
    """Compile what `decode` runs, instead of at its first calls.

    Raises:
        EngineError: if it cannot be compiled here, or torch is told not to compile.
        UnsupportedModelError: if the compiled model gives other logits than before.
    """
    if torch._dynamo.config.disable:
        raise EngineError(
            "the target could not be compiled: torch._dynamo.config.disable, or TORCH_COMPILE_DISABLE, is set"
        )
    compiled = target.compiled
    widths = (1,) if target.exact else (1, 2)  # exact calls pad
    target.cache.reserve(_BEFORE + max(widths))
    for width in tqdm(widths, desc="compiling the target", unit="graph", disable=None):
        text = torch.arange(_BEFORE + width, device=target.device)[None] * 997 % target.vocab_size
        start, num_valid = (torch.tensor([count], device=target.device) for count in (_BEFORE, width))
        target.prefill(text, [(0, _BEFORE)], slice(0, 1))
        call = partial(target.decode, text[:, _BEFORE:], start, num_valid, slice(0, 1), text.shape[1])
        target.compiled = None
        plain = call().float()
        target.compiled = compiled
        try:
            with torch._dynamo.config.patch(_AS_ASKED):
                logits = call().float()
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise EngineError(
                f"the target could not be compiled, which takes a C++ compiler, Python's headers and an intact cache (the folder "
                f"TORCHINDUCTOR_CACHE_DIR): {error}"
            ) from error
        if not (logits - plain).norm() < _MOST_ROUNDING * plain.norm():
            kind = target.config.model_type
            raise UnsupportedModelError(
                f"compile must be False for a target of type {kind!r}: the compiled model gives different logits (code that "
                f"torch cached on another processor can cause this too: TORCHINDUCTOR_CACHE_DIR names the folder)"
            )
