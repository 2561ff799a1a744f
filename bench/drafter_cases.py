"""What drafting costs with each kind of drafter, for the GPU report: random weights of the sizes in use, on a random target.

Nothing here says how often drafts are accepted. With random weights hardly any are, so that every round is a whole one.
"""

from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import engine
from bench.targets import NEW_TOKENS, PROMPT_TOKENS, SETUP_TURNS, Target, greedy, load, num_graphs, wait
from engine.drafters.eagle_model import EagleModel, eagle_config
from engine.drafters.medusa_model import MedusaHeads
from engine.drafters.mlp import MlpSpeculator
from engine.training.eagle3 import head_config

NUM_DRAFT_TOKENS = 4
DRAFT_VOCAB = 32_000  # of an EAGLE-3 head, as published ones have
# Where the host takes part in every round: drafting is captured in parts, or not at all.
ON_THE_HOST = ("suffix", "staged draft model", "draft model, shared tokens", "draft model, text read anew")


def drafters(target: PreTrainedModel) -> dict[str, Callable[[], engine.Drafter]]:
    """By name: what makes a drafter for this target."""
    config = target.config
    hidden, vocab, layers = config.hidden_size, config.vocab_size, config.num_hidden_layers
    with_head = engine.CascadeDrafter
    return {
        "ngram": engine.NGramDrafter,
        "suffix": engine.SuffixDrafter,
        "a quarter of the layers": lambda: engine.LayerSkipDrafter(exit_layer=max(layers // 4, 1)),
        "eagle": lambda: _eagle(config),
        "eagle3": lambda: _eagle3(config),
        "eagle3, the target's output": lambda: _frozen_eagle3(config),
        "ngram, else eagle3": lambda: with_head(engine.NGramDrafter(min_ngram=3), _eagle3(config)),
        "medusa": lambda: engine.MedusaDrafter(MedusaHeads(hidden, None, NUM_DRAFT_TOKENS, output="target")),
        "mlp": lambda: engine.MlpSpeculatorDrafter(MlpSpeculator(hidden, vocab, NUM_DRAFT_TOKENS, tie_weights=True)),
        "draft model of two layers": lambda: engine.DraftModel(draft_model(target)),
        "staged draft model": lambda: engine.StagedDraftModel(draft_model(target)),
        "draft model, shared tokens": lambda: engine.IntersectionDraftModel(
            draft_model(target), tokenizer(vocab, vocab // 2), tokenizer(vocab)
        ),
        "draft model, text read anew": lambda: engine.ReencodingDraftModel(
            draft_model(target), tokenizer(vocab, vocab // 2), tokenizer(vocab)
        ),
    }


def tokenizer(size: int, first: int = 0) -> PreTrainedTokenizerFast:
    """A token for each of so many words, from the `first` on."""
    words = {f"w{first + index}": index for index in range(size)}
    model = Tokenizer(WordLevel(words, unk_token=f"w{first}"))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model)


def _eagle(config: Any) -> engine.EagleDrafter:
    """EAGLE-1 and 2."""
    layer = head_config(config, 3, config.vocab_size)
    head = EagleModel(eagle_config(layer, eagle=1, num_features=1, feature_size=config.hidden_size))
    return engine.EagleDrafter(head, min_reach=0.0)


def _eagle3(config: Any) -> engine.EagleDrafter:
    layers = config.num_hidden_layers
    draft_vocab = min(DRAFT_VOCAB, config.vocab_size)
    head = EagleModel(head_config(config, 3, draft_vocab))
    return engine.EagleDrafter(head, (0, layers // 2, layers), min_reach=0.0)


def _frozen_eagle3(config: Any) -> engine.EagleDrafter:
    """As `train eagle3 --freeze-head` makes them: a text's own tokens are drafted beside half the vocabulary at most."""
    head = EagleModel(head_config(config, 2, min(DRAFT_VOCAB, config.vocab_size // 2)))
    head.head_is_targets = True
    return engine.EagleDrafter(head, (0, config.num_hidden_layers), min_reach=0.0)


def draft_model(target: PreTrainedModel) -> PreTrainedModel:
    """Of two layers, with random weights."""
    shape = target.config.to_dict() | {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 2048}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    with torch.device(target.device):
        model: Any = LlamaForCausalLM(LlamaConfig(**shape))
        made: PreTrainedModel = model.to(target.dtype).eval()
        return made


def small_draft_model(target: PreTrainedModel) -> engine.DraftModel:
    """Of two layers with random weights, always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return engine.DraftModel(draft_model(target))


def drafter_cost(target: Target, make: Callable[[], engine.Drafter], device: str) -> dict[str, float]:
    """Microseconds of drafting and of a whole round at B = 1, once all is compiled and captured."""
    texts, params = target.prompts(1, PROMPT_TOKENS[device]), greedy(NEW_TOKENS[device])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        llm = load(target.model, make(), num_draft_tokens=NUM_DRAFT_TOKENS)
    for _ in range(max(SETUP_TURNS[device], 1)):
        llm.generate(texts, params)
    if isinstance(llm.drafter, engine.SuffixDrafter):
        llm.drafter.forget()  # or it drafts the text that it has just seen
    graphs = num_graphs(llm)
    wait(llm.target_model.device)  # for what is under way behind the last text's end
    stats = llm.generate(texts, params)[0].stats
    seconds = stats.total_seconds - stats.prefill_seconds
    return {
        "draft_us": stats.draft_seconds / stats.rounds * 1e6, "round_us": seconds / stats.rounds * 1e6,
        "tokens_per_round": stats.block_efficiency, "captured_while_timed": num_graphs(llm) - graphs,
    }  # fmt: skip
