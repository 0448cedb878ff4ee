"""Advice about what the host does in a step: the user's own lines, hooks, garbage collection, the
optimizer, log lines, evaluations, saves and threads. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from drumline.base.text import file_size, one_line, plural
from drumline.report.profile.bottleneck import (
    USUAL_CORES,
    Advice,
    Bottleneck,
    Savings,
    by_setting,
    find_slow_rank,
    first_line,
    for_cores_s,
    is_call_of_torch,
    is_waiting,
    mostly_at,
    of_step,
    removable,
    slower_line,
)
from drumline.runs.profile_files import CLIPPING, GRADIENTS, IN_BACKWARD
from drumline.runs.profile_result import PAUSES, BusyThread, LineCost, ProfileResult, RankSteps

MIN_SPECIAL = 0.25
MOST_NAMED = 3
BUSY_THREAD = 0.2
"""Of a core: threads that use less are no competition."""
MANY_THREADS = 3
"""Times as many as cores."""
PYTHON_PHASES = ("forward", "backward", "rest", "to the device", CLIPPING)
MIN_OPTIMIZER = 0.2
"""Of the step: less is usual."""
PASSES = ("forward", "backward", "rest")
MOSTLY_PYTHON = 0.3
"""Of the time of a function: the rest is operations as short as the Python between them."""
SOME_PYTHON = 0.1
LOOPED = 50
"""A line that calls so many operations in a step is in a loop, which could be one operation."""
OPERATIONS_PER_TENSOR = 5
"""The layers of a model call fewer for each of their parameters."""
FEWER = 10
"""Log lines, evaluations and saves are proposed so many times as seldom."""
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
"""The optimizers of torch with a fused version."""
FOREACH = ("NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "RMSprop", "Rprop", "Muon")
SMALL_BYTES = 32 << 10
MANY_TENSORS = 200
PERIODIC: Mapping[Bottleneck, tuple[str, str, str]] = {
    "log": ("log", "log lines", "log.every_steps"),
    "comparison": ("comparison of replicas", "comparisons of replicas", "watch.replicas_every"),
}
"""The phase, what it does, and the setting of how often."""
EVERY = {
    "evaluation": ("train.eval_every_steps", "train.eval_every_epochs"),
    "save": ("checkpoint.every_steps", "checkpoint.every_epochs"),
}


def _threads(result: ProfileResult) -> Iterator[Advice]:
    """One thread at a time runs Python: each return of the training thread from torch waits for
    the other one, also that from a collective, and so do the ranks that wait for this one."""
    for thread in busy_threads(result)[:1]:
        parts = ("gaps", "data", "exposed_communication", "waiting_for_rank")
        waited_s = sum(result.parts_s[part] for part in parts)
        cost_s = min(waited_s, thread.cores * result.step_s)
        yield removable(
            "thread",
            f"the thread {one_line(thread.name)} of rank {thread.rank} uses or waits for {thread.cores:.0%} "
            f"of a core at {one_line(thread.source)}, and the training waits {of_step(result, cost_s)} for the GIL "
            "or a core",
            "compute there in a process of its own (multiprocessing), or let it sleep between its rounds",
            cost_s,
            what="the wait",
        )


def busy_threads(result: ProfileResult) -> list[BusyThread]:
    """Those that compete with the steps for the GIL."""
    return [thread for thread in result.threads if thread.cores >= BUSY_THREAD]


def _python(result: ProfileResult) -> Iterator[Advice]:
    """Python of the user's inside the step, or a wait in it."""
    slow = find_slow_rank(result)
    slower = None if slow is None else slower_line(slow)
    for line in result.lines:
        # A line that cannot run while another thread computes waits for the GIL.
        cost_s = line.cpu_s if busy_threads(result) else line.own_s
        is_loop = _is_loop(result, line)
        if is_loop or cost_s > line.seconds * MOSTLY_PYTHON:
            # With operations that Python calls one by one; waits for the device have their own advice.
            cost_s = line.seconds - _waited_for_device_s(result, line)
        if is_loop:
            cost_s += line.backward_s
        phase = line.phase
        is_named = slower is not None and _is_same(slower, line)
        if slow is not None and _is_run_by(slow.peers, line):
            is_named = False  # all ranks run it, this one for longer
        if is_named or phase not in PYTHON_PHASES:
            continue
        where = "between the phases of the step" if phase == "rest" else f"in {phase}"
        if is_loop:
            number = max(line.operations, line.library_operations)
            where += f", in {number:,.0f} short operations"
            if line.backward_s > SOME_PYTHON * cost_s:
                where += " and their backward pass"
        does = "waits" if is_waiting(line) else "runs Python"
        meanwhile = _meanwhile(result) if is_waiting(line) else ""
        yield removable(
            "python",
            f"your code {does} {of_step(result, cost_s)} {where}{mostly_at(line)}{meanwhile}",
            _python_remedy(line),
            cost_s,
        )


def _waited_for_device_s(result: ProfileResult, line: LineCost) -> float:
    """How long a step waits for the device at this line, where it does so again and again, as with an
    `.item()` in a loop. A single wait is mostly for what other lines have launched."""
    waits = [sync for sync in result.syncs if sync.source == line.source]
    if sum(sync.calls for sync in waits) < LOOPED:
        return 0.0
    return min(sum(sync.seconds for sync in waits), line.seconds)


def _is_same(line: LineCost, other: LineCost) -> bool:
    return (line.phase, line.function) == (other.phase, other.function)


def _is_run_by(ranks: Sequence[RankSteps], line: LineCost) -> bool:
    """Whether it takes them about as long as all ranks on average."""
    times_s = [peer.seconds for rank in ranks for peer in rank.lines if _is_same(peer, line)]
    return sum(times_s) / len(ranks) > line.seconds / 2


def _meanwhile(result: ProfileResult) -> str:
    """What other threads do, for one of which a line may wait."""
    places = dict.fromkeys(
        f"the thread {one_line(thread.name)} is at {one_line(thread.source)}"
        for thread in result.threads[:MOST_NAMED]
    )
    return f" (meanwhile {', '.join(places)})" if places else ""


def _is_loop(result: ProfileResult, line: LineCost) -> bool:
    """Whether it calls many operations, in each forward pass, that are so short that Python takes a part
    of its time."""
    operations = line.operations / (result.num_passes or 1)
    library_operations = line.library_operations / (result.num_passes or 1)
    python_s = line.cpu_s if busy_threads(result) else max(line.own_s, line.host_s)
    if python_s <= line.seconds * SOME_PYTHON:
        return False
    runs_layers = line.phase == "forward" and library_operations >= LOOPED
    if operations >= LOOPED and not runs_layers:
        return True
    # A model that also runs without a gradient, for one step after another of a text.
    untrained = [part.function for part in result.undifferentiated if part.caller]
    is_untrained = line.phase == "forward" and line.function in untrained
    if result.optimizer is None or is_call_of_torch(line) or is_untrained:
        return False
    # A line that runs the layers of a model has many, too, and more between them, but few for each
    # parameter.
    least = max(LOOPED, OPERATIONS_PER_TENSOR * result.optimizer.num_tensors)
    return max(operations, library_operations) >= least


def loops_between_phases_s(result: ProfileResult) -> float:
    """As clipping by hand, tensor by tensor: they have advice of their own."""
    return sum(
        line.seconds for line in result.lines if line.phase == "rest" and _is_loop(result, line)
    )


def _no_gradients(result: ProfileResult) -> Iterator[Advice]:
    """What torch computes for the user and the backward pass has no counterpart of: constants,
    metrics, evaluations, averages of weights."""
    for line in result.undifferentiated:
        caller = f", which {one_line(line.caller)} runs" if line.caller else ""
        yield removable(
            "no_gradients",
            f"your code computes {of_step(result, line.seconds)} without a gradient{mostly_at(line)}"
            f"{caller}",
            "compute once what is the same in every step, and what is measured (a metric, an evaluation) "
            "less often",
            line.seconds,
        )


def _operations(result: ProfileResult) -> Iterator[Advice]:
    """Copies, sorts, sums over pairs: what the layers of a model do not consist of."""
    loops = [(line.phase, line.function) for line in result.lines if _is_loop(result, line)]
    names = [f", {one_line(kernel.name)}" for kernel in result.kernels if not kernel.is_layer]
    longest = "".join(names[:MOST_NAMED])
    for line in result.special_lines:
        is_needed = line.phase not in PASSES or (line.phase, line.function) in loops
        # Of a function of torch.autograd; all else in that pass counts for its line in the forward pass.
        is_needed |= line.phase == "backward" and not line.function.endswith("backward")
        if not is_needed and line.seconds >= MIN_SPECIAL * result.step_s:
            yield removable(
                "operations",
                f"your code spends {of_step(result, line.seconds)} in operations that are no layers (copies, sorts, "
                f"sums{longest}), with their backward pass{mostly_at(line)}",
                "leave out what the result does not need, write it as one operation, or compute it on fewer numbers",
                line.seconds,
            )


def _gradients_of_gradients(result: ProfileResult) -> Iterator[Advice]:
    """A penalty on gradients: a backward pass in the forward pass, through which the backward pass
    goes again."""
    line = first_line(result, GRADIENTS)
    if line is None or not result.phases_s.get("backward"):
        return
    cost_s = result.phases_s[GRADIENTS] + line.backward_s
    yield removable(
        "gradients_of_gradients",
        f"torch.autograd.grad takes {of_step(result, cost_s)}, with the backward pass through it{mostly_at(line)}",
        "compute this term (a penalty on gradients) in one step of several, or for a part of the batch; without "
        "create_graph=True where nothing is trained through it",
        cost_s,
    )


def _intra_op_threads(result: ProfileResult) -> Iterator[Advice]:
    """More threads of operations than cores: they wait for one another, and for a core."""
    threads = result.num_threads or 0
    cores = result.cores_per_rank or USUAL_CORES
    if threads < MANY_THREADS * cores:
        return

    num_threads = max(1, int(cores))
    cost_s = for_cores_s(result, 0.7)
    yield Advice(
        bottleneck="threads",
        text=f"operations use {threads} threads, a rank has {cores:.3g} cores: it waits "
        f"{of_step(result, cost_s)} for one",
        **by_setting(
            result,
            {"dist.threads": str(num_threads)},
            script=f"torch.set_num_threads({num_threads}), or OMP_NUM_THREADS={num_threads}",
        ),
        cost_s=cost_s,
        saved_s=Savings(0.6 * cost_s, cost_s, 0.0),
        derivation="one thread for each core",
    )


def _tracers(result: ProfileResult) -> Iterator[Advice]:
    """Each call of Python takes longer, wherever it is."""
    if result.tracers:
        gaps_s = result.parts_s["gaps"]
        yield removable(
            "tracers",
            f"{one_line(', '.join(result.tracers))} follows each call of Python, which takes "
            f"{of_step(result, gaps_s)}",
            "turn it off, or on for some steps only",
            gaps_s / 2,
            what="half of the time in Python",
        )


def _cores(result: ProfileResult) -> Iterator[Advice]:
    """Ranks that may only use some of the cores, and wait for those."""
    cores = result.cores_per_rank or USUAL_CORES
    ranks = result.world_size / result.num_nodes
    if cores * ranks < min(ranks, result.host_cpus or 0):
        cost_s = for_cores_s(result, 1 - cores)
        yield removable(
            "cores",
            f"{ranks:.3g} ranks may only use {cores * ranks:.3g} of the {result.host_cpus} cores of their host (their "
            f"affinity, as taskset and os.sched_setaffinity set it), and wait {of_step(result, cost_s)} for a core",
            "let each rank use cores of its own",
            cost_s,
        )


def _process(result: ProfileResult) -> Iterator[Advice]:
    """One that a rank has started, and that computes while the steps wait for a core."""
    process = result.process
    if process is not None:
        cores = process.cores + process.waiting
        cost_s = for_cores_s(result, min(0.5, cores))
        yield removable(
            "process",
            f"a process that the training has started ({one_line(process.name)}) uses or waits for {cores:.0%} "
            f"of a core, and a rank waits {of_step(result, cost_s)} for one",
            "start it on another machine, less often, or let it sleep between its rounds",
            cost_s,
            what="the wait",
        )


def _on_device(result: ProfileResult) -> Iterator[Advice]:
    """What it computes with torch counts as well: it could be done beside the step."""
    line = first_line(result, "on_device")
    cost_s = result.phases_s.get("on_device", 0.0)
    if line is not None:
        yield removable(
            "on_device",
            f"on_device() takes {of_step(result, cost_s)}{mostly_at(line)}",
            "do it in the dataset, where --data.workers does it beside the step, or once for all samples",
            cost_s,
        )


def _python_remedy(line: LineCost) -> str:
    """What to do about a line that waits, or runs Python."""
    if is_waiting(line):
        return (
            "do it less often, in a thread, or in the dataset, where workers do it beside the step"
        )
    return "use operations of torch on whole tensors, or do it once, less often, or in the dataset"


def _hooks(result: ProfileResult) -> Iterator[Advice]:
    """Those of a task, by the name of their phase, and those on gradients and on the communication
    of gradients."""
    remedies = dict.fromkeys(
        (phase for phase in result.phases_s if phase.startswith("hook ")),
        "give the hook every_steps = 10, or do its work in a thread",
    )
    remedies[IN_BACKWARD] = (
        "leave out the hooks on gradients, or on their communication (register_comm_hook), that compute more than "
        "they save"
    )
    for phase, remedy in remedies.items():
        seconds = result.phases_s.get(phase, 0.0)
        line = first_line(result, phase)
        if line is not None:
            yield removable(
                "hook",
                f"the {phase} takes {of_step(result, seconds)}{mostly_at(line)}",
                remedy,
                seconds,
            )


def _collections(result: ProfileResult) -> Iterator[Advice]:
    """Full collections go through all objects of the process."""
    collections = result.collections
    if collections is None:
        return

    remedy = (
        "call gc.freeze() when the model and the data are made, or gc.disable(), and gc.collect() every so many "
        "steps"
    )
    if collections.is_asked_for:
        remedy = "call gc.collect() there every so many steps, or not at all"
    where = f", mostly at {one_line(collections.source)}" if collections.source else ""
    yield removable(
        "garbage_collection",
        f"garbage collection takes {of_step(result, collections.seconds)}: {collections.full:.2g} full "
        f"collections in each{where}",
        remedy,
        collections.seconds,
    )


def _optimizer(result: ProfileResult) -> Iterator[Advice]:
    """One that updates tensor by tensor, or a slow one of the user."""
    optimizer = result.optimizer
    cost_s = result.phases_s.get("optimizer", 0.0)
    if optimizer is None or cost_s < MIN_OPTIMIZER * result.step_s:
        return

    line = first_line(result, "optimizer")
    kind = ""
    if optimizer.name in FUSED and not optimizer.is_fused:
        kind = "fused"
    elif optimizer.name in FOREACH and not optimizer.is_foreach:
        kind = "foreach"

    text = (
        f"the optimizer ({one_line(optimizer.name)}, {plural(optimizer.num_tensors, 'tensor')} of "
        f"{file_size(optimizer.num_bytes / max(1, optimizer.num_tensors))} on average) takes {of_step(result, cost_s)}"
    )
    if kind:
        is_setting = _is_by_settings(result)
        remedy = f"give it {kind}=True: it then updates many tensors at once"
        yield Advice(
            bottleneck="optimizer",
            text=text,
            remedy="" if is_setting else remedy,
            settings={f"optim.options.{kind}": "true"} if is_setting else None,
            cost_s=cost_s,
            saved_s=Savings(0.5 * cost_s, 0.95 * cost_s, 0.1 * cost_s),
            derivation="one call for all tensors in place of one for each",
        )
    elif line is not None and line.seconds > cost_s / 2:
        yield removable(
            "optimizer",
            f"{text}{mostly_at(line)}",
            "compute less there, less often, or for many tensors in one operation",
            cost_s,
        )


def _is_by_settings(result: ProfileResult) -> bool:
    """Whether the optimizer is that of `--optim.name`, and not the task's own."""
    name = result.settings.get("optim.name", "")
    return (
        result.optimizer is not None
        and result.optimizer.name.lower() == name.rpartition(".")[2].lower()
    )


def _small_tensors(result: ProfileResult) -> Iterator[Advice]:
    """Each tensor takes some microseconds in every phase, however small it is."""
    optimizer = result.optimizer
    if optimizer is None or optimizer.num_tensors < MANY_TENSORS:
        return

    mean_bytes = optimizer.num_bytes / optimizer.num_tensors
    phases_s = result.phases_s
    passes_s = sum(phases_s.get(phase, 0.0) for phase in PASSES)
    # One that is not of torch has a line of its own.
    optimizer_s = phases_s.get("optimizer", 0.0) if optimizer.name in (*FUSED, *FOREACH) else 0.0
    others_s = sum(
        seconds
        for phase, seconds in phases_s.items()
        if phase in (CLIPPING, "optimizer", "on_device", "log") or phase.startswith("hook ")
    )
    host_s = max(passes_s + others_s, 1e-12)
    small_s = max(0.0, passes_s - loops_between_phases_s(result)) + optimizer_s
    gaps_s = result.parts_s["gaps"] * small_s / host_s
    # Of the optimizer's time, as much is gaps as of what the host does otherwise.
    computes = result.parts_s["compute"] / max(result.parts_s["compute"] + gaps_s, 1e-12)
    cost_s = gaps_s + computes * optimizer_s
    if mean_bytes > SMALL_BYTES or cost_s < MIN_OPTIMIZER * result.step_s:
        return

    yield removable(
        "small_tensors",
        f"{plural(optimizer.num_tensors, 'parameter')} of {file_size(mean_bytes)} on average: "
        f"{of_step(result, cost_s)} is Python, launches and updates of single tensors",
        "compute layers of one kind together, with their parameters in one tensor (torch.baddbmm, torch.vmap)"
        ", or compile the model",
        cost_s,
    )


def _periodic(result: ProfileResult) -> Iterator[Advice]:
    """What waits for the device and for all ranks."""
    for bottleneck, (phase, plural_name, setting) in PERIODIC.items():
        cost_s = result.phases_s.get(phase, 0.0) + result.communication_phases_s.get(phase, 0.0)
        every = int(result.settings.get(setting, "0"))
        if every:
            text = f"{plural_name} take {of_step(result, cost_s)}, with one every {plural(every, 'step')}"
            text += mostly_at(first_line(result, phase))
            yield _fewer(bottleneck, text, "", {setting: str(every * FEWER)}, cost_s)


def _pauses(result: ProfileResult) -> Iterator[Advice]:
    """Those of a task come after a step; a script's are in it."""
    for phase in PAUSES:
        seconds = result.pauses_s.get(phase, 0.0) + result.phases_s.get(phase, 0.0)
        settings = _fewer_pauses(result, phase)
        is_save = phase == "save"
        remedies = []
        if not settings:
            remedies.append("save less often" if is_save else "evaluate less often")
        if is_save:
            remedies.append("a crash then loses more steps")
        yield _fewer(
            "save" if is_save else "evaluation",
            f"{phase}s take {of_step(result, seconds)}{mostly_at(first_line(result, phase))}",
            "; ".join(remedies),
            settings,
            seconds,
        )


def _fewer(
    bottleneck: Bottleneck,
    text: str,
    remedy: str,
    settings: Mapping[str, str] | None,
    cost_s: float,
) -> Advice:
    """Advice to do something a tenth as often."""
    saved_s = cost_s * (1 - 1 / FEWER)

    return Advice(
        bottleneck=bottleneck,
        text=text,
        remedy=remedy,
        settings=settings,
        cost_s=cost_s,
        saved_s=Savings(saved_s, cost_s, 0.5 * saved_s),
        derivation=f"with a {FEWER}th of them",
    )


def _fewer_pauses(result: ProfileResult, phase: str) -> Mapping[str, str] | None:
    """The setting for a tenth of the pauses; None: no setting makes them."""
    steps, epochs = EVERY[phase]
    for path in (steps, epochs):
        every = int(result.settings.get(path, "0"))
        if every:
            return {path: str(every * FEWER)}
    return None


HOST_RULES = (
    _threads,
    _python,
    _no_gradients,
    _operations,
    _gradients_of_gradients,
    _tracers,
    _cores,
    _process,
    _intra_op_threads,
    _on_device,
    _hooks,
    _collections,
    _optimizer,
    _small_tensors,
    _periodic,
    _pauses,
)
"""For profiles with samples, which those of earlier versions lack."""
