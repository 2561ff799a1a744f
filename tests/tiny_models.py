"""Tiny random models of every tested architecture, and prompts for them."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

CONTEXT = 48
VOCAB = 64
WINDOW = 8  # shorter than most prompts, so that sliding layers really slide

_COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=CONTEXT,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
    tie_word_embeddings=False,
)
_GPT2 = dict(n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT)
_GROUPED = dict(num_key_value_heads=2)

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": dict(**_GROUPED, head_dim=8),
    "mistral": dict(**_GROUPED, sliding_window=WINDOW),
    "gemma2": dict(**_GROUPED, head_dim=8, sliding_window=WINDOW),
    "gemma3_text": dict(
        **_GROUPED,
        head_dim=8,
        sliding_window=WINDOW,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gpt2": _GPT2,
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32),
    "gpt_neox": {},
    "phi": {},
    "phi3": dict(sliding_window=WINDOW),
    "falcon": dict(alibi=False),
    "olmo2": _GROUPED,
    "starcoder2": dict(**_GROUPED, sliding_window=WINDOW),
    "mixtral": dict(**_GROUPED, num_local_experts=4, sliding_window=None),
    "smollm3": _GROUPED,
    "gpt_oss": dict(
        **_GROUPED,
        head_dim=8,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": CONTEXT // 4,
        },
    ),
}
EAGER_ONLY = ("gemma2", "gpt_oss")  # transformers' own sdpa knows neither soft caps nor sinks
GROUPED_EXPERTS = ("mixtral", "gpt_oss")  # in torch's grouped matrix product, which knows no float64


def tiny(name: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> PreTrainedModel:
    """A random model; weights are spread wide, so that it does not say the same token for ever."""
    config = AutoConfig.for_model(name, **{**_COMMON, **CONFIGS.get(name, {}), **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.35)
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):  # of the size of logits, so that a text depends on them
                torch.nn.init.normal_(parameter)
    return model


def perturbed(model: PreTrainedModel, amount: float, seed: int = 1) -> PreTrainedModel:
    """A copy that often, but not always, agrees with the model."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += (
                (amount * parameter.std() * noise.to(parameter.device)).to(parameter.dtype)
                if parameter.numel() > 1
                else 0
            )
    return other


def random_prompts(count: int, seed: int = 0, longest: int = 20, vocab_size: int = VOCAB) -> list[list[int]]:
    """Prompts of different length, the first of a single token, half of them repetitive."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, size: int) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    lengths = [1, *draw(2, longest + 1, count - 1)]
    prompts = []
    for index, length in enumerate(lengths):
        motif = draw(2, vocab_size, 5 if index % 2 else length)
        prompts.append((motif * length)[:length])
    return prompts


def greedy(
    model: PreTrainedModel, prompt: list[int], max_new_tokens: int, eos_token_id: int | None = None
) -> list[int]:
    """The new tokens of transformers' own greedy generation, for one unpadded prompt."""
    room = min(max_new_tokens, model.config.get_text_config().max_position_embeddings - len(prompt))
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=room,
        eos_token_id=eos_token_id,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


@contextmanager
def tokens_read(model: PreTrainedModel) -> Iterator[list[int]]:
    """How many tokens each call of the model was for."""
    counts: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: counts.append(inputs[0].numel()))
    try:
        yield counts
    finally:
        hook.remove()
