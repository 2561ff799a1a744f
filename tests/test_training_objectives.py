"""What training computes: the unrolled EAGLE-3 steps, the losses, the labels; and that drafters draft what was trained."""

import copy
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_checkpoints import check_greedy_drafts
from tiny_models import CONFIGS, VOCAB, tiny
from torch import Tensor
from transformers import AutoConfig, DynamicCache, PreTrainedModel

from engine.drafters import EagleDrafter, MedusaDrafter, MlpSpeculatorDrafter
from engine.drafters.eagle_model import EagleModel
from engine.training import objectives
from engine.training.answers import Answer
from engine.training.batches import Batch, batches, collate
from engine.training.eagle3 import Eagle3Training, Unroll, head_config
from engine.training.eagle3_files import save_eagle3
from engine.training.hidden_files import KeptTexts, Text
from engine.training.initial_model import frequent_tokens, layers_to_keep
from engine.training.loop import acceptance, evaluate, learning_rate
from engine.training.losses import LOWEST_RATE, draft_loss
from engine.training.objectives import (
    STEP_DECAY,
    DraftModelTraining,
    HeadTraining,
    MedusaTraining,
    MlpTraining,
    check_num_layers,
)
from engine.training.options import LOSSES, TrainingOptions
from engine.training.soft_labels import SoftLabels
from engine.training.target_head import TargetHead

STEPS = 3
LAYERS = (0, 1, 2)


def target_of(name: str = "llama") -> PreTrainedModel:
    """In float32, with weights that bfloat16 holds exactly."""
    return tiny(name, dtype=torch.bfloat16).float()


def terse_target() -> PreTrainedModel:
    """One that mostly says one of two words, so that some guesses are right."""
    target = target_of()
    with torch.no_grad():
        target.lm_head.weight[1:5:2] *= 8
    return target


def random_text(target: PreTrainedModel, length: int, prompt_length: int, seed: int = 0) -> Text:
    tokens = torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
    return Text(tokens, hidden_of(target, tokens), prompt_length)


def hidden_of(target: PreTrainedModel, tokens: Tensor) -> Tensor:
    """[T, len(LAYERS) * H]."""
    with torch.no_grad():
        states = target.base_model(input_ids=tokens[None], output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in LAYERS], dim=-1)


def ragged_batch(target: PreTrainedModel) -> Batch:
    """Prompts from one token on, an answer of one token, and texts of different length."""
    return collate([random_text(target, *sizes, seed=i) for i, sizes in enumerate([(9, 4), (5, 4), (24, 5), (21, 1)])])


def eagle(target: PreTrainedModel, reduced: bool = True, freeze_head: bool = False, loss: str = "kl") -> Eagle3Training:
    """Untrained; all its weights can be held in bfloat16, and are held in float32."""
    torch.manual_seed(6)
    ids = torch.arange(1, VOCAB, 2) if reduced else torch.arange(VOCAB)
    module = Eagle3Training(target, LAYERS, ids, num_steps=STEPS, freeze_head=freeze_head, loss=loss)
    return rounded(module)


def rounded(module: Any, spread: float = 0.15) -> Any:
    with torch.no_grad():
        for parameter in module.head.parameters():
            if parameter.requires_grad:
                parameter += spread * torch.randn_like(parameter)
    return module.to(torch.bfloat16).float()


def test_a_head_for_layers_of_several_sizes() -> None:
    """As gemma4 has them, whose config refuses to name one size."""
    pytest.importorskip("transformers.models.gemma4")
    target = AutoConfig.for_model(
        "gemma4_text", hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, global_head_dim=16
    )
    made = head_config(target, num_features=3, draft_vocab_size=100)
    assert (made.head_dim, made.num_attention_heads, made.num_key_value_heads) == (8, 4, 2)
    assert EagleModel(made).layers[0].self_attn.q_proj.weight.shape == (32, 64)


def target_with_norms(name: str = "llama") -> PreTrainedModel:
    """Those of a fresh model are all 1, and a copy of one is no copy that shows."""
    target, generator = tiny(name, dtype=torch.float32), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for part, parameter in target.named_parameters():
            if "norm" in part:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return target


def test_a_head_starts_as_the_last_layer() -> None:
    """Untrained, its layer does to a hidden state what the target's does; of another kind of layer nothing is copied."""
    target = target_with_norms()
    head: Any = Eagle3Training(target, LAYERS, torch.arange(VOCAB)).head
    layer, rows = head.layers[0], torch.randn(1, 5, target.config.hidden_size)
    theirs: Any = target.model.layers[-1]
    place = torch.arange(5)[None]
    rotary = dict(position_embeddings=target.model.rotary_emb(rows, place), position_ids=place)
    fused = head.fuse(torch.cat([torch.randn_like(rows), rows, torch.randn_like(rows)], dim=-1))
    embeddings = torch.randn_like(rows)
    both = torch.cat([layer.input_layernorm(embeddings), layer.hidden_norm(fused)], dim=-1)
    hidden = fused + layer.self_attn(hidden_states=both, attention_mask=None, **rotary)[0]
    hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    expected = theirs(rows, attention_mask=None, **rotary)
    torch.testing.assert_close(hidden, expected[0] if isinstance(expected, tuple) else expected)
    torch.testing.assert_close(head.norm.weight, target.model.norm.weight)
    other: Any = Eagle3Training(target_of("gpt2"), LAYERS, torch.arange(VOCAB)).head
    assert other.layers[0].self_attn.q_proj.weight[:, : rows.shape[-1]].any()


@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3", "smollm3"])
def test_a_head_starts_with_what_its_layer_has_in_common_with_the_last(name: str) -> None:
    """These layers have more than a head's, or less; training from random weights takes many times as long."""
    target: Any = target_with_norms(name)
    head: Any = Eagle3Training(target, LAYERS, torch.arange(VOCAB)).head
    own, theirs, size = head.layers[0], target.model.layers[-1], target.config.hidden_size
    for part in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(own.self_attn, part).weight
        assert torch.equal(weight[:, size:], getattr(theirs.self_attn, part).weight) and not weight[:, :size].any()
    assert torch.equal(own.self_attn.o_proj.weight, theirs.self_attn.o_proj.weight)
    for part in ("gate_proj", "up_proj", "down_proj"):
        assert torch.equal(getattr(own.mlp, part).weight, getattr(theirs.mlp, part).weight)
    assert torch.equal(own.hidden_norm.weight, theirs.input_layernorm.weight)
    assert torch.equal(own.post_attention_layernorm.weight, theirs.post_attention_layernorm.weight)
    assert torch.equal(head.norm.weight, target.model.norm.weight)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e5},
        {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=["default", "llama3"],
)  # fmt: skip
def test_a_heads_positions_are_the_targets(rope: dict[str, Any]) -> None:
    """The weights that it starts with were trained for those."""
    target: Any = tiny("llama", dtype=torch.float32, rope_parameters=rope)
    head: Any = Eagle3Training(target, LAYERS, torch.arange(VOCAB)).head
    torch.testing.assert_close(head.rotary_emb.inv_freq, target.model.rotary_emb.inv_freq.float())


def test_a_speculator_starts_with_the_targets_words() -> None:
    target: Any = tiny("llama", dtype=torch.float32)
    head: Any = MlpTraining(target, 2).head
    assert torch.equal(head.emb[0].weight, target.get_input_embeddings().weight)
    torch.testing.assert_close(head.head[0].weight, target.lm_head.weight, rtol=0.01, atol=1e-3)  # in bfloat16


def other_head(head: EagleModel) -> EagleModel:
    """As somebody else may have trained it, with the same tensors: other flags, rotary embedding and epsilon."""
    config = copy.deepcopy(head.config)
    config.norm_before_residual = config.norm_output = True
    config.rope_parameters = {"rope_type": "default", "rope_theta": 123.0}
    config.rms_norm_eps = 0.1
    other = EagleModel(config)
    other.load_state_dict(head.state_dict())
    return other


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(("first", "started_from_other"), [(0, False), (3, False), (3, True)])
def test_unrolled_steps_are_those_of_the_model(cached: bool, first: int, started_from_other: bool) -> None:
    """Step s of the chain that starts at j, for every j and s, against the network that drafts, one chain at a time."""
    target = target_of()
    training = eagle(target)
    network = training.head
    if started_from_other:
        network = other_head(training.head)
        training = Eagle3Training(target, LAYERS, training.draft_ids, STEPS, start=network)
        network.borrow(training.embeddings)
    network.double()
    head = training.head.double()
    training.embeddings.double()
    tokens = random_text(target, 10, 4).tokens[None]
    with torch.no_grad():
        fused = head.fuse(hidden_of(target, tokens[0])[None, :-1].double())
        unroll = Unroll(head, tokens, fused, first)
        steps = [unroll.step() for _ in range(STEPS)]
        for chain, start in enumerate(range(first, 9)):
            cache = DynamicCache() if cached else None
            features, place = fused[:, : start + 1], 0
            for step in range(STEPS):
                if start + 1 + step >= tokens.shape[1]:
                    break
                read = torch.arange(place, start + 1 + step)[None]
                output = network(tokens[:, read[0] + 1], features[:, place:], read, cache=cache, use_cache=cached)[0]
                found, expected = (
                    head.lm_head(head.normed(hidden)) for hidden in (steps[step][:, chain], output[:, -1])
                )
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # norms and scores are float32
                features = torch.cat([features, output[:, -1:]], dim=1)
                place = features.shape[1] - 1 if cached else 0


def textbook_loss(name: str, wanted: Tensor, logits: Tensor) -> Tensor:
    """Of rows [..., V] of probabilities and logits: [...]."""
    if name == "kl":
        return -(wanted * logits.log_softmax(-1)).sum(-1)
    distance = (wanted.double() - logits.double().softmax(-1)).abs().sum(-1) / 2
    return -(1 - distance).clamp(min=LOWEST_RATE).log().float()  # the acceptance rate is 1 - TV(p, q)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("wants_weight", [False, True])
def test_losses_of_soft_labels_are_the_textbook_formulas(name: str, wants_weight: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(700, 16, generator=generator, requires_grad=True)  # more than two parts of rows
    weight = torch.randn(40, 16, generator=generator, requires_grad=wants_weight)
    labels = torch.randn(900, 40, generator=generator).softmax(-1)
    rows = torch.randint(0, 900, (700,), generator=generator)
    loss, best = SoftLabels(labels, weight, name).loss(hidden, rows)
    (3 * loss).backward()
    found = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    logits = hidden @ weight.T
    expected = textbook_loss(name, labels[rows], logits).mean()
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, (hidden.grad, weight.grad))
    assert (weight.grad is not None) == wants_weight
    assert torch.equal(best, logits.argmax(-1))


def test_losses_of_other_names() -> None:
    target, rows = target_of(), torch.ones(1, 2)
    for call in (
        lambda: draft_loss("KL", rows, rows),
        lambda: SoftLabels(rows, rows, "KL"),
        lambda: eagle(target, loss="KL"),
        lambda: MedusaTraining(target, 1, "KL"),
        lambda: MlpTraining(target, 1, "KL"),
        lambda: DraftModelTraining(target, 1, "KL"),
    ):
        with pytest.raises(ValueError, match="loss must be one of kl, lk, got 'KL'"):
            call()


def test_drafts_that_are_never_accepted_have_a_finite_loss() -> None:
    labels, logits = torch.tensor([[1.0, 0.0]]), torch.tensor([[-200.0, 0.0]], requires_grad=True)
    expected = -math.log(LOWEST_RATE)
    found = draft_loss("lk", labels, logits)
    found.sum().backward()
    assert found.item() == pytest.approx(expected) and logits.grad.isfinite().all()
    hidden = logits.detach().clone().requires_grad_()
    loss, _ = SoftLabels(labels, torch.eye(2), "lk").loss(hidden, torch.tensor([0]))
    loss.backward()
    assert loss.item() == pytest.approx(expected) and hidden.grad.isfinite().all()


def textbook(
    module: Any, batch: Batch, target: PreTrainedModel, ids: Tensor, logits_of: Callable[[int, int, int], Tensor]
) -> tuple[float, list[list[int]]]:
    """Loss and outcomes, one chain and one draft after another; logits_of(row, start, step) [V_draft]."""
    losses: list[list[Tensor]] = [[] for _ in range(module.num_steps)]
    outcomes = [[0, 0] for _ in range(module.num_steps)]
    with torch.no_grad():
        for row in range(len(batch.tokens)):
            said = target(batch.tokens[row : row + 1, : batch.lengths[row]]).logits[0]
            for start in range(max(int(batch.prompt_lengths[row]) - 2, 0), int(batch.lengths[row]) - 1):
                stands = True
                for step in range(module.num_steps):
                    if start + 1 + step >= int(batch.lengths[row]):
                        break
                    wanted, logits = said[start + 1 + step], logits_of(row, start, step)
                    losses[step].append(textbook_loss(module.loss, wanted[ids].softmax(-1), logits))
                    outcomes[step][0] += stands
                    stands = stands and int(ids[logits.argmax()]) == int(wanted.argmax())
                    outcomes[step][1] += stands
    loss = sum(STEP_DECAY**step * torch.stack(found).mean() for step, found in enumerate(losses))
    return float(loss), outcomes


@pytest.mark.parametrize(
    ("reduced", "freeze_head", "name"),
    [(True, False, "kl"), (False, False, "lk"), (True, True, "kl"), (True, True, "lk")],
)
def test_loss_of_eagle3(reduced: bool, freeze_head: bool, name: str) -> None:
    """With a frozen head, the draft vocabulary has the batch's tokens too."""
    target = terse_target()
    training = eagle(target, reduced, freeze_head, name).eval()
    batch = ragged_batch(target)
    ids, rows = training.draft_ids, training.head.lm_head.weight
    if freeze_head:
        more = sorted(set(batch.tokens.flatten().tolist()) - set(ids.tolist()))
        assert more
        ids = torch.tensor([*ids.tolist(), *more])
        rows = target.get_output_embeddings().weight[ids]

    def logits_of(row: int, start: int, step: int) -> Tensor:
        return eagle_logits(training, rows, batch.tokens[row], batch.hidden[row], start, step)

    expected = textbook(training, batch, target, ids, logits_of)
    with torch.no_grad():
        loss, outcomes = training(batch)
    assert float(loss) == pytest.approx(expected[0], rel=0.01)  # labels in bfloat16
    assert [outcome.tolist() for outcome in outcomes] == expected[1]
    assert 0 < expected[1][0][1] < expected[1][0][0] and expected[1][1][1] > 0


def eagle_logits(
    training: Eagle3Training, rows: Tensor, tokens: Tensor, hidden: Tensor, start: int, step: int
) -> Tensor:
    """[V], by the network that drafts, without a cache; rows [V, H] of the output matrix."""
    head = training.head
    features = head.fuse(hidden[None, : start + 1])
    for end in range(start + 1, start + 2 + step):
        output = head(tokens[None, 1 : end + 1], features, torch.arange(end)[None], use_cache=False)[0]
        features = torch.cat([features, output[:, -1:]], dim=1)
    return head.normed(features[0, -1]) @ rows.T


@pytest.mark.parametrize(("kind", "name"), [(MedusaTraining, "kl"), (MlpTraining, "kl"), (MlpTraining, "lk")])
def test_loss_of_heads(kind: Any, name: str) -> None:
    target = terse_target()
    training = rounded(kind(target, STEPS, name)).eval()
    batch = ragged_batch(target)
    hidden = batch.hidden[..., -32:]

    def logits_of(row: int, start: int, step: int) -> Tensor:
        if kind is MedusaTraining:
            return training.head(hidden[row, start])[step]
        state = training.head.first_state(hidden[row, start])
        for earlier in range(step + 1):
            state, logits = training.head(earlier, state, batch.tokens[row, start + 1 + earlier])
        return logits

    expected = textbook(training, batch, target, torch.arange(VOCAB), logits_of)
    with torch.no_grad():
        loss, outcomes = training(batch)
    assert float(loss) == pytest.approx(expected[0], rel=1e-4)
    assert [outcome.tolist() for outcome in outcomes] == expected[1]
    assert 0 < expected[1][0][1] < expected[1][0][0]


def test_loss_of_a_draft_model() -> None:
    """With all layers it is the target: no draft is wrong, and the loss is the entropy of the target's distributions."""
    target = target_of()
    batch = ragged_batch(target)
    with torch.no_grad():
        whole = DraftModelTraining(target, 2).to(torch.bfloat16).float()
        loss, ((seen, stood),) = whole(batch)
        said = [
            target(tokens[None, :length]).logits[0] for tokens, length in zip(batch.tokens, batch.lengths, strict=True)
        ]
        starts = [max(int(length) - 2, 0) for length in batch.prompt_lengths]
        rows = torch.cat([logits[start + 1 :] for logits, start in zip(said, starts, strict=True)])
        entropy = torch.distributions.Categorical(logits=rows).entropy().mean()
    assert seen == stood == len(rows)
    torch.testing.assert_close(loss, entropy)
    first = DraftModelTraining(target, 1).head
    assert torch.equal(first.model.layers[0].mlp.up_proj.weight, target.model.layers[0].mlp.up_proj.weight)


@pytest.mark.parametrize("name", ["cohere", "granite", "gemma2"])
def test_a_draft_model_is_trained_on_the_logits_that_it_drafts_by(name: str) -> None:
    """With what comes behind the matrix of its head: scales and soft caps."""
    target = target_of(name)
    module, batch = DraftModelTraining(target, 2), ragged_batch(target)
    rows, starts = module._chains(batch)
    with torch.no_grad():
        (found,) = module.drafts(batch, rows, starts)
        expected = module.head(input_ids=batch.tokens).logits[rows, starts + 1]
    torch.testing.assert_close(found, expected)


def test_a_draft_models_layers_are_evenly_spread() -> None:
    """They and the last norm are trained; embeddings and head stay the target's."""
    target = tiny("llama", dtype=torch.float32, num_hidden_layers=5)
    head = DraftModelTraining(target, 3).head
    for mine, theirs in enumerate((0, 2, 4)):
        weight = target.model.layers[theirs].mlp.up_proj.weight
        assert torch.equal(head.model.layers[mine].mlp.up_proj.weight, weight)
    trained = {name.split(".")[1] for name, parameter in head.named_parameters() if parameter.requires_grad}
    assert trained == {"layers", "norm"}


def test_a_draft_model_is_trained_without_dropout() -> None:
    """From its first step on: what a step does must depend on the batch alone, or a run that was stopped ends elsewhere."""
    target = target_of("gpt2")
    module, batch = DraftModelTraining(target, 2), ragged_batch(target)
    first, again = (module(batch)[0].item() for _ in range(2))
    assert first == again == module.train()(batch)[0].item()


EXPERTS: dict[str, Any] = dict(
    num_hidden_layers=5, num_key_value_heads=2, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8, n_group=1,
    topk_group=1, n_routed_experts=4, num_experts=4, moe_num_experts=4, moe_k=2, shared_expert_intermediate_size=16,
)  # fmt: skip


@pytest.mark.parametrize(
    "name, changes",
    [
        ("glm4_moe", dict(first_k_dense_replace=2)),
        ("afmoe", dict(num_dense_layers=2)),
        ("ernie4_5_moe", dict(moe_layer_start_index=1)),
        ("qwen3_moe", dict(mlp_only_layers=[0, 4])),
    ],
)
def test_a_draft_model_of_a_target_with_layers_of_two_kinds(name: str, changes: dict[str, Any]) -> None:
    target = tiny(name, dtype=torch.float32, **{**EXPERTS, **changes})
    theirs = target.state_dict()
    head = DraftModelTraining(target, 3).head
    for mine, layer in ((0, 0), (1, 2), (2, 4)):
        found = head.model.layers[mine].state_dict()
        assert found.keys() == target.model.layers[layer].state_dict().keys()
        assert all(torch.equal(value, theirs[f"model.layers.{layer}.{key}"]) for key, value in found.items())


def test_a_target_whose_layers_cannot_be_told_apart() -> None:
    target = tiny("qwen2_moe", dtype=torch.float32, **EXPERTS, decoder_sparse_step=2)
    with pytest.raises(
        ValueError, match=r"num_layers = 3 of Qwen2MoeForCausalLM's 5, model\.layers\.1\.mlp\..* would not"
    ):
        check_num_layers(target, 3)
    assert check_num_layers(target, 5)[1] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("qwen3", dict(hidden_size=36, num_attention_heads=8, head_dim=8), "hidden size .* not a multiple"),
        ("phi", dict(hidden_size=36, num_attention_heads=4), "rot"),
    ],
)
def test_a_target_of_a_size_that_no_head_can_have(name: str, changes: dict[str, Any], message: str) -> None:
    """Said before any prompt is answered."""
    target = tiny(name, **changes)
    with pytest.raises(
        ValueError, match=f"(?s)method eagle3 needs a target of whose size .* got '{name}': .*{message}"
    ):
        layers_to_keep(target, TrainingOptions("eagle3", "target", layers=(0, 1)))


def test_no_rotary_embedding_for_the_layers_that_see_all() -> None:
    target = target_of()
    target.config.rope_parameters = {
        "full_attention": None,
        "sliding_attention": dict(rope_type="default", rope_theta=1e4),
    }
    assert head_config(target.config, 2, 8).rope_parameters["rope_type"] == "default"


def test_chains_of_a_large_batch_are_spread_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of()
    training, batch = MedusaTraining(target, 2), ragged_batch(target)
    rows, starts = training._chains(batch)
    monkeypatch.setattr(objectives, "MAX_CHAINS", 12)
    some, begun = training._chains(batch)
    assert len(rows) > len(some) == 12
    assert (some[0], begun[0], some[-1], begun[-1]) == (rows[0], starts[0], rows[-1], starts[-1])


def expected_drafts(target: PreTrainedModel, training: Any, text: list[int]) -> list[int]:
    """By what was trained, draft after draft: a step reads the drafts before it as text."""
    drafts: list[int] = []
    start = len(text) - 2
    for step in range(STEPS):
        tokens = torch.tensor([*text, *drafts])
        hidden = hidden_of(target, torch.tensor(text))
        hidden = torch.cat([hidden, hidden.new_zeros(len(drafts) + 1, hidden.shape[1])])
        batch = collate([Text(torch.cat([tokens, tokens[:1]]), hidden, len(text))])
        with torch.no_grad():
            if isinstance(training, HeadTraining):
                found = list(training.drafts(batch, torch.tensor([0]), torch.tensor([start])))[step][0]
                drafts.append(int(found.argmax()))
            else:
                unroll = Unroll(training.head, batch.tokens, training.head.fuse(batch.hidden[:, :-1]), start)
                hidden = training.head.normed([unroll.step() for _ in range(step + 1)][-1][0, 0])
                ids, rows = training.draft_ids, training.head.lm_head.weight
                if training.freeze_head:
                    ids = torch.tensor([*ids.tolist(), *sorted(set(text) - set(ids.tolist()))])
                    rows = target.get_output_embeddings().weight[ids]
                drafts.append(int(ids[(rows @ hidden).argmax()]))
    return drafts


@pytest.mark.parametrize("method", ["eagle3", "frozen", "medusa", "mlp"])
def test_drafters_draft_what_was_trained(method: str, tmp_path: Path) -> None:
    """A head that is saved and read again drafts, in ragged batches over caches, what its training steps compute."""
    target = target_of()
    torch.manual_seed(5)
    training: Any
    if method in ("eagle3", "frozen"):
        training = eagle(target, freeze_head=method == "frozen").eval()
        save_eagle3(training, tmp_path, "target", "LlamaForCausalLM")
        drafter: Any = EagleDrafter.from_pretrained(tmp_path, min_reach=0.0)
        assert drafter.model.head_is_targets == (method == "frozen")
    else:
        training = rounded((MedusaTraining if method == "medusa" else MlpTraining)(target, STEPS)).eval()
        training.save(tmp_path)
        options = {} if method == "medusa" else {"min_reach": 0.0}
        drafter = (MedusaDrafter if method == "medusa" else MlpSpeculatorDrafter).from_pretrained(tmp_path, **options)
    most = 4 if training.__class__ is Eagle3Training else STEPS

    def expected(text: list[int]) -> list[int]:
        found = expected_drafts(target, training, text)
        return found + [-1] * (most - STEPS)

    propose = drafter.propose
    drafter.propose = lambda state, count: propose(state, min(count, STEPS))
    check_greedy_drafts(target, drafter, expected, STEPS)


def test_a_saved_head_is_made_as_the_one_that_was_trained(tmp_path: Path) -> None:
    """It would draft with another rotary embedding, norm or activation, too, and hardly a draft would stand."""
    target = target_of()
    start = other_head(eagle(target).head)
    start.config.hidden_act, start.config.max_position_embeddings = "gelu", 77
    training = Eagle3Training(target, LAYERS, torch.arange(1, VOCAB, 2), STEPS, start=start)
    save_eagle3(training, tmp_path, "target", "LlamaForCausalLM")
    found, expected = EagleDrafter.from_pretrained(tmp_path).model, training.head
    for name in (
        "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "head_dim", "num_key_value_heads",
        "norm_before_residual", "norm_before_fc", "norm_output", "fc_norm",
    ):  # fmt: skip
        assert getattr(found.config, name) == getattr(expected.config, name), name
    torch.testing.assert_close(found.rotary_emb.inv_freq, expected.rotary_emb.inv_freq)


@pytest.mark.parametrize("name", [*CONFIGS, "cohere", "granite"])
def test_labels_are_what_the_target_says(name: str) -> None:
    target = tiny(name, dtype=torch.bfloat16, **({"logits_scaling": 4.0} if name == "granite" else {})).float()
    head = target.get_output_embeddings()
    if head.bias is not None:
        torch.nn.init.normal_(head.bias)
    with torch.no_grad():
        output = target(torch.arange(2, 22)[None], output_hidden_states=True)
        found = TargetHead.of(target).float()(output.hidden_states[-1])
        some = TargetHead.of(target).rows(torch.tensor([5, 2])).float()(output.hidden_states[-1])
    torch.testing.assert_close(found, output.logits, rtol=0.01, atol=0.01)
    torch.testing.assert_close(some, output.logits[..., [5, 2]], rtol=0.01, atol=0.01)


def test_evaluation_counts_texts_of_any_length() -> None:
    """Batches whose texts are too short for later drafts count for the earlier ones, wherever they stand."""
    target = target_of()
    training = eagle(target)
    short, long = (collate([random_text(target, length, 2)]) for length in (3, 9))
    found = evaluate(training, iter([short, long, short]))
    assert training.training
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        (short_loss, few), (long_loss, many) = training.eval()(short), training(long)
    assert (len(few), len(many)) == (2, 3)
    sums = [2 * few[0] + many[0], 2 * few[1] + many[1], many[2]]
    assert found["acceptance"] == acceptance(sums)
    chains = [int(few[0][0]), int(many[0][0])]
    expected = (2 * short_loss * chains[0] + long_loss * chains[1]) / (2 * chains[0] + chains[1])
    assert found["loss"] == pytest.approx(float(expected))
    assert evaluate(training, iter([])) == {"loss": 0.0, "acceptance": []}


def test_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(step / 100) for step in range(101)]
    top = rates.index(max(rates))
    assert 0 < rates[0] < 0.1 and max(rates) == pytest.approx(1.0) and top <= 4
    assert rates[:top] == sorted(rates[:top]) and rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] == pytest.approx(0.05)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> KeptTexts:
    """30 texts in three files."""
    kept = kept_texts(tmp_path_factory.mktemp("hidden"))
    kept.write()
    return kept


def kept_texts(folder: Path) -> KeptTexts:
    """30 texts in three groups, none in a file."""
    answers = [Answer(list(range(2, 4 + i % 5)), list(range(10, 11 + i))) for i in range(30)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.training.hidden_files.TEXTS_PER_GROUP", 12)
        return KeptTexts(target_of(), answers, (1, 2), folder, 20)


def test_kept_hidden_states_are_those_of_the_target(kept: KeptTexts) -> None:
    target = target_of()
    texts = [text for group in kept for text in group]
    assert len(kept) == len(kept.files) == 3 and len(texts) == 30
    assert kept.num_tokens == sum(len(text.tokens) for text in texts)
    assert max(len(text.tokens) for text in texts) == 20  # cut
    for text in texts:
        assert text.hidden.dtype == torch.float32
        torch.testing.assert_close(text.hidden, hidden_of(target, text.tokens)[:, 32:], rtol=1e-4, atol=1e-4)
        assert text.tokens[text.prompt_length :].tolist() == list(range(10, 10 + len(text.tokens) - text.prompt_length))


def test_reading_makes_no_cache(tmp_path: Path) -> None:
    """K/V of all layers would take more memory than what is kept."""
    kept, caches = kept_texts(tmp_path), []
    hook = kept._model.base_model.register_forward_hook(lambda _, args, output: caches.append(output.past_key_values))
    assert len(list(kept[0])) == 12
    hook.remove()
    assert caches and set(caches) == {None}


def test_texts_for_which_there_is_no_room(kept: KeptTexts, tmp_path: Path) -> None:
    """They are read when they are asked for, and are the same to the last bit."""
    of_first = kept.files[0].stat().st_size
    bytes_of_first = sum(len(text.tokens) for text in kept[0]) * (2 * 32 * 4 + 8)
    assert kept.num_bytes == kept.num_tokens * (2 * 32 * 4 + 8)
    for room, expected in ((0.0, 0), (bytes_of_first - 1, 0), (bytes_of_first, 1), (math.inf, 3)):
        other = kept_texts(tmp_path / f"{room}")
        other.files[0].parent.mkdir()
        other.write(room)
        assert [file.exists() for file in other.files] == [index < expected for index in range(3)]
        for group, same in zip(other, kept, strict=True):
            for text, text_of_file in zip(group, same, strict=True):
                assert text.prompt_length == text_of_file.prompt_length
                assert torch.equal(text.tokens, text_of_file.tokens)
                assert torch.equal(text.hidden, text_of_file.hidden)
    other.write(bytes_of_first)  # which has less room by now
    assert [file.exists() for file in other.files] == [True, False, False]
    assert bytes_of_first < of_first < 1.5 * bytes_of_first


def test_groups_take_so_many_bytes_at_most(kept: KeptTexts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless one text takes more. They hold the same texts, in the same order."""
    answers = [answer for group in kept._groups for answer in group]
    for tokens in (50, 10):
        monkeypatch.setattr("engine.training.hidden_files.BYTES_PER_GROUP", most := tokens * (2 * 32 * 4 + 8))
        other = KeptTexts(target_of(), answers, (1, 2), tmp_path, 20)
        sizes = [other._bytes(group) for group in other._groups]
        assert all(size <= most or len(group) == 1 for size, group in zip(sizes, other._groups, strict=True))
        assert [answer for group in other._groups for answer in group] == answers
        assert all(sum(pair) > most for pair in itertools.pairwise(sizes)) and len(sizes) > 3


def test_batches_hold_every_text_once(kept: KeptTexts) -> None:
    def texts_of(seed: int, epoch: int) -> list[tuple[int, ...]]:
        found = []
        for batch in batches(kept, 60, seed, epoch):
            assert batch.tokens.numel() <= 60
            assert batch.hidden.shape == (*batch.tokens.shape, 64)
            found += [tuple(row[:length].tolist()) for row, length in zip(batch.tokens, batch.lengths, strict=True)]
        return found

    first = texts_of(0, 0)
    assert first == texts_of(0, 0)
    assert first != texts_of(0, 1) and first != texts_of(1, 0)
    assert sorted(first) == sorted(texts_of(0, 1)) == sorted(tuple(t.tokens.tolist()) for group in kept for t in group)
    assert all(len(b.tokens) == 1 for b in batches(kept, 1, 0, 0))


def test_files_come_in_another_order_in_each_epoch() -> None:
    """Far from that on the disk: answers to like prompts, which often stand together, would be learned one after the other."""
    groups = [[Text(torch.tensor([number]), torch.zeros(1, 2), 0)] for number in range(40)]
    orders = [[int(batch.tokens[0, 0]) for batch in batches(groups, 1, 0, epoch)] for epoch in range(2)]
    assert sorted(orders[0]) == list(range(40)) and orders[0] != orders[1]
    for order in orders:
        assert max(abs(number - place) for place, number in enumerate(order)) > 8


def test_batches_to_learn_prompts_from(kept: KeptTexts) -> None:
    answers, all_tokens = (list(batches(kept, 60, 0, 0, learn_prompts=choice)) for choice in (False, True))
    assert all(batch.prompt_lengths.all() for batch in answers)
    assert not any(batch.prompt_lengths.any() for batch in all_tokens)
    sums = [sum(int(batch.tokens.sum()) for batch in found) for found in (answers, all_tokens)]
    assert sums[0] == sums[1] > 0


def test_frequent_tokens() -> None:
    answers = [Answer([7] * 20 + [9] * 11, [3, 3, 3, 5]), Answer([8], [5, 2, 1])]
    assert frequent_tokens(answers, 12, 1).tolist() == [3]  # what is said counts ten times what is only asked
    assert frequent_tokens(answers, 12, 4).tolist() == [3, 5, 7, 9]  # 3, 2, 2.0 and 1.1 times
    assert frequent_tokens(answers, 12, 6).tolist() == [1, 2, 3, 5, 7, 9]
    assert frequent_tokens(answers, 12, 100).tolist() == list(range(12))
    assert frequent_tokens(answers, 12, 9, known=torch.tensor([0, 11, 9])).tolist() == [0, 1, 2, 3, 5, 7, 8, 9, 11]
