"""One rank of the collectives: joins the others, runs the checks (collectives with known results, one
step under DDP, the speed of all_reduce), and always prints one line of JSON.

    RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=... MASTER_PORT=... \
        python -m drumline.tools.doctor.ranks.doctor_rank nccl 60

The arguments are the backend and how many seconds a collective may take.

It exits with 0, or with 3 when something must be fixed.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drumline.base.background import in_background
from drumline.base.errors import DrumlineError, ExitCode, Place
from drumline.base.text import join_names, memory_size
from drumline.config.schema import WatchConfig
from drumline.rank.collectives import gather_json
from drumline.rank.sealed_store import SealedStore
from drumline.rank.tensor_hash import hash_tensors
from drumline.rank.torch_internals import load_compiler
from drumline.tools.doctor.finding import Finding, has_problems
from drumline.training.manager import RunManager

POLL_S = 0.1
# Ranks start at slightly different times, so all are late within this time.
LATE_START_S = 2.0
# Of a rank that has not published a phase.
NO_MARK = '{"number": 0, "phase": "its start", "host": "?", "is_late": false}'
NO_CONNECTION_FIX = (
    "open high ports between hosts, and check which network they use: drumline doctor --hosts"
)
LOST_FIX = (
    "find the pair of hosts that loses large messages (MTU, firewall): drumline doctor --hosts"
)
INSPECT_FIX = (
    "inspect that process (py-spy dump, dmesg), and check its host: drumline doctor --hosts"
)


class PhaseTimer:
    """A time limit for every phase of the collectives; when one is exceeded, the rank that blocks it
    is named.

    A collective that hangs cannot report itself, and torch's timeouts name no rank. So each rank
    writes its phase to the store, and when a phase takes too long, a timer checks which ranks are
    behind and which do not respond."""

    def __init__(
        self,
        *,
        limit_s: float,
        place: Callable[[], Place],
        on_late: Callable[[list[Finding]], None],
    ) -> None:
        """`place`: this rank and its host, as far as known."""
        self._limit_s = limit_s
        self._place = place
        self._on_late = on_late
        self._store: SealedStore | None = None
        self._world_size = 1
        self._number = 0
        self.current = "the start"

    def joined(self, store: SealedStore, world_size: int) -> None:
        """From here on ranks see each other's phases."""
        self._store = store
        self._world_size = world_size

    @contextlib.contextmanager
    def phase(self, name: str, *, limit_s: float | None = None) -> Iterator[None]:
        """`on_late` is called if it takes longer than the limit."""
        self._number += 1
        self.current = name
        self._write(name)
        limit = self._limit_s if limit_s is None else limit_s
        timer = threading.Timer(limit, self._late, [name, limit])
        timer.daemon = True
        timer.start()

        try:
            yield
        finally:
            timer.cancel()

    def _late(self, name: str, limit_s: float) -> None:
        """Called by the timer of a phase, in its thread."""
        searching = in_background(lambda: self._find_blocked(name, limit_s))
        try:
            findings = searching.result(2 * LATE_START_S)
        except (TimeoutError, dist.DistError, RuntimeError):
            place = self._place()
            what = (
                f"rank {place.rank} did not finish {name} within {limit_s:g} s, and rank 0, which runs the store, "
                "does not respond: it is stopped, or its host is cut off"
            )
            findings = [_finding(place.host or "?", what, rank=0)]

        self._on_late(findings)

    def _find_blocked(self, name: str, limit_s: float) -> list[Finding]:
        """Ranks that are behind, or that do not respond; if there are none, all that wait:

        rank 2 on gpu-01 did not reach a step under DDP within 15 s: it is still in the rendezvous
        ranks 0 and 1 all started all_reduce (sum) of ... and did not finish it within 15 s: what they ...
        """
        goal = f"{name} within {limit_s:g} s"
        if self._store is None:
            # The rendezvous itself reports ranks that never joined, so by now all have.
            place = self._place()
            what = f"{place} did not finish {goal}: ranks reach the rendezvous port, but not each other"
            return [_finding(place.host or "?", what, NO_CONNECTION_FIX)]

        self._write(name, is_late=True)
        deadline = time.monotonic() + LATE_START_S

        while True:
            marks = self._read(self._store)
            behind = [rank for rank, mark in marks.items() if mark["number"] < self._number]
            here = [rank for rank, mark in marks.items() if mark["number"] == self._number]
            unresponsive = [rank for rank in here if not marks[rank]["is_late"]]

            if behind or not unresponsive or time.monotonic() > deadline:
                break

            time.sleep(POLL_S)

        silence = f"finish {goal} and does not respond: it is stopped, or its host is cut off"
        blocked = dict.fromkeys(unresponsive, silence)
        if behind:
            blocked = {
                rank: f"reach {goal}: it is still in {marks[rank]['phase']}" for rank in behind
            }

        if blocked:
            hosts = {rank: marks[rank]["host"] for rank in blocked}
            return [
                _finding(hosts[rank], f"rank {rank} on {hosts[rank]} did not {what}", rank=rank)
                for rank, what in blocked.items()
            ]

        ranks = join_names(f"rank {rank}" for rank in here)
        where = join_names(dict.fromkeys(marks[rank]["host"] for rank in here))
        what = f"{ranks} all started {name} and did not finish it within {limit_s:g} s: what they send does not arrive"

        return [_finding(where, what, LOST_FIX)]

    def _write(self, phase: str, *, is_late: bool = False) -> None:
        """Publish the phase of this rank, and that it takes too long."""
        if self._store is not None:
            place = self._place()
            mark = {
                "number": self._number,
                "phase": phase,
                "host": place.host,
                "is_late": is_late,
            }
            self._store.set(f"doctor/{place.rank}", json.dumps(mark))

    def _read(self, store: SealedStore) -> dict[int, Any]:
        """The last mark of each rank."""
        marks = {rank: store.peek(f"doctor/{rank}") for rank in range(self._world_size)}
        return {rank: json.loads(mark or NO_MARK) for rank, mark in marks.items()}


def _finding(where: str, what: str, fix: str = INSPECT_FIX, rank: int | None = None) -> Finding:
    """A problem of the collectives, as the host of a rank has it."""
    return Finding("problem", "collectives", where, what, fix, rank)


DEVICES = {"gloo": "cpu", "nccl": "cuda"}
START_TIMEOUT_S = 60.0
# torch's own timeouts name no rank, so they are longer.
AFTER_OURS_S = 60.0
# Rank 0 runs the store in which the others search for the rank that blocks them, so it exits last.
LINGER_S = 3.0
GRACE_AFTER_START_S = 10.0
SMALL = 1
MEDIUM = 1000
LARGE = 1 << 20
LARGE_ON_GPUS = 16 * LARGE
ROUNDS = 5
# Weights of ranks stay small, so that sums over thousands of ranks are still exact in float32.
WEIGHTS = 16
BATCH = 16
INPUTS = 8
OUTPUTS = 4
WIDTH = 16
# In float64 an average of thousands of gradients is exact to many digits, in any order of addition.
TOLERANCE = 1e-9
LEARNING_RATE = 0.1
VALUE_FIX = (
    "test memory and links of that host (nvidia-smi -q -d ECC; dmesg), and leave it out until then"
)
# torch 2.13 renamed it, and warns about the old name, which earlier versions need.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RankReport:
    """What this rank has found and measured, which becomes one line of JSON."""

    def __init__(self, ddp: RunManager, *, write: Callable[[str], None] = print) -> None:
        self.ddp = ddp
        self.findings: list[Finding] = []
        self.numbers: dict[str, float] = {}
        self._write = write
        self._once = threading.Lock()

    def add(self, what: str, fix: str) -> None:
        """A fault that this rank has seen."""
        rank = self.ddp.rank
        host = self.ddp.host
        what = f"rank {rank} on {host}: {what}"
        self.findings.append(_finding(host, what, fix, rank))

    def print(self) -> ExitCode:
        """Print the line. The rank and its timer may both call it: the second blocks until the
        first exits the process."""
        self._once.acquire()
        is_wrong = has_problems(self.findings)
        result = {
            "rank": self.ddp.rank,
            "host": self.ddp.host,
            "ok": not is_wrong,
            "findings": [finding.as_json() for finding in self.findings],
            "numbers": self.numbers,
        }
        self._write(json.dumps(result))

        return ExitCode.PREFLIGHT_FAILED if is_wrong else ExitCode.SUCCESS

    def give_up(self, findings: list[Finding]) -> None:
        """Called when a phase does not end: print the findings and exit."""
        self.findings += findings
        code = self.print()
        sys.stdout.flush()
        time.sleep(LINGER_S)
        os._exit(code)


class Collectives:
    """The collectives on one device; tests replace it with a faulty one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """In place."""
        dist.all_reduce(tensor, op)
        return tensor

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """In place."""
        dist.broadcast(tensor, source)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, one after the other."""
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor)
        return torch.cat(parts)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """This rank's part of the sum."""
        part = torch.empty_like(tensor[: tensor.numel() // dist.get_world_size()])
        _reduce_scatter(part, tensor)
        return part

    def wait(self) -> None:
        """NCCL only enqueues work; this waits for it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def check_rank(
    report: RankReport,
    timer: PhaseTimer,
    make_collectives: Callable[[torch.device], Collectives] = Collectives,
) -> None:
    """Collective: join the others, then run all checks; what is wrong is in the report
    afterwards."""
    ddp = report.ddp
    if not _joins(report, timer):
        return

    try:
        report.numbers = run_checks(ddp, timer, make_collectives(ddp.device), report.add)
    except (DrumlineError, dist.DistError, RuntimeError) as error:
        report.add(f"{timer.current} failed: {_reason(error)}", "find out which rank failed first")


def _joins(report: RankReport, timer: PhaseTimer) -> bool:
    """Collective: whether this rank has joined the others; the report says why not."""
    ddp = report.ddp
    try:
        with timer.phase("the rendezvous", limit_s=START_TIMEOUT_S + GRACE_AFTER_START_S):
            is_joined = ddp.setup()
    except DrumlineError as error:
        num_gpus = torch.cuda.device_count()
        if 0 < num_gpus <= ddp.get_local_rank():
            what = f"NCCL needs a GPU per rank, and this host has {num_gpus} for {ddp.local_world_size} ranks"
            report.add(what, f"--procs {num_gpus}, or --backend gloo")
        else:
            report.add(error.what, error.next_step or "read the other ranks' findings")

        return False
    except (dist.DistError, RuntimeError) as error:
        report.add(f"the ranks could not connect: {_reason(error)}", NO_CONNECTION_FIX)
        return False

    store = ddp.connection.store
    if not is_joined or store is None:
        fix = "start it with drumline doctor --collectives"
        report.add("RANK is not set in the environment", fix)
        return False

    timer.joined(store, ddp.world_size)
    return True


def _reason(error: BaseException) -> str:
    """Its first line; for NCCL's errors, the one that follows `Last error:`."""
    text = str(error)
    last_error = text.partition("Last error:")[2]
    reason = last_error.strip() or text.strip() or type(error).__name__

    return reason.splitlines()[0].strip()


def main(argv: Sequence[str]) -> int:
    """The exit code of this rank."""
    backend, limit_s = argv
    load_compiler()
    ddp = RunManager(
        watch=WatchConfig(sidecar="off"),  # PhaseTimer replaces it
        device=DEVICES.get(backend, "auto"),
        backend=backend,
        start_timeout_s=START_TIMEOUT_S,
        train_timeout_s=float(limit_s) + AFTER_OURS_S,
    )
    report = RankReport(ddp)
    timer = PhaseTimer(
        limit_s=float(limit_s),
        place=ddp.place,
        on_late=report.give_up,
    )
    check_rank(report, timer)
    code = report.print()
    sys.stdout.flush()
    # The result is printed; a group that cannot be destroyed must not change it.
    exit_timer = threading.Timer(LINGER_S, os._exit, [code])
    exit_timer.daemon = True
    exit_timer.start()
    ddp.cleanup(broken=code != ExitCode.SUCCESS)
    exit_timer.cancel()

    return code


def run_checks(
    ddp: RunManager,
    timer: PhaseTimer,
    collectives: Collectives,
    report: Callable[[str, str], None],
) -> dict[str, float]:
    """Collective: each fault goes to `report`, with its fix; returns what was measured."""
    for check in known_results(collectives, rank=ddp.rank, world_size=ddp.world_size):
        with timer.phase(check.name):
            if fault := _fault(check, collectives):
                report(fault, VALUE_FIX)

    with timer.phase("a step under DDP"):
        for fault in ddp_faults(ddp):
            report(fault, VALUE_FIX)

    with timer.phase("the measurement of bandwidth"):
        numbers = _measure(collectives, ddp.world_size)

    with timer.phase("the last barrier"):
        ddp.barrier()
        collectives.wait()

    return numbers


# Collectives


@dataclass(frozen=True)
class CollectiveCheck:
    """A collective with its result, which every rank knows before."""

    name: str
    run: Callable[[], Tensor]
    expected: Tensor


def known_results(
    collectives: Collectives, *, rank: int, world_size: int
) -> Iterator[CollectiveCheck]:
    """The checks, sums of all sizes first, since gradients need them.

    With two ranks the weights are 1 and 2: element 6 of an all_reduce is 7 from the first and 14 from
    the second, 21 in all.
    """
    device = collectives.device
    weights = [peer % WEIGHTS + 1 for peer in range(world_size)]

    for dtype in (torch.float32, torch.int64):
        for is_sum, size in ((True, SMALL), (True, MEDIUM), (True, LARGE), (False, MEDIUM)):
            op = dist.ReduceOp.SUM if is_sum else dist.ReduceOp.MAX
            name = f"all_reduce ({'sum' if is_sum else 'max'}) of {_amount(size, dtype)}"
            tensor = (pattern(size, dtype) * weights[rank]).to(device)
            expected = pattern(size, dtype) * (sum(weights) if is_sum else max(weights))
            yield CollectiveCheck(name, partial(collectives.all_reduce, tensor, op), expected)

    for source in sorted({0, world_size - 1}):
        expected = pattern(MEDIUM) + source
        tensor = (expected if rank == source else torch.zeros(MEDIUM)).to(device)
        name = f"broadcast from rank {source} of {_amount(MEDIUM)}"
        yield CollectiveCheck(name, partial(collectives.broadcast, tensor, source), expected)

    everyone = torch.cat([pattern(MEDIUM) + peer for peer in range(world_size)])
    part = pattern(MEDIUM) + rank
    name = f"all_gather of {_amount(MEDIUM)}"
    yield CollectiveCheck(name, partial(collectives.all_gather, part.to(device)), everyone)

    name = f"reduce_scatter of {_amount(MEDIUM * world_size)}"
    tensor = (everyone * weights[rank]).to(device)
    expected = part * sum(weights)
    yield CollectiveCheck(name, partial(collectives.reduce_scatter, tensor), expected)


def pattern(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Neighbours differ, so that a value in the wrong place is found."""
    return (torch.arange(size) % 7 + 1).to(dtype)


def _amount(size: int, dtype: torch.dtype = torch.float32) -> str:
    """`4 MiB as float32`."""
    return f"{memory_size(size * dtype.itemsize)} as {str(dtype).removeprefix('torch.')}"


def _fault(check: CollectiveCheck, collectives: Collectives) -> str | None:
    """Collective: a message about the first wrong value:

    all_reduce (sum) of 4 MiB as float32 gave 1 wrong values of 1048576: element 7 is 3, expected 12
    """
    on_device = check.run()
    collectives.wait()
    result = on_device.cpu()
    wrong = (result != check.expected).nonzero()

    if not len(wrong):
        return None

    place = int(wrong[0])
    return (
        f"{check.name} gave {len(wrong)} wrong values of {result.numel()}: element {place} is "
        f"{result[place].item():g}, expected {check.expected[place].item():g}"
    )


# DDP


def ddp_faults(ddp: RunManager) -> Iterator[str]:
    """Collective: one step on a small model. Each rank knows all data, so it computes the average
    gradient itself.

    after one step under DDP the weights of rank 1 on gpu-02 differ from those of rank 0 on gpu-01
    """
    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS)).double()
    model = ddp.wrap(copy.deepcopy(plain))
    inputs, targets = _batch(ddp.rank)
    torch.autograd.backward(_loss(model, inputs.to(ddp.device), targets.to(ddp.device)))

    for peer in range(ddp.world_size):
        torch.autograd.backward(_loss(plain, *_batch(peer)) / ddp.world_size)

    yield from _wrong_gradients(plain, model, ddp.world_size)
    torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
    hashes = hash_tensors(list(model.parameters()), ddp.device).tolist()
    replicas = gather_json({"host": ddp.host, "hashes": hashes})
    first = replicas[0]
    odd = [
        f"rank {rank} on {replica['host']}"
        for rank, replica in enumerate(replicas)
        if replica["hashes"] != first["hashes"]
    ]

    if odd:
        ranks = join_names(odd)
        yield f"after one step under DDP the weights of {ranks} differ from those of rank 0 on {first['host']}"


def _wrong_gradients(plain: nn.Module, model: nn.Module, world_size: int) -> Iterator[str]:
    """Those of DDP must be the averages that this rank computed alone.

    the gradient of 0.weight is not the average over 2 ranks: element 3 is 0.25, expected 0.125
    """
    parameters = zip(plain.named_parameters(), model.parameters(), strict=True)
    for (name, expected), parameter in parameters:
        assert expected.grad is not None
        if parameter.grad is None:
            yield f"the gradient of {name} is missing after a backward pass under DDP"
            continue

        gradient = parameter.grad.cpu().flatten()
        average = expected.grad.flatten()
        wrong = ((gradient - average).abs() > TOLERANCE).nonzero()

        if len(wrong):
            place = int(wrong[0])
            yield (
                f"the gradient of {name} is not the average over {world_size} ranks: element {place} is "
                f"{gradient[place].item():.6g}, expected {average[place].item():.6g}"
            )


def _batch(rank: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a rank, the same wherever they are made."""
    generator = torch.Generator().manual_seed(1000 + rank)
    values = torch.randn(BATCH, INPUTS + OUTPUTS, generator=generator, dtype=torch.float64)
    return values[:, :INPUTS], values[:, INPUTS:]


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean square error."""
    loss: Tensor = (model(inputs) - targets).square().mean()
    return loss


# Speed


def _measure(collectives: Collectives, world_size: int) -> dict[str, float]:
    """Collective: bytes over the slowest link, counted as nccl-tests does, and the time of the
    smallest all_reduce."""
    device = collectives.device
    size = LARGE_ON_GPUS if device.type == "cuda" else LARGE
    tensor = torch.ones(size, device=device)
    moved = tensor.nbytes * 2 * (world_size - 1) / world_size
    bytes_per_s = moved / _seconds(collectives, tensor)
    latency_s = _seconds(collectives, torch.ones(SMALL, device=device))

    return {
        "world_size": world_size,
        "all_reduce_bytes": tensor.nbytes,
        "all_reduce_gb_per_s": bytes_per_s / 1e9,
        "all_reduce_latency_us": latency_s * 1e6,
    }


def _seconds(collectives: Collectives, tensor: Tensor) -> float:
    """Of one all_reduce, on average."""
    # the first one makes connections and buffers
    collectives.all_reduce(tensor, dist.ReduceOp.MAX)
    collectives.wait()
    start = time.perf_counter()

    for _ in range(ROUNDS):
        collectives.all_reduce(tensor, dist.ReduceOp.MAX)

    collectives.wait()
    return (time.perf_counter() - start) / ROUNDS


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(exit_code)
