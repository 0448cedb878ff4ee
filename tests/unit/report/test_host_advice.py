"""Advice about what the host does: each cost is named with its line or its setting, the largest
first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from drumline.report.profile.advice import advise
from drumline.report.profile.bottleneck import Advice
from drumline.runs.profile_files import GRADIENTS, SAMPLER, OptimizerFacts, ProcessUse, WorkerUse
from drumline.runs.profile_result import (
    BusyThread,
    Collections,
    HostSync,
    Kernel,
    LineCost,
    ProfileResult,
    WorkerStarts,
)
from tests.unit.report.test_advice import STEP_S, as_script, profile


def line(phase: str, seconds: float, *, cpu: float = 0.0, own: float = 1.0) -> LineCost:
    """`cpu`, `own`: of its time."""
    return LineCost(
        phase=phase,
        source="task.py:7",
        function="f",
        text="work()",
        seconds=seconds,
        own_s=seconds * own,
        cpu_s=seconds * own * cpu,
    )


def sampled(phases_s: dict[str, float], *lines: LineCost, **changes: Any) -> ProfileResult:
    parts = changes.pop("parts", {"gaps": 0.05})
    return profile(parts=parts, phases_s=phases_s, lines=lines, **changes)


def only(result: ProfileResult) -> Advice:
    (advice,) = advise(result)
    return advice


def test_python_in_the_step_is_named_by_its_line() -> None:
    computing = only(sampled({"forward": 0.09}, line("forward", 0.03, cpu=1.0)))
    assert computing.bottleneck == "python"
    assert computing.text == (
        "your code runs Python 30 ms of each 100 ms step in forward, mostly at task.py:7, in f: work()"
    )
    assert computing.remedy.startswith("use operations of torch on whole tensors")
    waiting = only(sampled({"rest": 0.09}, line("rest", 0.03)))
    assert waiting.text.startswith("your code waits 30 ms of each 100 ms step between the phases")
    assert advise(sampled({"forward": 0.09}, line("forward", 0.05, own=0.02))) == (), (
        "what torch computes for the line is the model"
    )
    assert advise(sampled({"forward": 0.09}, line("forward", 0.05, cpu=1.0)))
    assert advise(sampled({"forward": 0.09}, line("forward", 0.005, cpu=1.0))) == ()
    looping = replace(line("forward", 0.05, own=0.2, cpu=1.0), operations=64.0)
    assert only(sampled({"forward": 0.09}, looping)).cost_s == 0.05, "with what it calls in a loop"
    both = only(sampled({"forward": 0.09}, replace(looping, seconds=0.025, backward_s=0.02)))
    assert both.cost_s == pytest.approx(0.025 + 0.02)
    assert "in forward, in 64 short operations and their backward pass, mostly at" in both.text
    assert advise(sampled({"forward": 0.09}, replace(looping, operations=20.0, own_s=0.005))) == ()
    of_micro_batches = sampled({"forward": 0.09}, replace(looping, own_s=0.01), num_passes=8)
    assert advise(of_micro_batches) == (), "8 operations for each micro-batch"


def test_waits_for_the_device_are_no_python_of_a_loop() -> None:
    looping = replace(line("forward", 0.08, own=0.2, cpu=1.0), operations=640.0)
    waits = (
        HostSync(source=looping.source, call="cudaStreamSynchronize", seconds=0.06, calls=128.0),
    )
    parts = {"gaps": 0.02, "host_sync": 0.06}
    result = sampled({"forward": 0.09}, looping, parts=parts, syncs=waits, device="NVIDIA H200")
    assert [(advice.bottleneck, round(advice.cost_s, 3)) for advice in advise(result)] == [
        ("host_sync", 0.08),
        ("python", 0.02),
    ]


def in_library(phase: str, operations: float, *, host: float = 0.4) -> LineCost:
    """A line for which torch's Python calls operations; `host`: of its time, without any."""
    called = line(phase, 0.05, own=0.0)
    return replace(called, host_s=host * called.seconds, library_operations=operations)


def test_operations_that_a_library_calls_for_a_line_in_a_loop_are_its_cost() -> None:
    few = optimizer(num_tensors=20, is_fused=True)
    looping = in_library("forward", 400)
    advice = only(sampled({"forward": 0.09}, looping, optimizer=few))
    assert (advice.bottleneck, advice.cost_s) == ("python", 0.05)
    assert "in 400 short operations, mostly at task.py:7" in advice.text
    generated = replace(looping, seconds=0.04, caller="train.py:50")
    result = sampled({"forward": 0.09}, looping, optimizer=few, undifferentiated=(generated,))
    assert only(result).bottleneck == "no_gradients"


@pytest.mark.parametrize(
    ("phase", "num_tensors", "host", "operations"),
    [
        ("forward", 200, 0.4, 0),
        ("forward", 200, 0.4, 150),
        ("forward", 20, 0.05, 0),
        ("backward", 20, 0.4, 0),
    ],
)
def test_a_line_that_runs_the_layers_of_a_model_is_no_loop(
    phase: str, num_tensors: int, host: float, operations: int
) -> None:
    """`operations`: between the layers, as their sum."""
    layers = replace(in_library(phase, 400, host=host), operations=operations)
    facts = optimizer(num_tensors=num_tensors, num_bytes=100 << 20, is_fused=True)
    assert advise(sampled({phase: 0.09}, layers, optimizer=facts)) == ()


def test_a_line_that_all_ranks_run_is_named_beside_the_slowest_rank() -> None:
    clipping = line("rest", 0.06, cpu=1.0)
    longer = line("rest", 0.09, cpu=1.0)
    by_rank = [{"waiting_for_rank": 0.02, "gaps": 0.06}, {"gaps": 0.09}]
    result = profile(critical=(0, 10), by_rank=by_rank, phases_s={"rest": 0.09})
    ranks = [
        replace(rank, lines=(rank_line,))
        for rank, rank_line in zip(result.ranks, (clipping, longer), strict=True)
    ]
    slow = replace(result, ranks=tuple(ranks), lines=(line("rest", 0.075, cpu=1.0),))
    assert [advice.bottleneck for advice in advise(slow)] == ["python", "slow_rank"]
    ranks = [replace(result.ranks[0], lines=()), replace(result.ranks[1], lines=(clipping,))]
    alone = replace(slow, ranks=tuple(ranks), lines=(line("rest", 0.03, cpu=1.0),))
    assert [advice.bottleneck for advice in advise(alone)] == ["slow_rank"], (
        "its own line is in that advice"
    )


def test_what_has_no_gradient_is_named_with_the_line_that_runs_it() -> None:
    metric = replace(line("forward", 0.03, own=0.0), caller="train.py:50")
    advice = only(sampled({"forward": 0.09}, undifferentiated=(metric,)))
    assert advice.text == (
        "your code computes 30 ms of each 100 ms step without a gradient, mostly at task.py:7, in f: work(), which "
        "train.py:50 runs"
    )
    short = line("forward", 0.01, own=0.0)
    assert advise(sampled({"forward": 0.09}, undifferentiated=(short,))) == ()


def test_workers_that_start_in_every_epoch_stay() -> None:
    starts = WorkerStarts(num_steps=3, seconds=0.029)
    result = sampled({"data": 0.03}, parts={"data": 0.03}, worker_starts=starts)
    assert only(result).settings == {"data.persistent_workers": "true"}
    assert "start again in 3 of 10 steps" in only(result).text
    script = only(as_script(result))
    assert (script.settings, script.remedy) == (
        None,
        "persistent_workers=True of the DataLoader, which is made once and not in each epoch",
    )


def test_what_a_batch_takes_besides_the_start_of_workers_has_advice() -> None:
    starts = WorkerStarts(num_steps=3, seconds=0.02)
    result = sampled({"data": 0.06}, parts={"data": 0.06}, worker_starts=starts)
    costs_s = {advice.bottleneck: advice.cost_s for advice in advise(result)}
    assert costs_s == {"data": pytest.approx(0.04), "worker_starts": 0.02}


@pytest.mark.parametrize(("phase", "bottleneck"), [("on_device", "on_device"), ("hook A", "hook")])
def test_on_device_and_hooks_count_with_what_they_compute(phase: str, bottleneck: str) -> None:
    advice = only(sampled({phase: 0.03, "forward": 0.07}, line(phase, 0.03, own=0.1)))
    assert (advice.bottleneck, advice.cost_s) == (bottleneck, 0.03)
    assert "task.py:7" in advice.text
    assert advise(sampled({phase: 0.02}, line("forward", 0.02, own=0.0))) == ()
    assert advise(sampled({phase: 0.009}, line(phase, 0.009))) == (), "it may be needed"


def test_the_largest_cost_is_first_also_where_only_a_line_is_named() -> None:
    lines = (line("hook A", 0.015), line("forward", 0.03), line("data", 0.02))
    result = sampled({"hook A": 0.015, "forward": 0.05, "data": 0.02}, *lines, parts={"data": 0.02})
    assert [advice.bottleneck for advice in advise(result)] == ["python", "data", "hook"]


def test_slow_samples_are_named_by_their_line() -> None:
    waits = sampled({"data": 0.06}, line("data", 0.06), parts={"data": 0.06})
    assert "it waits mostly at task.py:7, in f: work()" in only(waits).text
    assert only(waits).settings == {"data.workers": "2"}
    script = as_script(replace(waits, cores_per_rank=1.0, loading_cores=None))
    assert only(script).remedy == "num_workers=2 of the DataLoader", (
        "a sleeping __getitem__ needs no core"
    )
    computes = sampled({"data": 0.06}, line("data", 0.06, cpu=1.0), parts={"data": 0.06})
    alone = as_script(replace(computes, cores_per_rank=1.0, loading_cores=None))
    assert only(alone).remedy.startswith("more workers bring nothing on 1 core a rank")
    in_torch = sampled({"data": 0.06}, line("data", 0.06, own=0.1), parts={"data": 0.06})
    unknown = as_script(replace(in_torch, cores_per_rank=1.0, loading_cores=None))
    assert only(unknown).remedy.startswith("more workers bring nothing"), "it does not sleep"
    crowded = only(replace(computes, cores_per_rank=1.0))
    assert crowded.remedy.startswith("more workers bring nothing"), "loading_cores is 0.05"
    partly = sampled({"data": 0.06}, line("data", 0.06, cpu=0.7), parts={"data": 0.06})
    busy = as_script(replace(partly, cores_per_rank=1.0, loading_cores=None))
    assert only(busy).remedy.startswith("more workers bring nothing"), "the training needs the core"


def test_garbage_collection_says_who_asks_for_it() -> None:
    asked = Collections(seconds=0.02, full=1.0, source="task.py:3", is_asked_for=True)
    advice = only(sampled({"garbage collection": 0.02}, collections=asked))
    assert advice.text == (
        "garbage collection takes 20 ms of each 100 ms step: 1 full collections in each, mostly at task.py:3"
    )
    assert advice.remedy == "call gc.collect() there every so many steps, or not at all"
    automatic = replace(asked, is_asked_for=False)
    assert "gc.freeze()" in only(sampled({"forward": 0.1}, collections=automatic)).remedy


def optimizer(**changes: Any) -> OptimizerFacts:
    facts: dict[str, Any] = {
        "name": "AdamW",
        "num_tensors": 100,
        "num_bytes": 100 << 20,
        "is_fused": False,
        "is_foreach": False,
    }
    return OptimizerFacts(**facts | changes)


def test_a_slow_optimizer_gets_its_faster_form_or_is_named_by_its_line() -> None:
    phases = {"optimizer": 0.04, "forward": 0.05}
    advice = only(sampled(phases, optimizer=optimizer()))
    assert (advice.bottleneck, advice.settings) == ("optimizer", None)
    assert advice.remedy.startswith("give it fused=True"), "a task's own optimizer"
    settings = {"optim.name": "torch.optim.NAdam"}
    named = only(sampled(phases, optimizer=optimizer(name="NAdam"), settings=settings))
    assert named.settings == {"optim.options.foreach": "true"}
    assert advise(sampled(phases, optimizer=optimizer(is_fused=True))) == (), "it is as it is"
    own = optimizer(name="Whitened", is_fused=False)
    at_line = only(sampled(phases, line("optimizer", 0.03, own=0.0), optimizer=own))
    assert at_line.text.endswith(
        "takes 40 ms of each 100 ms step, mostly at task.py:7, in f: work()"
    )


def test_gradients_that_are_clipped_one_by_one_have_a_line() -> None:
    phases = {"gradient clipping": 0.05, "forward": 0.05}
    clipping = replace(in_library("gradient clipping", 160), seconds=0.05)
    few = optimizer(num_tensors=20, is_fused=True)
    advice = only(sampled(phases, clipping, optimizer=few))
    assert advice.text == (
        "your code runs Python 50 ms of each 100 ms step in gradient clipping, in 160 short operations, mostly at "
        "task.py:7, in f: work()"
    )
    once = replace(clipping, library_operations=20)
    assert advise(sampled(phases, once, optimizer=few)) == ()


def test_gradients_that_no_optimizer_uses_are_a_part_of_both_passes() -> None:
    phases = {"forward": 0.04, "backward": 0.04}
    parts = {"exposed_communication": 0.02}
    frozen = optimizer(unused_gradients=0.5)
    advice = only(sampled(phases, optimizer=frozen, parts=parts))
    assert (advice.bottleneck, advice.cost_s) == ("unused_gradients", pytest.approx(0.03))
    assert advice.text == (
        "50% of the gradients are computed and reduced for weights that no optimizer has, or whose rate is 0: 30 ms "
        "of each 100 ms step"
    )
    assert "requires_grad_(False)" in advice.remedy
    assert advise(sampled(phases, optimizer=optimizer(), parts=parts)) == ()


def test_many_small_parameters_are_counted() -> None:
    small = optimizer(num_tensors=2000, num_bytes=16_000, is_fused=True)
    advice = only(sampled({"optimizer": 0.01, "forward": 0.09}, optimizer=small))
    assert advice.bottleneck == "small_tensors"
    assert advice.text.startswith("2,000 parameters of 8 B on average: 55 ms of each 100 ms step")
    phases = {"optimizer": 0.01, "forward": 0.04, "hook Average": 0.05}
    hooked = advise(sampled(phases, line("hook Average", 0.05), optimizer=small))
    assert hooked[0].bottleneck == "hook", "half of the gaps are the hook's"
    clipped = replace(line("rest", 0.04, cpu=1.0), operations=18_000.0)
    phases = {"optimizer": 0.01, "forward": 0.03, "rest": 0.06}
    clipping = advise(sampled(phases, clipped, optimizer=small))
    assert clipping[0].bottleneck == "python", "a loop over the gradients"
    own = replace(small, name="Signed")
    phases = {"optimizer": 0.05, "forward": 0.05}
    looped = advise(sampled(phases, line("optimizer", 0.05), optimizer=own))
    assert looped[0].bottleneck == "optimizer", "its line is what can be changed"
    few = replace(small, num_tensors=100)
    assert advise(sampled({"optimizer": 0.01, "forward": 0.09}, optimizer=few)) == ()


def test_log_lines_evaluations_and_saves_get_longer_intervals() -> None:
    phases = {"log": 0.01, "forward": 0.08}
    logs = sampled(phases, communication_phases_s={"log": 0.01}, settings={"log.every_steps": "1"})
    assert (only(logs).bottleneck, only(logs).settings) == ("log", {"log.every_steps": "10"})
    compared = sampled(
        {"comparison of replicas": 0.02, "forward": 0.08}, settings={"watch.replicas_every": "1"}
    )
    assert only(compared).settings == {"watch.replicas_every": "10"}
    assert only(compared).text == (
        "comparisons of replicas take 20 ms of each 100 ms step, with one every 1 step"
    )
    assert only(logs).cost_s == pytest.approx(0.02)
    assert only(logs).predicted_step_s == pytest.approx(STEP_S - 0.018)
    paused = sampled(
        {"forward": 0.1},
        pauses_s={"evaluation": 0.1, "save": 0.05},
        settings={"train.eval_every_steps": "2", "checkpoint.every_epochs": "1"},
    )
    evaluation, save = advise(paused)
    assert evaluation.text == "evaluations take 100 ms of each 250 ms step"
    assert evaluation.settings == {"train.eval_every_steps": "20"}
    assert evaluation.predicted_step_s == pytest.approx(0.25 - 0.09)
    assert save.settings == {"checkpoint.every_epochs": "10"}
    script = as_script(sampled({"evaluation": 0.03}, line("evaluation", 0.03)))
    assert only(script).remedy == "evaluate less often"
    assert "task.py:7" in only(script).text


def test_a_thread_that_computes_is_named_before_the_lines_that_wait_for_it() -> None:
    thread = BusyThread(rank=0, name="words", cores=0.6, source="task.py:22")
    result = sampled({"forward": 0.1}, line("forward", 0.04), threads=(thread,))
    advice = only(result)
    assert advice.bottleneck == "thread"
    assert advice.text == (
        "the thread words of rank 0 uses or waits for 60% of a core at task.py:22, and the training "
        "waits 50 ms of each 100 ms step for the GIL or a core"
    )


def test_a_wait_names_what_other_threads_do() -> None:
    thread = BusyThread(rank=0, name="reader", cores=0.01, source="task.py:22")
    advice = only(sampled({"rest": 0.1}, line("rest", 0.04), threads=(thread,)))
    assert advice.bottleneck == "python"
    assert advice.text.endswith("f: work() (meanwhile the thread reader is at task.py:22)")


def crowded(result: ProfileResult, wait_s: float) -> ProfileResult:
    return replace(result, ranks=tuple(replace(rank, cpu_wait_s=wait_s) for rank in result.ranks))


def test_what_takes_the_cores_of_the_ranks_is_named() -> None:
    waiting = crowded(sampled({"forward": 0.1}), 0.04)
    process = only(replace(waiting, process=ProcessUse("python spin.py", 0.2, 0.1)))
    assert (process.bottleneck, process.cost_s) == ("process", pytest.approx(0.03))
    assert process.text == (
        "a process that the training has started (python spin.py) uses or waits for 30% of a core, and a rank waits "
        "30 ms of each 100 ms step for one"
    )
    assert advise(replace(waiting, process=ProcessUse("sleeper", 0.01, 0.0))) == ()

    pinned = replace(waiting, cores_per_rank=0.5, host_cpus=2)
    cores = only(pinned)
    assert (cores.bottleneck, cores.cost_s) == ("cores", pytest.approx(0.04))
    assert cores.text.startswith("2 ranks may only use 1 of the 2 cores of their host")
    assert advise(replace(pinned, host_cpus=1)) == (), "there are no others"
    assert advise(crowded(pinned, 0.005)) == ()


def test_tracers_of_python_take_a_part_of_it() -> None:
    advice = only(sampled({"forward": 0.1}, tracers=("sys.settrace",)))
    assert (advice.bottleneck, advice.cost_s) == ("tracers", 0.025)
    assert advice.text == (
        "sys.settrace follows each call of Python, which takes 50 ms of each 100 ms step"
    )


def test_a_thread_that_computes_makes_collectives_long() -> None:
    """The training thread leaves them late, and no smaller batch of messages helps."""
    thread = BusyThread(rank=0, name="words", cores=0.9, source="task.py:22")
    parts = {"compute": 0.05, "gaps": 0.01, "exposed_communication": 0.04}
    result = sampled({"forward": 0.06}, threads=(thread,), parts=parts)
    assert advise(result)[0].bottleneck == "thread"
    assert advise(result)[0].cost_s == pytest.approx(0.05)


def test_more_threads_of_operations_than_cores_wait_for_one() -> None:
    result = sampled({"forward": 0.09}, num_threads=16, cores_per_rank=2.0)
    advice = only(as_script(crowded(result, 0.04)))
    assert advice.bottleneck == "threads"
    assert advice.text == (
        "operations use 16 threads, a rank has 2 cores: it waits 40 ms of each 100 ms step for one"
    )
    assert advice.remedy == "torch.set_num_threads(2), or OMP_NUM_THREADS=2"
    assert advise(result) == (), "no rank waits"
    assert advise(crowded(replace(result, num_threads=2), 0.04)) == ()


def test_a_sampler_is_not_loaded_by_workers() -> None:
    line_of_sampler = line(SAMPLER, 0.04, cpu=1.0)
    result = sampled({SAMPLER: 0.04, "forward": 0.05}, line_of_sampler, parts={"data": 0.04})
    advice = only(result)
    assert advice.bottleneck == "sampler"
    assert advice.text.startswith(
        "the sampler takes 40 ms of each 100 ms step, mostly at task.py:7"
    )
    assert not advice.settings


def test_operations_that_are_no_layers_have_a_line() -> None:
    copies = line("forward", 0.04)
    result = sampled({"forward": 0.06}, special_lines=(copies,))
    advice = only(result)
    assert (advice.bottleneck, advice.cost_s) == ("operations", 0.04)
    assert "operations that are no layers (copies, sorts, sums)" in advice.text
    assert "mostly at task.py:7, in f: work()" in advice.text
    kernels = [
        Kernel(name=name, seconds=0.01, calls=1, is_layer=name == "aten::mm")
        for name in ("aten::mm", "aten::sort", "aten::copy_")
    ]
    named = only(replace(result, kernels=tuple(kernels)))
    assert "(copies, sorts, sums, aten::sort, aten::copy_)" in named.text
    sorts = replace(copies, phase="backward", function="Sorted.backward")
    assert only(replace(result, special_lines=(sorts,))).cost_s == 0.04
    others = [
        replace(copies, seconds=0.01),
        replace(copies, phase="optimizer"),
        replace(copies, phase="backward"),
    ]
    for other in others:
        assert advise(replace(result, special_lines=(other,))) == ()


def test_gradients_of_gradients_count_with_their_backward_pass() -> None:
    penalty = replace(line(GRADIENTS, 0.03, own=0.0), backward_s=0.02)
    advice = only(sampled({GRADIENTS: 0.03, "backward": 0.04}, penalty))
    assert (advice.bottleneck, advice.cost_s) == ("gradients_of_gradients", 0.05)
    assert advise(sampled({GRADIENTS: 0.03}, penalty)) == (), "it is the backward pass"


def test_more_workers_than_cores_are_too_many() -> None:
    workers = WorkerUse(number=12, cores=0.5, waiting=2.0)
    result = sampled({"forward": 0.1}, workers=workers, cores_per_rank=1.0)
    advice = only(crowded(result, 0.03))
    assert (advice.bottleneck, advice.settings) == ("workers", {"data.workers": "1"})
    assert advise(result) == (), "nobody waited for a core"


def test_a_profile_without_samples_has_no_such_advice() -> None:
    assert advise(profile(parts={"gaps": 0.05}, optimizer=optimizer())) == ()
