"""Small GGUF files: a llama of random weights, with a tokenizer of bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from transformers.convert_slow_tokenizer import bytes_to_unicode

SIZE, INNER, HEADS, LAYERS = 32, 48, 4, 2
TOKENS = [*bytes_to_unicode().values(), "th", "the", "<|begin|>", "<|end|>"]
BEGIN, END = len(TOKENS) - 2, len(TOKENS) - 1


def write(
    path: Path,
    seed: int = 0,
    arch: str = "llama",
    tokenizer: bool = True,
    layers: bool = True,
    parts: int = 1,
    tensors: bool = True,
    more: Callable[[GGUFWriter], None] = lambda writer: None,
) -> np.ndarray:
    """Write a file, and return its embeddings, float32 [tokens, SIZE]. What is left out: its tokenizer, its number of layers,
    all tensors. `more` adds to it."""
    writer = GGUFWriter(path, arch)
    writer.add_context_length(64)
    if layers:
        writer.add_block_count(LAYERS)
    writer.add_embedding_length(SIZE)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    if parts > 1:
        writer.add_uint16("split.no", 0)
        writer.add_uint16("split.count", parts)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("llama-bpe")
        writer.add_token_list(TOKENS)
        writer.add_token_types([1] * BEGIN + [3, 3])
        writer.add_token_merges(["t h", "th e"])
        writer.add_bos_token_id(BEGIN)
        writer.add_eos_token_id(END)
    generator = np.random.default_rng(seed)

    def add(name: str, *shape: int) -> np.ndarray:
        tensor: Any = generator.normal(scale=0.3, size=shape).astype(np.float32)
        if tensors:
            writer.add_tensor(f"{name}.weight", tensor)
        return np.asarray(tensor)

    embeddings = add("token_embd", len(TOKENS), SIZE)
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}", SIZE, SIZE)
        for name, shape in (("ffn_gate", (INNER, SIZE)), ("ffn_up", (INNER, SIZE)), ("ffn_down", (SIZE, INNER))):
            add(f"blk.{layer}.{name}", *shape)
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}", SIZE)
    add("output_norm", SIZE)
    add("output", len(TOKENS), SIZE)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return embeddings
