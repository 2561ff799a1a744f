"""A byte-level tokenizer whose ids are the bytes: long characters and words span several tokens."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS = 256
VOCAB = 258


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
