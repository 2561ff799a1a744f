"""Learned heads of every kind, drawn at random, for a target of the tiny sizes with at least 7 layers."""

from pathlib import Path
from typing import Any

from eagle_checkpoints import REDUCED, Head
from head_checkpoints import medusa_shapes, mlp_config, mlp_shapes, random_tensors, write

from engine.drafters.eagle import EagleDrafter
from engine.drafters.medusa import MedusaDrafter
from engine.drafters.mlp import MlpSpeculatorDrafter

KINDS = ("medusa", "mlp", "eagle1", "eagle3", "eagle3, reduced")


def random_head(kind: str, folder: Path, **options: Any) -> Any:
    """A drafter of a kind of KINDS, whose checkpoint is written to the folder."""
    if kind == "medusa":
        tensors = random_tensors(medusa_shapes())
        return MedusaDrafter.from_pretrained(
            write(folder, {"medusa_num_heads": 3}, tensors, "heads.safetensors"), **options
        )
    if kind == "mlp":
        tensors = random_tensors(mlp_shapes())
        return MlpSpeculatorDrafter.from_pretrained(
            write(folder, mlp_config(), tensors, "model.safetensors"), **options
        )
    if kind == "eagle1":
        return EagleDrafter.from_pretrained(Head(eagle=1).repository(folder), **options)
    head = Head(**(REDUCED if kind == "eagle3, reduced" else {}))
    return EagleDrafter.from_pretrained(head.speculators(folder), **options)
