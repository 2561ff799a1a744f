"""Small tokenizers: one whose ids are bytes, so that long characters and words span several tokens, and one as SentencePiece makes."""

import string

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

EOS = 256
VOCAB = 258
MERGES = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("h", "e"), ("a", "n"), ("an", "d")]


def byte_tokenizer(renamed: dict[str, str] | None = None, extra: int = 0) -> PreTrainedTokenizerFast:
    """Ids 0..255 are bytes, then <eos> and <pad>; `renamed` swaps token strings, `extra` adds tokens."""
    # The byte-level alphabet maps each byte to a printable character: printable bytes to themselves, others upwards.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    for old, new in (renamed or {}).items():
        vocab[new] = vocab.pop(old)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.add_tokens([f"<extra{n}>" for n in range(extra)])
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    assert fast.eos_token_id == EOS
    return fast


def sentencepiece_like(
    letters: str = string.ascii_lowercase, merges: list = MERGES, byte_fallback: bool = True, bos: bool = True
) -> PreTrainedTokenizerFast:
    """Spaces are "▁", other bytes "<0x..>"; ids in another order than the byte-level tokenizer's; texts begin with <s>."""
    words = ["<unk>", "<s>", "<eos>"] + [f"<0x{byte:02X}>" for byte in range(256) if byte_fallback]
    words += ["▁", *reversed(letters), *("".join(pair) for pair in merges)]
    model = models.BPE({w: i for i, w in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=byte_fallback)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<eos>", unk_token="<unk>")
