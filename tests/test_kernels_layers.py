"""What lies between the matrix products of a decoder layer: the kernels against what transformers computes."""

import pytest
import torch
from kernel_cases import DEVICE, DTYPES
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from engine.kernels import layer_ops, layers

pytestmark = pytest.mark.usefixtures("poisoned_empty")
# Roundings to the dtype are the same; a sum in another order may fall to another side of one.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}
both = pytest.mark.parametrize("module", [layers, layer_ops], ids=["triton", "torch"])


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[actual.dtype], atol=TOLERANCE[actual.dtype])


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 576, 1000])
@pytest.mark.parametrize("summed", [False, True])
def test_norms(module: object, dtype: torch.dtype, size: int, summed: bool) -> None:
    norm = LlamaRMSNorm(size, eps=1e-5).to(DEVICE, dtype)
    norm.weight.data = random(size, dtype=dtype, seed=1)
    x, y = random(2, 3, size, dtype=dtype, seed=2), random(2, 3, size, dtype=dtype, seed=3) if summed else None
    total, normed = module.rms_norm(x, norm.weight.detach(), 1e-5, y)  # type: ignore[attr-defined]
    close(total, x if y is None else x + y)
    close(normed, norm(total).detach())


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 48])
@pytest.mark.parametrize("same_positions", [False, True])
def test_rotary_embedding(module: object, dtype: torch.dtype, head_dim: int, same_positions: bool) -> None:
    query, key = (random(3, 5, heads, head_dim, dtype=dtype, seed=heads).transpose(1, 2) for heads in (4, 2))
    angles = random(1 if same_positions else 3, 5, head_dim // 2, dtype=torch.float32, seed=5).repeat(1, 1, 2)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = apply_rotary_pos_emb(query, key, cosines, sines)
    module.rotate(query, key, cosines, sines)  # type: ignore[attr-defined]
    close(query, expected[0])
    close(key, expected[1])


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_silu(module: object, dtype: torch.dtype) -> None:
    gate, up = (4 * random(3, 700, dtype=dtype, seed=seed) for seed in (1, 2))
    close(module.gated_silu(gate, up), torch.nn.functional.silu(gate) * up)  # type: ignore[attr-defined]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x, y, weight = (random(64, 4096, dtype=dtype, seed=seed) for seed in (1, 2, 3))
    together = layers.rms_norm(x, weight[0], 1e-6, y)[1]
    assert torch.equal(together[7:8], layers.rms_norm(x[7:8], weight[0], 1e-6, y[7:8])[1])
    close(together, layer_ops_on_cpu(x, weight[0], y))


def layer_ops_on_cpu(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    return layer_ops.rms_norm(x.cpu(), weight.cpu(), 1e-6, y.cpu())[1].to(DEVICE)
