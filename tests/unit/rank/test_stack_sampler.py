"""What a sampler sees of the thread that takes the steps: its phases, the user's lines, garbage
collections, other threads."""

from __future__ import annotations

import functools
import gc
import json
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from drumline.rank.profiled.stack_sampler import (
    END,
    SWITCH_INTERVAL_S,
    StackSampler,
    code_of,
    line_of_user,
    package_of,
    phases_of_torch,
)
from drumline.runs.profile_files import (
    BUFFERS,
    GRADIENTS,
    IN_BACKWARD,
    SAMPLER,
    WORKERS,
    StackSamples,
)

LASTS_S = 0.3


def sampled(work: Callable[[], None], **phases: Callable[..., Any]) -> StackSamples:
    """`phases`: the functions in which they begin."""
    table = {code_of(function): name for name, function in phases.items()}
    sampler = StackSampler({**phases_of_torch(), **table, code_of(sampled): END})
    sampler.start()
    work()
    return sampler.stop()


def seconds_of(stacks: StackSamples) -> dict[tuple[str, str], tuple[float, float]]:
    """By phase and function: how long it ran, and how long it could run."""
    costs: dict[tuple[str, str], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    began_ns = stacks.began_ns
    for sample in stacks.samples:
        key = (stacks.phases[sample.phase], stacks.lines[sample.line].function)
        lasts_s, cpu_s = costs[key]
        costs[key] = (lasts_s + (sample.until_ns - began_ns) / 1e9, cpu_s + sample.cpu_ns / 1e9)
        began_ns = sample.until_ns
    return costs


def sleeping_hook() -> None:
    time.sleep(LASTS_S)


def computing_forward() -> None:
    until = time.perf_counter() + LASTS_S
    while time.perf_counter() < until:
        sum(range(100))


def take_step() -> None:
    sleeping_hook()
    computing_forward()


def test_time_belongs_to_the_phase_and_the_line_that_ran() -> None:
    stacks = sampled(take_step, hook=sleeping_hook, forward=computing_forward)
    costs = seconds_of(stacks)
    slept_s, could_run_s = costs["hook", "sleeping_hook"]
    assert slept_s >= 0.9 * LASTS_S
    assert could_run_s < slept_s / 3
    computed_s, cpu_s = costs["forward", "computing_forward"]
    assert cpu_s > computed_s / 2
    assert "time.sleep(LASTS_S)" in {line.source for line in stacks.lines}
    assert len(stacks.samples) < 200, "samples of one line in a row are one"


def decorated(function: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(function)
    def wrapper() -> None:
        function()

    return wrapper


def test_a_comprehension_is_a_part_of_its_function() -> None:
    [line] = [line_of_user(sys._getframe()) for _ in range(1)]
    assert line.function == "test_a_comprehension_is_a_part_of_its_function"


def test_a_decorated_function_is_the_function() -> None:
    assert code_of(decorated(sleeping_hook)) is sleeping_hook.__code__
    assert code_of(len) is None, "it is not in Python"


def test_the_line_is_the_users_also_inside_a_library() -> None:
    def dump() -> None:
        until = time.perf_counter() + LASTS_S
        while time.perf_counter() < until:
            json.dumps([{"a": [1.5] * 200}] * 50, indent=1)

    stacks = sampled(dump)
    libraries = {line.library for line in stacks.lines if line.function.endswith("dump")}
    assert "json" in libraries
    files = {line.file for line in stacks.lines}
    assert __file__ in files
    assert json.encoder.__file__ not in files


def test_the_phases_of_a_hand_written_loop_are_those_of_torch() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(6)))
    optimizer = torch.optim.Adam(model.parameters())

    def train() -> None:
        until = time.perf_counter() + 3 * LASTS_S
        while time.perf_counter() < until:
            model(torch.ones(64, 600)).sum().backward()
            optimizer.step()

    costs = seconds_of(sampled(train))
    assert {"forward", "backward", "optimizer"} <= {phase for phase, _ in costs}


def test_the_broadcast_of_buffers_is_a_phase_inside_the_forward_pass() -> None:
    class Model(torch.nn.Module):
        def forward(self) -> None:
            sleeping_hook()

    phases = {**phases_of_torch(), sleeping_hook.__code__: BUFFERS}
    assert phases[code_of(torch.nn.parallel.DistributedDataParallel._sync_buffers)] == BUFFERS
    sampler = StackSampler(phases)
    sampler.start()
    Model()()
    assert seconds_of(sampler.stop())[BUFFERS, "sleeping_hook"][0] >= 0.9 * LASTS_S


def validate(model: torch.nn.Module) -> None:
    """Half of it makes batches, in Python."""
    model.eval()
    until = time.perf_counter() + LASTS_S
    while time.perf_counter() < until:
        model(torch.ones(200, 600))
        sum(range(20_000))
    model.train()


def test_a_statement_of_a_script_that_evaluates_is_an_evaluation() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(6)))
    sampler = StackSampler(phases_of_torch(), [model])
    sampler.start()
    computing_forward()
    for _ in range(3):
        model(torch.ones(400, 600))
    validate(model)
    stacks = sampler.stop()
    by_phase: dict[str, set[str]] = defaultdict(set)
    for row in stacks.samples:
        by_phase[stacks.phases[row.phase]].add(stacks.lines[row.line].source)
    assert by_phase["evaluation"] == {"validate(model)"}, (
        "all that it does, by the line that calls it"
    )
    assert "evaluation" not in {
        phase for phase, lines in by_phase.items() if "sum(range(100))" in lines
    }
    assert "rest" in by_phase


class Job:
    def loss(self) -> None:
        computing_forward()


def test_the_line_of_the_task_that_led_to_a_sample() -> None:
    stacks = sampled(Job().loss, forward=computing_forward)
    statements = {stacks.lines[number].function for number in stacks.statements}
    assert len(stacks.statements) == len(stacks.samples)
    assert "Job.loss" in statements
    assert "computing_forward" not in statements


def test_the_start_of_workers_is_a_phase() -> None:
    loader = torch.utils.data.DataLoader(range(4), num_workers=2)  # type: ignore[arg-type]

    def short_epochs() -> None:
        for _ in range(3):
            assert len(list(loader)) == 4

    assert WORKERS in {phase for phase, _ in seconds_of(sampled(short_epochs))}


def test_a_teacher_in_evaluation_mode_is_a_part_of_the_forward_pass() -> None:
    student = torch.nn.Linear(600, 600)
    teacher = torch.nn.Linear(600, 600).eval()
    sampler = StackSampler(phases_of_torch(), [student])
    sampler.start()
    until = time.perf_counter() + LASTS_S
    while time.perf_counter() < until:
        teacher(torch.ones(400, 600))
    phases = sampler.stop().phases
    assert "forward" in phases
    assert "evaluation" not in phases


SAMPLED_AS_OFTEN_AS_POSSIBLE = """
import time, torch
from drumline.rank.profiled import stack_sampler

stack_sampler.FIRST_INTERVAL_S = 0
stack_sampler.SAMPLES_PER_INTERVAL = 10**9
stack_sampler.SWITCH_INTERVAL_S = 1e-6
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
sampler = stack_sampler.StackSampler(stack_sampler.phases_of_torch(), [model])
sampler.start()
until = time.perf_counter() + 1
while time.perf_counter() < until:
    model(torch.ones(4, 8))
print(len(sampler.stop().samples) > 10)
"""


def test_functions_that_return_while_they_are_sampled_do_not_end_the_process() -> None:
    """Reading `f_locals` of their frames did, with a segmentation fault, within this second."""
    result = subprocess.run(
        [sys.executable, "-c", SAMPLED_AS_OFTEN_AS_POSSIBLE], capture_output=True, text=True
    )
    assert result.stdout == "True\n", f"exit {result.returncode}: {result.stderr}"


def test_no_garbage_collection_begins_while_frames_are_read() -> None:
    """Python 3.11 makes the object of a frame when it is read. A collection then lets the thread go
    on and return from that frame: the process ended with a segmentation fault in one of six runs of
    three seconds, with collections that sleep."""
    readers = {StackSampler._look.__code__, StackSampler._describe.__code__}
    interrupted = []

    def on_collection(event: str, info: dict[str, int]) -> None:
        frame = sys._getframe()
        codes = set()
        while frame.f_back is not None:
            frame = frame.f_back
            codes.add(frame.f_code)
        if threading.current_thread().name == "drumline-sampler" and codes & readers:
            interrupted.append(event)

    def makes_objects() -> None:
        until = time.perf_counter() + LASTS_S
        while time.perf_counter() < until:
            torch.nn.functional.relu(torch.ones(300, 300))

    threshold = gc.get_threshold()
    gc.callbacks.append(on_collection)
    gc.set_threshold(3)
    try:
        stacks = sampled(makes_objects)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(on_collection)
    assert len(stacks.samples) > 3
    assert not interrupted
    assert gc.isenabled()


def test_garbage_collections_are_exact_and_have_the_line() -> None:
    kept = [[number] for number in range(300_000)]

    def collect() -> None:
        gc.collect()

    stacks = sampled(collect)
    (full,) = stacks.collections
    assert full.ended_ns - full.began_ns > 1e6
    assert stacks.lines[full.line].source == "gc.collect()"
    assert len(kept) == 300_000


def test_a_thread_that_computes_is_named_by_its_line() -> None:
    is_over = threading.Event()

    def hog() -> None:
        while not is_over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=hog, name="hog")
    thread.start()
    idle = threading.Thread(target=is_over.wait, name="idle")
    idle.start()
    stacks = sampled(lambda: time.sleep(3 * LASTS_S))
    is_over.set()
    thread.join()
    idle.join()
    by_name = {use.name: use for use in stacks.threads}
    assert by_name["hog"].cpu_s > 10 * by_name["idle"].cpu_s
    assert stacks.lines[by_name["hog"].line].function.endswith("hog")


def test_a_thread_of_a_pool_is_named_by_the_line_that_it_computes() -> None:
    def work() -> int:
        return sum(range(300_000))

    def submit_now_and_then() -> None:
        until = time.perf_counter() + 4 * LASTS_S
        while time.perf_counter() < until:
            pool.submit(work).result()
            # the thread waits in Python's own code for longer than it works
            time.sleep(LASTS_S / 5)

    with ThreadPoolExecutor(1, thread_name_prefix="pool") as pool:
        pool.submit(work).result()
        stacks = sampled(submit_now_and_then)
    (use,) = (use for use in stacks.threads if use.name.startswith("pool"))
    assert stacks.lines[use.line].function.endswith("work")


def test_python_is_as_before_afterwards() -> None:
    interval_s = sys.getswitchinterval()
    callbacks = list(gc.callbacks)
    sampler = StackSampler({})
    sampler.start()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    sampler.stop()
    assert sys.getswitchinterval() == interval_s
    assert gc.callbacks == callbacks
    competing = StackSampler({})
    competing.start(is_alone=False)
    assert sys.getswitchinterval() == interval_s, "it is a part of what another thread costs"
    competing.stop()


def test_packages_are_told_from_the_users_code() -> None:
    assert package_of(torch.nn.functional.__file__) == "torch"
    assert package_of(json.__file__) == "json"
    assert package_of(pytest.__file__) == "pytest"
    assert package_of(StackSampler.start.__code__.co_filename) == "drumline"
    assert package_of("<frozen importlib._bootstrap>") == "python"
    assert package_of(__file__) == ""


def test_a_hook_on_gradients_is_code_of_the_users_in_backward() -> None:
    weights = torch.ones(4, requires_grad=True)

    def slow_hook(gradient: torch.Tensor) -> None:
        sleeping_hook()

    weights.register_hook(slow_hook)  # type: ignore[no-untyped-call]
    loss = weights.sum()
    stacks = sampled(lambda: loss.backward())  # type: ignore[no-untyped-call]
    slept_s, _ = seconds_of(stacks)[IN_BACKWARD, "sleeping_hook"]
    assert slept_s >= 0.8 * LASTS_S


def test_the_backward_pass_of_a_function_of_the_users_is_no_hook() -> None:
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
            return values.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            sleeping_hook()
            return gradient

    loss = Slow.apply(torch.ones(4, requires_grad=True)).sum()  # type: ignore[no-untyped-call]
    stacks = sampled(lambda: loss.backward())
    slept_s, _ = seconds_of(stacks)["backward", "sleeping_hook"]
    assert slept_s >= 0.8 * LASTS_S


def test_a_sampler_and_gradients_of_gradients_are_phases() -> None:
    class Slow(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            sleeping_hook()
            return iter(range(4))

    samples = torch.utils.data.TensorDataset(torch.rand(4, 2))
    loader = torch.utils.data.DataLoader(samples, batch_size=4, sampler=Slow())
    stacks = sampled(lambda: next(iter(loader)))
    assert seconds_of(stacks)[SAMPLER, "sleeping_hook"][0] >= 0.8 * LASTS_S

    inputs = torch.ones(4, requires_grad=True)
    inputs.register_hook(lambda gradient: sleeping_hook())  # type: ignore[no-untyped-call]
    squares = inputs.square().sum()
    stacks = sampled(lambda: print(torch.autograd.grad(squares, inputs)[0].shape))
    assert seconds_of(stacks)[GRADIENTS, "sleeping_hook"][0] >= 0.8 * LASTS_S
