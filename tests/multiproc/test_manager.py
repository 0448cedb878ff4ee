"""DDPManager as a person with a loop of their own uses it."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any, Literal, cast, get_overloads

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from drumline import DDPManager, WatchConfig
from drumline.base.errors import ConfigError, PreflightError, UsageError
from drumline.parallel.scripts import script_runner
from drumline.rank import collectives, group
from drumline.training.manager import RunManager
from tests.jobs import NO_SIDECAR, Points
from tests.ranks import RanksFailed, run_ranks


def test_alone_the_same_script_runs_on_one_process() -> None:
    ddp = DDPManager()
    assert ddp.setup() is False
    assert (ddp.rank, ddp.world_size, ddp.get_local_rank(), ddp.is_main_process()) == (
        0,
        1,
        0,
        True,
    )
    assert ddp.device.type in ("cpu", "cuda")
    model = nn.Linear(2, 2)
    assert ddp.unwrap(ddp.wrap(model)) is model
    with pytest.raises(TypeError, match="has no argument 'find_unused_paramters'"):
        ddp.wrap(model, find_unused_paramters=True)
    ddp.barrier()
    assert float(ddp.sum(torch.tensor(2.0, device=ddp.device))) == 2.0
    ddp.cleanup()
    assert not dist.is_initialized()


def test_every_public_name_is_for_scripts() -> None:
    assert {name for name in dir(DDPManager()) if not name.startswith("_")} == {
        *(
            "setup",
            "cleanup",
            "rank",
            "world_size",
            "local_world_size",
            "get_local_rank",
            "is_main_process",
        ),
        *("host", "device", "backend", "is_restart", "place", "barrier", "sum"),
        *("wrap", "unwrap", "no_sync", "loader", "checkpoint"),
    }


def test_a_type_checker_knows_what_a_loader_is() -> None:
    found = {
        str(overload.__annotations__["train"]): overload.__annotations__["return"]
        for overload in get_overloads(DDPManager.loader)
    }
    assert found["Literal[True]"] == "Loader"
    assert found["Literal[False]"] == "EvaluationLoader"


def test_torchs_own_timeout_comes_after_the_watchs_patience() -> None:
    assert RunManager(watch=WatchConfig(hang_s=900)).train_timeout_s == 990
    assert RunManager(train_timeout_s=3600).train_timeout_s == 3600
    assert RunManager(train_timeout_s=5, watch=WatchConfig(sidecar="off")).train_timeout_s == 5


@pytest.mark.parametrize("sidecar", ["off", "auto", "on"])
def test_nothing_is_made_for_a_watchdog_that_is_not_wanted(
    sidecar: Literal["off", "auto", "on"],
) -> None:
    with RunManager().connection.node_watch(
        WatchConfig(sidecar=sidecar), run=None, environment={}
    ) as node:
        assert (node is not None) == (sidecar == "on"), "auto: there is a single rank"


def test_settings_of_the_watch_are_checked_before_the_rendezvous() -> None:
    with pytest.raises(ConfigError) as caught:
        DDPManager(watch=WatchConfig(on_hang="restrat", hang_s=0))  # type: ignore[arg-type]
    assert [
        line.partition(" = ")[0].strip(" -") for line in str(caught.value).splitlines()[1:3]
    ] == ["WatchConfig: watch.on_hang", "WatchConfig: watch.hang_s"]


def test_an_address_that_cannot_serve_metrics_is_refused_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        DDPManager(prometheus="node-a:9464")
    assert caught.value.what == (
        "prometheus is 'node-a:9464'; it takes PORT or ADDRESS:PORT, with an IP address of this host: "
        "9464, 10.0.0.5:9464, [::1]:9464"
    )


def test_it_must_be_set_up_once_and_before_use() -> None:
    ddp = DDPManager()
    with pytest.raises(UsageError, match="not set up yet\n  try: use `with DDPManager"):
        _ = ddp.device
    ddp.setup()
    with pytest.raises(UsageError, match="setup\\(\\) was called twice"):
        ddp.setup()
    ddp.cleanup()
    ddp.setup()
    ddp.cleanup()


def live_through_it() -> dict[str, object]:
    ddp = DDPManager(seed=3)
    joined = ddp.setup()
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5))
    initial = model[0].weight.detach().clone()
    wrapped = ddp.wrap(
        model,
        bucket_cap_mb=1,
        gradient_as_bucket_view=True,
        find_unused_parameters=True,
        static_graph=False,
    )
    noise = float(torch.rand(()))
    ddp.barrier()
    facts = {
        "joined": joined,
        "rank": (ddp.rank, ddp.get_local_rank(), ddp.world_size, ddp.is_main_process()),
        "wrapped": isinstance(wrapped, DistributedDataParallel),
        "initial": initial.tolist(),
        "noise": noise,
        "backend": ddp.backend,
    }
    ddp.cleanup()
    facts["group is gone"] = not dist.is_initialized()
    return facts


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_share_initial_weights_but_not_later_randomness(world_size: int) -> None:
    results = run_ranks(world_size, live_through_it)
    for rank, facts in enumerate(results):
        assert facts["joined"] is True
        assert facts["rank"] == (rank, rank, world_size, rank == 0)
        assert facts["wrapped"] is True
        assert facts["backend"] == "gloo"
        assert facts["group is gone"] is True
        assert facts["initial"] == results[0]["initial"]
    assert len({facts["noise"] for facts in results}) == world_size


def use_of_a_wrapped_model() -> dict[str, object]:
    """What a script sees of it, which must not depend on how many ranks there are."""
    with DDPManager(watch=NO_SIDECAR) as ddp:
        own = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        model: Any = ddp.wrap(own)
        inputs = torch.ones(4, 2)
        with model.no_sync():
            model(inputs).sum().backward()
        model(inputs).sum().backward()
        twice = own[2].bias.grad.clone()
        saved = model.state_dict()
        with torch.no_grad():
            own[0].weight.zero_()
        missing = model.load_state_dict(saved)
        return {
            "names": list(saved),
            "own names": list(ddp.unwrap(model).state_dict()),
            "parameters": [name for name, _ in model.named_parameters()],
            "own": model.module is own and ddp.unwrap(model) is own and ddp.unwrap(own) is own,
            "gradient of two passes": twice.tolist(),
            "loaded": (str(missing), torch.equal(own[0].weight, saved["module.0.weight"])),
        }


def test_a_wrapped_model_is_used_and_saved_in_the_same_way_on_any_number_of_ranks() -> None:
    alone = use_of_a_wrapped_model()
    assert alone["names"] == [f"module.{name}" for name in cast(list[str], alone["own names"])]
    assert alone["gradient of two passes"] == [8.0]
    assert alone["own"] is True
    for facts in [*run_ranks(1, use_of_a_wrapped_model), *run_ranks(2, use_of_a_wrapped_model)]:
        assert facts == alone


def average_gradient(length: int, batch_size: int, accumulate: int) -> list[list[float]]:
    """The gradient of each step in a loop of the user's own, with an uneven last batch; nothing is
    reduced before the last micro-batch of a step."""
    with DDPManager(watch=NO_SIDECAR) as ddp:
        model = ddp.wrap(nn.Linear(6, 2).double())
        loader = ddp.loader(Points(length), batch_size=batch_size, accumulate=accumulate)
        gradients = []
        began = collectives.collective_counter()()
        for inputs, targets in loader:
            with ddp.no_sync(model, unless=loader.is_last_micro_batch):
                (functional.cross_entropy(model(inputs), targets) * loader.scale).backward()
            if loader.is_last_micro_batch:
                gradients.append(next(model.parameters()).grad.flatten().tolist())  # type: ignore[union-attr]
                model.zero_grad()
            elif not gradients:
                assert collectives.collective_counter()() == began
        seen = torch.zeros(length, dtype=torch.float64)
        for inputs, _ in ddp.loader(Points(length), batch_size=2, train=False):
            for row in inputs:
                seen[(Points(length).inputs == row).all(1)] += 1
        assert ddp.sum(seen).tolist() == [1.0] * length
        return gradients


def average_gradients(*cases: tuple[int, int, int]) -> list[list[list[float]]]:
    return [average_gradient(*case) for case in cases]


def test_a_users_own_loop_gets_the_gradient_of_the_whole_batch() -> None:
    """Also when the last batch has fewer samples than there are ranks."""
    (alone,) = run_ranks(1, average_gradients, (9, 4, 1), (11, 4, 1), (29, 12, 1))
    for gradients in run_ranks(3, average_gradients, (9, 4, 1), (11, 4, 1), (29, 12, 2)):
        for found, expected in zip(gradients, alone, strict=True):
            torch.testing.assert_close(
                torch.tensor(found), torch.tensor(expected), rtol=1e-9, atol=1e-12
            )


class Collect(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def warn_about(batch_size: int, model_first: bool) -> list[str]:
    handler = Collect()
    logging.getLogger("drumline").addHandler(handler)
    with DDPManager(watch=NO_SIDECAR) as ddp:
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        if model_first:
            ddp.wrap(model)
        ddp.loader(Points(), batch_size=batch_size)
        if not model_first:
            ddp.wrap(model)
    logging.getLogger("drumline").removeHandler(handler)
    return handler.texts


def warn_about_each(*cases: tuple[int, bool]) -> list[list[str]]:
    return [warn_about(*case) for case in cases]


def test_batchnorm_with_few_samples_is_warned_about_once() -> None:
    rank_0, rank_1 = run_ranks(2, warn_about_each, (30, True), (32, True), (30, False), (32, False))
    assert [len(texts) for texts in rank_0] == [1, 0, 1, 0]
    for warning in (rank_0[0][0], rank_0[2][0]):
        assert "BatchNorm (1) sees 15 samples at a time on each rank, fewer than 16" in warning
        assert "Use --dist.sync_batchnorm" in warning
    assert rank_1 == [[]] * 4


def sync_on_cpu() -> str:
    with DDPManager(device="cpu") as ddp:
        with pytest.raises(UsageError) as caught:
            ddp.wrap(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), sync_batchnorm=True)
        return str(caught.value)


def test_sync_batchnorm_on_the_cpu_is_refused_in_words() -> None:
    assert (
        "torch's SyncBatchNorm refuses CPU tensors\n  try: leave it off"
        in run_ranks(1, sync_on_cpu)[0]
    )


def differ() -> str:
    with DDPManager(watch=NO_SIDECAR) as ddp:
        torch.manual_seed(ddp.rank)
        with pytest.raises(PreflightError) as caught:
            ddp.wrap(nn.Linear(2, 2))
        return str(caught.value)


def test_models_that_start_differently_are_refused() -> None:
    for message in run_ranks(2, differ):
        assert (
            "ranks differ in the initial weights; first difference in weight: rank 0 (" in message
        )
        assert "try: build the model after the seed is set" in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda"}, "local rank 0 has no GPU of its own: torch sees 0 on this host"),
        (
            {"device": "cpu", "backend": "nccl"},
            "dist.backend is 'nccl', but this rank computes on the CPU",
        ),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_impossible_devices_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(RanksFailed, match=message):
        run_ranks(1, set_up_with, settings)


def set_up_with(settings: dict[str, str]) -> None:
    DDPManager(**settings).setup()  # type: ignore[arg-type]


def one_raises() -> None:
    with DDPManager() as ddp:
        if ddp.rank == 1:
            raise ValueError("boom")
        ddp.barrier()


def test_the_first_failure_keeps_its_traceback_and_the_others_point_to_it() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, one_raises)
    errors = caught.value.errors
    assert "ValueError: boom\n[rank 1 on " in errors[1]
    assert "SystemExit: drumline: rank 0 on " in errors[0]
    assert "stopped because rank 1 on " in errors[0]
    assert errors[0].rstrip().endswith(" crashed: ValueError: boom")


class Partly(nn.Module):
    """Uses one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(2, 2)
        self.spare = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.used(inputs))


def use_a_part() -> None:
    with DDPManager(watch=NO_SIDECAR) as ddp:
        model = ddp.wrap(Partly())
        ddp.wrap(nn.Linear(2, 2))
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()


def fail_with_a_part() -> tuple[list[str], str | None]:
    with pytest.raises(RuntimeError) as caught:
        use_a_part()
    return caught.value.__notes__, script_runner._unused_parameters(caught.value)


def test_parameters_that_a_loop_does_not_use_are_named() -> None:
    [(notes, of_script)] = run_ranks(1, fail_with_a_part)
    assert notes[0] == of_script
    assert notes[0] == (
        "the step before did not use spare.weight and spare.bias: use them in every step, freeze them "
        "(requires_grad=False), or give DDP find_unused_parameters=True"
    )


def leave_with_an_open_group() -> bool:
    with DDPManager() as ddp, pytest.raises(KeyError), DDPGuard(ddp):
        raise KeyError("x")
    return not dist.is_initialized()


class DDPGuard:
    def __init__(self, ddp: DDPManager) -> None:
        self.ddp = ddp

    def __enter__(self) -> None:
        assert dist.is_initialized()

    def __exit__(self, *error: object) -> None:
        self.ddp.cleanup(broken=True)


def test_a_group_that_was_taken_down_early_is_no_problem() -> None:
    assert run_ranks(1, leave_with_an_open_group) == [True]
    assert "RANK" not in os.environ


def leave_with_an_error(broken: bool) -> tuple[str, list[str]]:
    said = _logged()
    destroy = dist.destroy_process_group

    def fail() -> None:
        destroy()
        raise RuntimeError("NCCL error: unhandled cuda error")

    dist.destroy_process_group = fail  # type: ignore[assignment]
    ddp = DDPManager()
    ddp.setup()
    try:
        return str(ddp.cleanup(broken=broken)), said
    except RuntimeError as error:
        return f"raised {error}", said


@pytest.mark.parametrize("broken", [False, True])
def test_an_error_of_the_teardown_is_raised_or_of_a_broken_group_logged(broken: bool) -> None:
    told = (
        "the broken process group was not destroyed: RuntimeError: NCCL error: unhandled cuda error"
    )
    expected = ("True", [told]) if broken else ("raised NCCL error: unhandled cuda error", [])
    assert run_ranks(1, leave_with_an_error, broken) == [expected]


def _logged() -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("drumline").addHandler(handler)
    return messages


def leave_slowly() -> tuple[bool, list[str]]:
    """What blocks is put in by hand: without a GPU no group has a reason of its own to."""
    said = _logged()
    destroy = dist.destroy_process_group
    may_end = threading.Event()
    group.LEAVE_S = 0.2
    dist.destroy_process_group = lambda: (may_end.wait(), destroy())  # type: ignore[assignment]
    ddp = DDPManager()
    ddp.setup()
    in_time = ddp.cleanup()
    may_end.set()
    return in_time, said


def test_a_group_that_is_not_destroyed_in_time_is_left_behind_with_a_sentence() -> None:
    for rank, (in_time, said) in enumerate(run_ranks(2, leave_slowly)):
        assert in_time is False
        assert [text.partition(": ")[2] for text in said if f"rank {rank}" in text] == [
            "the process group was not destroyed within 0.2 s. Try: release CUDA graphs with collectives in them "
            "(CUDAGraph.reset) before you leave DDPManager"
        ]
