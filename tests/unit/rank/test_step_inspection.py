"""What a step computes in vain is seen by the calls of its modules."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack as get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from drumline.rank.profiled import step_inspection
from drumline.rank.profiled.step_inspection import StepInspection, padding_of
from drumline.runs.profile_files import WastedWork

SAMPLES = torch.rand(16, 32)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 64), nn.Tanh())
        self.head = nn.Linear(64, 4)
        self.spare = nn.Linear(64, 2000)

    def forward(self, samples: Tensor) -> Tensor:
        return self.head(self.encoder(samples))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """A test before these may have compiled something in this process; a compiled step is left alone."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        dynamo.counters["frames"].clear()


def inspected(
    model: nn.Module, step: Callable[[], Tensor], *, warm_up: bool = True
) -> dict[str, WastedWork]:
    """What one step wastes, by kind."""
    if warm_up:
        step().backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    inspection = StepInspection([model])
    inspection.start()
    step().backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD([*model.parameters(), torch.zeros(1)], lr=0.0).step()
    model.zero_grad()
    return {work.kind: work for work in inspection.stop()}


def test_a_model_of_which_all_is_used_wastes_nothing() -> None:
    model = Body()
    with torch.no_grad():
        before = model(SAMPLES)
    assert inspected(model, lambda: model(SAMPLES).sum()) == {}
    assert not nn.modules.module._global_forward_hooks
    assert not model._forward_pre_hooks
    torch.testing.assert_close(model(SAMPLES).detach(), before)


def test_each_micro_batch_is_a_pass_and_an_evaluation_is_none() -> None:
    model = Body()
    inspection = StepInspection([model])
    inspection.start()
    for _ in range(3):
        model(SAMPLES).sum().backward()
    with torch.no_grad():
        model(SAMPLES)
    inspection.stop()
    assert inspection.num_passes == 3
    assert StepInspection([model]).num_passes is None, "it has not looked"


def test_the_same_input_again_is_named_with_its_line() -> None:
    model = Body()

    def step() -> Tensor:
        parts = [model.encoder(SAMPLES) for _ in range(4)]
        return model.head(torch.stack(parts).sum(0)).sum()  # type: ignore[no-any-return]

    work = inspected(model, step)["repeated_work"]
    assert work.module == "encoder"
    assert 0 < work.part < 1
    assert work.line is not None
    assert work.line.source == "parts = [model.encoder(SAMPLES) for _ in range(4)]"


def test_equal_numbers_and_equal_samples_are_the_same_input() -> None:
    model = Body()
    copied = inspected(model, lambda: model(SAMPLES).sum() + model(SAMPLES.clone()).sum())
    assert 0 < copied["repeated_work"].part < 1
    samples = SAMPLES[:4].repeat_interleave(4, 0)
    repeated = inspected(model, lambda: model(samples).sum())
    assert repeated["repeated_work"].part == pytest.approx(0.75)
    assert repeated["repeated_work"].module == "Body"
    shuffled = SAMPLES.flip(0)
    assert inspected(model, lambda: model(SAMPLES).sum() + model(shuffled).sum()) == {}


def test_samples_that_differ_in_another_input_are_not_the_same() -> None:
    class Pairs(nn.Module):
        def forward(self, samples: Tensor, times: Tensor, scale: float) -> Tensor:
            return samples * scale + times[:, None]

    pairs = Pairs()
    model = nn.Sequential(nn.Linear(32, 32), pairs)
    same = SAMPLES[:2].repeat(8, 1)

    def step() -> Tensor:
        hidden = model[0](SAMPLES)
        parts = [pairs(same, torch.arange(16.0), scale) for scale in (1.0, 2.0)]
        return hidden.sum() + torch.stack(parts).sum()  # type: ignore[no-any-return]

    assert inspected(model, step) == {}


def test_other_values_and_evaluations_are_not_the_same_input_again() -> None:
    model = Body()

    def step() -> Tensor:
        with torch.no_grad():
            model(SAMPLES)
        return model(SAMPLES).sum() + model(SAMPLES + 1).sum()  # type: ignore[no-any-return]

    assert inspected(model, step) == {}


def test_an_output_that_the_loss_does_not_use() -> None:
    model = Body()

    def unused() -> Tensor:
        hidden = model.encoder(SAMPLES)
        model.spare(hidden)
        return model.head(hidden).sum()

    def of_no_weight() -> Tensor:
        hidden = model.encoder(SAMPLES)
        return model.head(hidden).sum() + 0.0 * model.spare(hidden).sum()

    assert inspected(model, unused)["unused_output"].module == "spare"
    assert inspected(model, of_no_weight)["zero_gradients"].module == "spare"


def test_rows_that_the_loss_ignores_have_no_gradient() -> None:
    model = Body()
    targets = torch.full((16,), -100)
    targets[:4] = 1

    def step() -> Tensor:
        scores = model.spare(model.encoder(SAMPLES).detach())
        return nn.functional.cross_entropy(scores, targets) + model(SAMPLES).sum()

    work = inspected(model, step)["zero_gradients"]
    assert (work.module, work.kind) == ("spare", "zero_gradients")


def test_rows_of_which_a_maximum_takes_numbers_are_needed() -> None:
    model = nn.Linear(32, 8)
    points = torch.rand(4, 100, 32)
    assert inspected(model, lambda: model(points).amax(1).sum()) == {}
    rows = inspected(model, lambda: model(points)[:, :20].sum())
    assert rows["zero_gradients"].part == pytest.approx(0.8)


def test_checkpointed_modules_are_computed_again() -> None:
    model = Body()

    def step() -> Tensor:
        hidden = checkpoint(model.encoder, SAMPLES.clone().requires_grad_(), use_reentrant=False)
        return model.head(hidden).sum()  # type: ignore[no-any-return]

    works = inspected(model, step)
    assert list(works) == ["recomputation"]
    assert works["recomputation"].module == "encoder"


@pytest.mark.parametrize(
    "product",
    [
        lambda left, right: nn.functional.linear(left, right.T),
        lambda left, right: left @ right,
        lambda left, right: left.matmul(right),
        lambda left, right: torch.mm(left, right),
        lambda left, right: torch.einsum("ij,jk->ik", left, right),
        lambda left, right: torch.bmm(left[None], right[None]),
    ],
)
def test_numbers_that_take_long_are_seen_in_any_product(
    product: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """The product is in a module of the user's, and the module has the name."""

    class Layer(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            return product(rows, table.to(rows.dtype))

    model = nn.Sequential(Layer())
    table = torch.rand(512, 8, requires_grad=True)
    rows = nn.functional.one_hot(torch.arange(16), 512).float()
    kinds = {
        "zeros": rows,
        "float64": rows.double(),
        "denormals": torch.rand(16, 512) * 1e-40,
    }
    for kind, samples in kinds.items():
        work = inspected(model, lambda samples=samples: model(samples).sum())  # type: ignore[misc]
        assert work.keys() - {"padding"} == {kind}
        assert (work[kind].module, work[kind].part > 0) == ("0", True)
    for samples in (torch.rand(16, 512), torch.zeros(16, 512)):
        assert inspected(model, lambda samples=samples: model(samples).sum()).keys() <= {"padding"}  # type: ignore[misc]


def test_gradients_of_numbers_that_take_long() -> None:
    model = Body()
    work = inspected(model, lambda: (model(SAMPLES) * 1e-40).sum())
    assert work["denormals"].module == "Body"


def test_samples_one_by_one() -> None:
    wide = nn.Linear(512, 8)
    rows = nn.functional.one_hot(torch.arange(16), 512).float()
    assert inspected(wide, lambda: wide(rows).sum())["zeros"].part > 0
    assert not get_current_function_mode_stack()

    model = Body()
    one_by_one = inspected(model, lambda: torch.cat([model(row[None]) for row in SAMPLES]).sum())
    assert one_by_one["single_samples"].part == pytest.approx(1)
    in_pairs = inspected(model, lambda: torch.cat([model(pair) for pair in SAMPLES.split(2)]).sum())
    assert in_pairs["single_samples"].part == pytest.approx(1)
    layer = model.encoder
    steps = inspected(model, lambda: torch.cat([layer(pair) for pair in SAMPLES.split(2)]).sum())
    assert steps == {}, "a layer may be called for each step of a sequence"


def test_half_precision_on_a_cpu_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Body()

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(SAMPLES).float().sum()  # type: ignore[no-any-return]

    monkeypatch.setattr(step_inspection, "has_fast_half", lambda: False)
    assert inspected(model, step)["half_precision"].part > 0
    monkeypatch.setattr(step_inspection, "has_fast_half", lambda: True)
    assert inspected(model, step) == {}


def test_the_gradient_of_an_embedding_is_mostly_zeros() -> None:
    model = nn.Sequential(nn.Embedding(1000, 4), nn.Linear(4, 1))
    words = torch.arange(10).reshape(2, 5)
    work = inspected(model, lambda: model(words).sum())["sparse_gradients"]
    assert work.module == "0"
    assert work.part == pytest.approx(0.99 * 16_000 / 16_020)


def test_a_sparse_gradient_has_no_zeros() -> None:
    model = nn.Sequential(nn.Embedding(1000, 4, sparse=True), nn.Linear(4, 1))
    words = torch.arange(10).reshape(2, 5)
    assert inspected(model, lambda: model(words).sum()) == {}
    model.append(nn.Embedding(1000, 4))
    both = inspected(model, lambda: model[:2](words).sum() + model[2](words).sum())
    assert both.keys() == {"sparse_gradients"}


def test_padding_is_the_same_from_some_place_to_the_end() -> None:
    words = torch.randint(1, 9, (4, 20))
    words[:, 10:] = 0
    words[:, 9] = 5
    assert padding_of([words]) == pytest.approx(0.5)
    sounds = torch.rand(4, 3, 20)
    assert padding_of([sounds]) == 0
    sounds[:, :, 15:] = 0
    assert padding_of([sounds]) == pytest.approx(0.25)
    segments = (torch.arange(20) > 4).long().expand(4, 20)
    assert padding_of([words, segments]) == pytest.approx(0.5), "other lengths are no padding"
    assert padding_of([torch.randint(1, 9, (4, 20)), segments]) <= 0.1
    assert padding_of([torch.ones(4, 20), torch.zeros(4, 20), torch.rand(4)]) == 0


def test_a_batch_that_is_mostly_padding_is_seen() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 1))
    words = torch.randint(1, 9, (4, 20))
    words[:, 5:] = 0
    assert inspected(model, lambda: model(words).sum())["padding"].part >= 0.7
