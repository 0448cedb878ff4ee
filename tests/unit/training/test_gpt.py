"""GPT: causal, tied, initialised by depth, and able to learn."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from drumline.base.errors import UsageError
from drumline.training.tasks.built_in import GPT


def small(**changes: object) -> GPT:
    torch.manual_seed(0)
    settings = {"vocab_size": 11, "context": 8, "layers": 2, "heads": 2, "width": 16, **changes}
    return GPT(**settings)  # type: ignore[arg-type]


def test_logits_for_every_token_and_for_shorter_samples() -> None:
    model = small()

    assert model(torch.zeros(3, 8, dtype=torch.long)).shape == (3, 8, 11)
    assert model(torch.zeros(3, 5, dtype=torch.int32)).shape == (3, 5, 11)


def test_a_token_sees_itself_and_the_past_only() -> None:
    model = small().eval()
    tokens = torch.randint(0, 11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11

    before = model(tokens)
    after = model(changed)

    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(dim=-1).all()


def test_positions_matter() -> None:
    model = small().eval()
    logits = model(torch.full((1, 8), 3))

    assert not torch.allclose(logits[0, 0], logits[0, 7])


def test_the_output_layer_is_the_embedding_so_no_tensor_is_saved_twice() -> None:
    model = small()
    pointers = [tensor.data_ptr() for tensor in model.state_dict().values()]

    assert len(set(pointers)) == len(pointers)
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    gradient = model.token_embedding.weight.grad
    assert gradient is not None
    # token 7 is not in the input: this came through the output
    assert gradient[7].abs().sum() > 0


def test_no_biases() -> None:
    assert not [name for name, _ in small().named_parameters() if name.endswith("bias")]


def test_residual_branches_start_smaller_the_deeper_the_model() -> None:
    model = small(layers=8, width=64)
    spread = {name: float(parameter.detach().std()) for name, parameter in model.named_parameters()}

    for index in range(8):
        for branch in ("attention.out", "mlp_out"):
            assert spread[f"blocks.{index}.{branch}.weight"] == pytest.approx(
                0.02 / math.sqrt(16), rel=0.1
            )
        assert spread[f"blocks.{index}.mlp_in.weight"] == pytest.approx(0.02, rel=0.1)
    assert spread["token_embedding.weight"] == pytest.approx(0.02, rel=0.1)


def test_an_untrained_model_knows_nothing() -> None:
    logits = small()(torch.randint(0, 11, (16, 8)))
    loss = functional.cross_entropy(logits.detach().flatten(0, 1), torch.randint(0, 11, (128,)))

    assert float(loss) == pytest.approx(math.log(11), abs=0.05)


def test_it_learns_a_sequence() -> None:
    model = small()
    # what follows 1 and 5 depends on the place
    text = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5]).unsqueeze(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    for _ in range(60):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(text[:, :-1])[0], text[0, 1:])
        loss.backward()
        optimizer.step()

    assert float(loss.detach()) < 0.1


def test_a_sample_longer_than_the_context_is_refused() -> None:
    with pytest.raises(UsageError, match=r"has 9 tokens, but the model's context is 8") as caught:
        small()(torch.zeros(1, 9, dtype=torch.long))

    assert "--model.context to 9 or more" in str(caught.value)


@pytest.mark.parametrize("tokens", [torch.zeros(2, 4), torch.zeros(4, dtype=torch.long)])
def test_what_is_not_a_batch_of_tokens_is_refused(tokens: torch.Tensor) -> None:
    with pytest.raises(UsageError, match=r"takes integer tokens of shape \[N, T\], got torch\."):
        small()(tokens)
