"""What the end-to-end cases run on: random weights in the shapes of known models, and a small real model. How they are timed."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import engine
from bench import timing
from engine.default_model import find_model
from engine.demo_prompts import ARTICLE, CODE
from engine.gguf import converted

REAL = "real weights (SmolLM2-135M-Instruct), real text"
# Published shapes of Llama-3.1-8B and Llama-3.2-1B; "tiny" stands in for both on a CPU.
SHAPES: dict[str, dict[str, Any]] = {
    "8B": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
    "1B": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, head_dim=64),
    "tiny": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=16, vocab_size=512),
}
# By device; on a CPU just enough to show that a case runs. One token more than a power of two: else the first round of a
# text would have a bucket to itself, which comes once in a text and is captured the second time that it comes.
PROMPT_TOKENS = {"cuda": 513, "cpu": 33}
NEW_TOKENS = {"cuda": 128, "cpu": 8}
TURNS = {"cuda": 3, "cpu": 1}  # that are counted
# Before them: kernels are compiled and graphs captured. `num_graphs` tells whether any were later.
SETUP_TURNS = {"cuda": 1, "cpu": 0}
MAX_LENGTH = 2048
MOST_ROWS = 64


@dataclass(frozen=True)
class Target:
    """A model, what its weights are, and a text of which prompts are parts."""

    model: PreTrainedModel
    weights: str
    text: list[int]

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    @property
    def bytes_read(self) -> int:
        """By a target call of few tokens: all weights, but for embeddings that are only looked up."""
        embeddings, head = (
            module.weight for module in (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        )
        weights = [p for p in self.model.parameters() if p is not embeddings or p is head]
        return sum(p.numel() * p.element_size() for p in weights)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """So many, of `length` tokens each; a real text is long enough for one."""
        assert count * length <= len(self.text), f"a text of {len(self.text)} tokens is too short"
        return [self.text[i * length : (i + 1) * length] for i in range(count)]


def random_target(device: str, size: str = "1B") -> Target:
    """A Llama of this shape with random weights in bf16; of the tiny one on a CPU."""
    size = size if device == "cuda" else "tiny"
    shape: dict[str, Any] = dict(vocab_size=128256, num_key_value_heads=8, max_position_embeddings=8192, rope_theta=5e5)
    config = LlamaConfig(**shape | SHAPES[size], eos_token_id=None)
    with torch.device(device), torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()  # type: ignore[arg-type]  # a wrapper hides the signature
    length = MOST_ROWS * PROMPT_TOKENS[device]
    text = torch.randint(0, config.vocab_size, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    return Target(model, f"random weights ({size}), random prompts", text)


def real_target(device: str) -> Target:
    """The demo's model as transformers loads it, going on with the demo's texts and never ending by itself.

    In bf16; on a CPU in float32, as transformers' products of bf16 take ten times as long on some.

    Raises:
        FileNotFoundError: where the package that brings it is not installed.
    """
    folder = converted(Path(find_model()), torch.bfloat16, "target")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.generation_config.eos_token_id = None
    text = AutoTokenizer.from_pretrained(folder)(f"{ARTICLE}\n{CODE}")["input_ids"]
    return Target(model.to(device).eval(), REAL, text)


def greedy(new_tokens: int) -> engine.SamplingParams:
    return engine.SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)


def load(model: PreTrainedModel, drafter: Any, batch: int = 1, **options: Any) -> engine.Engine:
    """Without `exact`, whose padding would be part of what is measured, unless it is asked for."""
    options = {"exact": False, "max_batch_size": batch, "max_length": MAX_LENGTH} | options
    return engine.load(model, drafter=drafter, **options)


def timed(
    llm: engine.Engine, texts: list[list[int]], params: engine.SamplingParams
) -> tuple[list[engine.Output], float]:
    """What the texts are continued with, and the seconds that this took without reading the prompts.

    On a GPU, too: the engine has the device's own times for that, as for the rounds. A round that is under way behind the end of
    another text is waited for first, as it may be another engine's.
    """
    wait(llm.target_model.device)
    before = llm.stats.total_seconds - llm.stats.prefill_seconds
    outputs = llm.generate(texts, params)
    return outputs, llm.stats.total_seconds - llm.stats.prefill_seconds - before


def num_graphs(*llms: engine.Engine) -> int:
    """CUDA graphs that these engines hold; figures that some were captured among tell of the capturing, too."""
    return sum(len(llm._target.graphs) for llm in llms)


def generate_seconds(model: PreTrainedModel, prompt: list[int], new_tokens: int, **options: Any) -> float:
    """Of transformers' `generate`, without reading the prompt: the time of many tokens less that of one.

    Args:
        options: of `generate`; without any it is eager.
    """
    ids = torch.tensor([prompt], device=model.device)
    options |= dict(attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0)
    seconds = []
    generate: Any = model.generate
    for count in (1, new_tokens):
        begin = time.perf_counter()
        generate(ids, max_new_tokens=count, min_new_tokens=count, **options)
        wait(model.device)
        seconds.append(time.perf_counter() - begin)
    return seconds[1] - seconds[0]


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def counted(seconds: list[float], device: str) -> list[float]:
    """Those of the turns that count."""
    return seconds[SETUP_TURNS[device] :]


def bandwidth(device: str) -> float:
    """Bytes per second of a copy, read and written bytes together."""
    cuda = device == "cuda"
    size = 1 << 30 if cuda else 1 << 26
    source = torch.zeros(size // 2, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    # A GPU copies in 250 us what the host takes 10 to have it copy.
    contender = timing.Contender.in_turn([lambda: target.copy_(source)], timing.CALLS_PER_REPETITION if cuda else 1)
    times = timing.interleave({"copy": contender}, repeats=10, cuda=cuda)
    return size / times["copy"].median
