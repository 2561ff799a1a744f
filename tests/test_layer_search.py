"""`engine.layer_search`: which set wins, which texts count; whole searches are in tests/test_drafters_layer_skip.py."""

from tiny_models import tiny

from engine.decoder_layers import DecoderLayers
from engine.layer_search import AnsweredTexts, LayerChoice, LayerSearch


def test_of_equal_sets_the_one_with_fewest_layers() -> None:
    """It does the least work for the same speed."""
    sizes = {4: 1.0, 3: 1.2, 2: 1.2, 1: 0.9}
    choices = [LayerChoice(tuple(range(count)), 0.5, 0.5, 1, speedup) for count, speedup in sizes.items()]
    assert LayerSearch(tuple(choices), 10).best.layers == (0, 1)


def test_long_texts_lose_their_beginning() -> None:
    """Not their end, where the answers are by which the layers are judged: each of their tokens counts, and no other."""
    model, prompt, answer = tiny("llama"), list(range(3, 23)), [30, 31, 32]
    texts = AnsweredTexts(model, DecoderLayers(model), [(prompt, answer), ([5], answer)], 8)
    assert texts._tokens.tolist() == [[*range(18, 23), *answer], [5, *answer, 0, 0, 0, 0]]
    assert texts.num_tokens == 6
