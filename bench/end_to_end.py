"""Whole generations on random weights in the shapes of known models: what the engine costs, apart from any drafter's luck.

Each case takes the device and returns figures for the GPU report. On a CPU the models are tiny, which shows that the cases run
and nothing else. Nothing here says how fast a real model answers: weights are random, and so are the texts.
"""

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import engine
from bench import timing
from bench.attention_cases import attention_report
from bench.drafter_cases import NUM_DRAFT_TOKENS, drafter_costs
from bench.throughput.synthetic import SyntheticDrafter
from bench.throughput.theory import expected_tokens

LABEL = "random weights, random prompts"
# Published shapes of Llama-3.1-8B and Llama-3.2-1B; "tiny" stands in for both on a CPU.
SHAPES: dict[str, dict[str, Any]] = {
    "8B": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
    "1B": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, head_dim=64),
    "tiny": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=16, vocab_size=512),
}
PROMPT_TOKENS, NEW_TOKENS = 512, 128


def model(size: str, device: str) -> PreTrainedModel:
    """A Llama of this shape with random weights in bf16."""
    shape = dict(vocab_size=128256, num_key_value_heads=8, max_position_embeddings=8192, rope_theta=5e5) | SHAPES[size]
    with torch.device(device), torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**shape, eos_token_id=None)).to(torch.bfloat16).eval()


def prompts(count: int, vocab_size: int, length: int = PROMPT_TOKENS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocab_size, (count, length), generator=generator).tolist()


def params(device: str) -> engine.SamplingParams:
    return engine.SamplingParams(max_new_tokens=NEW_TOKENS if device == "cuda" else 12, ignore_eos=True)


def load(target: PreTrainedModel, drafter: Any, batch: int = 1, **options: Any) -> engine.Engine:
    """Without `exact`, whose padding would be part of what is measured."""
    length = PROMPT_TOKENS + 256
    return engine.load(target, drafter=drafter, exact=False, max_batch_size=batch, max_length=length, **options)


def rate(llm: engine.Engine, texts: list[list[int]], device: str, repeats: int = 3) -> float:
    """Tokens per second after prefill, the median of some runs behind one that is not counted."""
    rates = []
    for _ in range(repeats + 1):
        before = llm.stats.total_seconds - llm.stats.prefill_seconds, llm.stats.new_tokens
        llm.generate(texts, params(device))
        seconds = llm.stats.total_seconds - llm.stats.prefill_seconds - before[0]
        rates.append((llm.stats.new_tokens - before[1]) / seconds)
    return sorted(rates[1:])[repeats // 2]


def bandwidth(device: str) -> float:
    """Bytes per second of a copy, read and written bytes together."""
    size = 1 << 30 if device == "cuda" else 1 << 26
    source = torch.zeros(size // 2, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    contender = timing.Contender.in_turn([lambda: target.copy_(source)])
    times = timing.interleave({"copy": contender}, repeats=10, cuda=device == "cuda")
    return size / times["copy"].median


def plain_decoding(device: str) -> dict[str, Any]:
    """Our plain decoding at B = 1 and 512 tokens of context: against memory bandwidth, and against eager `generate`."""
    figures: dict[str, Any] = {"weights": LABEL}
    copied = bandwidth(device)
    for size in ("8B", "1B") if device == "cuda" else ("tiny",):
        target = model(size, device)
        texts = prompts(1, target.config.vocab_size)
        ours = rate(load(target, None), texts, device)
        # The embeddings are looked up, not read.
        read = sum(p.numel() * p.element_size() for n, p in target.named_parameters() if "embed_tokens" not in n)
        figures[size] = {"tokens_per_second": ours, "share_of_copy_bandwidth": ours * read / copied}
        if size != "8B":
            theirs = _generate_rate(target, texts[0], device)
            figures[size] |= {"transformers_tokens_per_second": theirs, "ratio": ours / theirs}
    return figures


def _generate_rate(target: PreTrainedModel, prompt: list[int], device: str) -> float:
    """Eager `generate`, after prefill: the time of many tokens less that of one."""
    ids, many = torch.tensor([prompt], device=device), params(device).max_new_tokens
    options = dict(attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0)
    seconds = {}
    for count in (1, many, 1, many):  # the second time counts
        begin = time.perf_counter()
        target.generate(ids, max_new_tokens=count, min_new_tokens=count, **options)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds[count] = time.perf_counter() - begin
    return (many - 1) / (seconds[many] - seconds[1])


def synthetic_acceptance(device: str) -> dict[str, Any]:
    """A drafter that is right with probability 0.8, K = 5, B = 1: the speedup that is left of what theory allows."""
    target = model("1B" if device == "cuda" else "tiny", device)
    texts = prompts(1, target.config.vocab_size)
    plain = load(target, None)
    known = [output.token_ids for output in plain.generate(texts, params(device))]
    drafter = SyntheticDrafter(0.8, target.config.vocab_size)
    llm = load(target, drafter, num_draft_tokens=5)
    rates = []
    for _ in range(5):
        drafter.expect(texts, known)
        output = llm.generate(texts, params(device))[0]
        rates.append(output.stats.new_tokens / (output.stats.total_seconds - output.stats.prefill_seconds))
    measured = sorted(rates[1:])[2] / rate(plain, texts, device)
    theory = expected_tokens(0.8, 5)
    return {
        "weights": LABEL, "drafter": "synthetic, not a real one", "speedup": measured, "theory": theory,
        "share_of_theory": measured / theory, "block_efficiency": llm.stats.block_efficiency,
    }  # fmt: skip


def host_time(device: str) -> dict[str, Any]:
    """What a round takes beyond the device's own work, and how often the host waits inside one."""
    target = model("1B" if device == "cuda" else "tiny", device)
    llm = load(target, "ngram", num_draft_tokens=5)
    texts = prompts(1, target.config.vocab_size)
    llm.generate(texts, params(device))
    stats = llm.generate(texts, params(device))[0].stats
    wall = (stats.total_seconds - stats.prefill_seconds) / stats.rounds
    inside = (stats.draft_seconds + stats.verify_seconds) / stats.rounds
    figures = {"weights": LABEL, "round_us": wall * 1e6, "host_us": (wall - inside) * 1e6}
    if device == "cuda":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                llm._server.warmup(1, PROMPT_TOKENS, params(device))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        figures["waits_inside_rounds"] = sum("synchroniz" in str(warning.message) for warning in caught)
    return figures


def automatic_length(device: str) -> dict[str, Any]:
    """Against plain decoding where n-grams find nothing: `"auto"` must not cost."""
    target = model("1B" if device == "cuda" else "tiny", device)
    figures: dict[str, Any] = {"weights": LABEL}
    for batch in (1, 4, 16, 64) if device == "cuda" else (1, 4):
        texts = prompts(batch, target.config.vocab_size)
        plain = rate(load(target, None, batch), texts, device)
        figures[f"B={batch}"] = rate(load(target, "ngram", batch, num_draft_tokens="auto"), texts, device) / plain
    return figures


def warmup(device: str) -> dict[str, Any]:
    """Seconds to capture the rounds of four buckets."""
    target = model("1B" if device == "cuda" else "tiny", device)
    llm = engine.load(target, num_draft_tokens=5, exact=False, max_batch_size=4, max_length=PROMPT_TOKENS + 256)
    begin = time.perf_counter()
    llm.warmup([1, 4], [256, PROMPT_TOKENS + 256])
    if device == "cuda":
        torch.cuda.synchronize()
    return {"weights": LABEL, "buckets": 4, "seconds": time.perf_counter() - begin}


def drafting(device: str) -> dict[str, Any]:
    """A row for each kind of drafter."""
    target = model("1B" if device == "cuda" else "tiny", device)
    texts = prompts(1, target.config.vocab_size)
    return {"weights": LABEL, "K": NUM_DRAFT_TOKENS} | drafter_costs(target, load, texts, params(device))


CASES: dict[str, Callable[[str], Any]] = {
    "ragged attention": attention_report,
    "plain decoding": plain_decoding,
    "synthetic acceptance 0.8, K = 5": synthetic_acceptance,
    "host time": host_time,
    '"auto" against plain': automatic_length,
    "warm-up of 4 buckets": warmup,
    "drafting, by drafter": drafting,
}
