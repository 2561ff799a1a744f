"""Which drafter a draft model becomes: that depends on what its tokenizer shares with the target's."""

import logging

from ..checkpoints import Checkpoint
from ..model_support import vocab_size
from .intersection import IntersectionDraftModel
from .model import DraftModel
from .reencoding import ReencodingDraftModel
from .staged import StagedDraftModel
from .vocabulary import SharedVocabulary, difference

logger = logging.getLogger(__name__)

_LEAST_SHARE = 0.25  # of the smaller vocabulary: with less, drafting in shared tokens only finds too little to say


def draft_model(main: Checkpoint, draft: Checkpoint, staged: bool = False) -> DraftModel | ReencodingDraftModel:
    """The kind of drafter that the two tokenizers allow.

    Args:
        staged: it is to be decoded speculatively, and needs the target's tokenizer, which is not looked at here.
    """
    if staged:
        return StagedDraftModel(draft.model, tokenizer=draft.tokenizer)
    if None in (main.tokenizer, draft.tokenizer) or not difference(main.tokenizer, draft.tokenizer):
        return DraftModel(draft.model, draft.tokenizer)
    sizes = vocab_size(draft.model), vocab_size(main.model)
    share = SharedVocabulary(draft.tokenizer, main.tokenizer, *sizes).share
    kind = IntersectionDraftModel if share >= _LEAST_SHARE else ReencodingDraftModel
    logger.info("%s: the drafter has another tokenizer, which shares %.0f%% of its tokens", kind.__name__, 100 * share)
    return kind(draft.model, draft.tokenizer, main.tokenizer)


def check_draft_model(main: Checkpoint, drafter: DraftModel | ReencodingDraftModel) -> None:
    """Both must give every id the same meaning, unless the drafter translates. Vocabularies may be padded to different sizes.

    Raises:
        ValueError: with the first id that differs.
    """
    model = drafter.model
    if model.device != main.model.device:
        raise ValueError(f"drafter must be on the target's device {main.model.device}, got {model.device}")
    if model.get_output_embeddings() is None:
        raise ValueError(f"drafter must be a causal language model, got {type(model).__name__} without a head")
    if isinstance(drafter, IntersectionDraftModel | ReencodingDraftModel):
        return
    sizes = [vocab_size(m) for m in (main.model, model)]
    if main.tokenizer is None or drafter.tokenizer is None:
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"drafter must have the target's vocabulary of {sizes[0]} ids, got {sizes[1]}; where they differ by padding, "
                f"pass engine.DraftModel(model, tokenizer=...) and the target's tokenizer, to be compared"
            )
        return
    if found := difference(main.tokenizer, drafter.tokenizer):
        raise ValueError(
            f"drafter must have the target's tokenizer, but {found}; IntersectionDraftModel and ReencodingDraftModel "
            f"draft with another one"
        )
