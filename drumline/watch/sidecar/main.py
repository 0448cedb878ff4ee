"""The process of the sidecar, which the first rank of each node starts (rank/watched/watched_rank.py). Its
failure does not affect the ranks. What it reads is listed in `__init__.py`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drumline.base.untrusted import from_json, read_json, replace_text
from drumline.watch.diagnosis.diagnosis import RaisedAlarm
from drumline.watch.diagnosis.evidence import has_left, is_done
from drumline.watch.diagnosis.watchdog import urgent_symptoms
from drumline.watch.sidecar.leader import FRESH_S, Leader
from drumline.watch.sidecar.local_ranks import LocalRanks, ScriptReports
from drumline.watch.sidecar.metrics_server import serve_metrics
from drumline.watch.sidecar.sidecar_network import NUM_HUBS, SidecarNetwork
from drumline.watch.sidecar.sidecar_options import SidecarOptions
from drumline.watch.sidecar.sidecar_reporter import SidecarReporter
from drumline.watch.status_file import RunPace, StepRates, status_record
from drumline.watch.watch_folder import FURTHEST_STEP, SIDECAR, hold

TICK_S = 0.2
DECIDE_S = 0.4
HEARTBEAT_S = 0.5
STATUS_S = 1.0

# What a message of another version, or a damaged report, raises.
INVALID = (KeyError, TypeError, ValueError, AttributeError)

# A lower priority than the ranks, which may use all cores; when they hang, cores are free.
NICE = 5

# A longer gap means that this process had no CPU time, and observed nothing.
LATE_S = 1.0

# How long to wait after the ranks of this node are done: for those of other nodes, and for the
# report of a failure.
LINGER_S = 6.0


class Sidecar:
    """The one process of a node that observes its ranks."""

    def __init__(self, options: SidecarOptions) -> None:
        self.options = options
        self.reporter = SidecarReporter(options)

        listener = None  # one node
        address = ""
        if options.listener is not None:
            listener = socket.socket(fileno=options.listener)
            address = listener.getsockname()[0]

        self.ranks = LocalRanks(options, address)
        self.network = SidecarNetwork(
            me=options.node,
            peers=options.peers,
            secret=options.secret.encode(),
            on_message=self._receive,
            listener=listener,
        )
        self.leader = Leader(options, self.ranks, self.network, self.reporter, self._act)
        self.scripts = ScriptReports(options)

        self.is_requested = False
        """Whether SIGTERM was received: a launcher may send it to all processes, and the ranks must
        exit first."""

        self.has_lost_starter = False
        """The rank that started this process has exited, or is out of its loop."""

        self._done_since: float | None = None
        """None: its ranks are not done."""

        self._deciding: asyncio.Task[None] | None = None
        """The latest decision, which may still wait for other nodes."""

        self._awake_s = 0.0
        """For how long this process had CPU time."""

        self._heartbeat_at = 0.0
        self._status_at = 0.0
        self._decided_at = 0.0
        self._furthest_step = 0
        self._rates = StepRates()

        self._tasks: set[asyncio.Task[None]] = set()
        self._errors: set[str] = set()
        """Those that were reported."""

    async def run(self) -> None:
        """Until its work is over."""
        loop = asyncio.get_running_loop()
        self._follow_requests(loop)
        await self.network.start()
        if self.options.prometheus:
            self._start(serve_metrics(self.options, self.ranks, self.reporter.print))

        before = time.monotonic()
        while not self.is_over(time.monotonic()):
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self._awake_s += min(now - before, LATE_S)
            before = now
            self._tick(now, loop)

        await self._leave()

    def is_over(self, now: float) -> bool:
        """Whether its ranks are done and that was reported, not all of them ever started, or its
        folder was removed or taken by a later sidecar (of a second group in the same processes)."""
        if read_json(int, Path(self.options.folder, SIDECAR)) != os.getpid():
            return True

        never_started = self.has_lost_starter and not self.ranks.have_started
        has_acted = self.leader.has_acted
        if self.is_requested and (has_acted or never_started):
            return True

        if not (self.ranks.are_done or never_started):
            self._done_since = None
            return False

        self._done_since = self._done_since or now

        # Ranks that exited without an error need no report; for others, the failure must be
        # reported first.
        is_reported = has_acted or (not never_started and self.leader.all_have_left())
        return is_reported or now - self._done_since > LINGER_S

    def _follow_requests(self, loop: asyncio.AbstractEventLoop) -> None:
        """Note when the rank that started this process closes stdin, and when SIGTERM comes."""

        def on_stdin_closed() -> None:
            loop.remove_reader(sys.stdin.fileno())
            self.has_lost_starter = True

        def request_exit(number: int, frame: object) -> None:
            self.is_requested = True

        # Not by the loop: it closes its pipe for signals before it removes the handlers, and one
        # that comes in between is printed as an error.
        signal.signal(signal.SIGTERM, request_exit)
        loop.add_reader(sys.stdin.fileno(), on_stdin_closed)

    def _tick(self, now: float, loop: asyncio.AbstractEventLoop) -> None:
        """Observe the ranks, and do what is due."""
        is_urgent = self._observe(now)
        self.leader.is_urgent |= is_urgent
        self.ranks.observe_exits(loop)
        self._share_scripts()

        if self.options.peers and (is_urgent or now - self._heartbeat_at >= HEARTBEAT_S):
            self._heartbeat_at = now
            self._send_heartbeat()

        self._decide(now)

        if is_urgent:
            self._write_furthest_step()

        if now - self._status_at >= STATUS_S:
            self._status_at = now
            self._write_furthest_step()
            self._write_status()

    def _observe(self, now: float) -> bool:
        """Observe the ranks: whether one has a new symptom that is diagnosed at once."""
        symptoms_before = urgent_symptoms(self.ranks.state.ranks)
        state = self.ranks.observe(now, self.network.heartbeat_ages())
        return urgent_symptoms(state.ranks) != symptoms_before

    def _leads(self) -> bool:
        """Whether no node with a lower number sends heartbeats."""
        ages = self.network.heartbeat_ages()
        lower = range(min(self.options.node, NUM_HUBS))
        return not any(ages.get(node, FRESH_S + 1) <= FRESH_S for node in lower)

    def _decide(self, now: float) -> None:
        """Have the leader decide, if it is time and the last decision is made."""
        is_due = now - self._decided_at >= DECIDE_S or self.leader.is_urgent
        is_free = self._deciding is None or self._deciding.done()
        if is_free and self.ranks.have_started and is_due:
            self._decided_at = now
            work = self.leader.update(lambda: self._awake_s, leads=self._leads())
            self._deciding = self._start(work)

    def _share_scripts(self) -> None:
        """Send new reports of scripts to the nodes that may lead."""
        for rank, record in self.scripts.update(self.network):
            with contextlib.suppress(*INVALID):
                self.leader.receive_script(rank, record)

    def _send_heartbeat(self, *, is_last: bool = False) -> None:
        """The state of the ranks here, to all nodes that this one is connected with."""
        state = asdict(self.ranks.state)
        self.network.send_to_all({"kind": "heartbeat", "state": state, "is_last": is_last})

    def _write_furthest_step(self) -> None:
        """For the launcher: a job that makes progress is restarted again and again."""
        step = max((rank.step for rank in self.ranks.state.ranks), default=0)
        if step <= self._furthest_step:
            return

        self._furthest_step = step
        with contextlib.suppress(OSError):
            replace_text(Path(self.options.folder, FURTHEST_STEP), str(step))

    def _write_status(self, *, is_last: bool = False) -> None:
        """As the leader: the file for `drumline watch`."""
        if not self.ranks.have_started or not self._leads():
            return

        cluster = self.leader.cluster()
        rates = self._rates.update(cluster, time.monotonic())
        record = status_record(
            cluster,
            now=time.time(),
            world_size=self.options.world_size,
            hang_s=self.options.hang_s,
            pace=RunPace(rates, self.ranks.step_times()),
            notices=self.leader.notices,
            # After a hang or a failure the launcher may restart it.
            has_ended=is_last and all(is_done(rank) or has_left(rank) for rank in cluster.ranks),
        )
        self.reporter.write_status(record)

    # Messages of other sidecars

    def _receive(self, node: int, message: dict[str, Any]) -> None:
        """From a peer that knows the secret; an invalid message is from another version, and is
        ignored."""
        with contextlib.suppress(*INVALID):
            match message["kind"]:
                case "heartbeat":
                    self.leader.receive_heartbeat(node, message)
                case "script":
                    self.leader.receive_script(int(message["rank"]), message["report"])
                case "inspected":
                    self.leader.receive_inspected(node, message)
                case "inspect":
                    self._start(self._inspect(node, int(message["number"])))
                case "act":
                    self._act_here(from_json(RaisedAlarm, message))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Beside the rest; an error of it is reported."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._report_error)
        return task

    def _report_error(self, task: asyncio.Task[None]) -> None:
        """Report an error in the sidecar itself, once per kind; it continues with the next
        decision."""
        if task.cancelled() or (error := task.exception()) is None:
            return

        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({Path(where.filename).name}, line {where.lineno})"
        if text in self._errors:
            return

        self._errors.add(text)
        self.reporter.print(
            f"the sidecar on {self.options.host} had an error, and continues: {text}"
        )

    async def _inspect(self, node: int, number: int) -> None:
        """Answer the question of another sidecar."""
        state = await self.ranks.inspect()
        self.network.send(node, {"kind": "inspected", "number": number, "state": asdict(state)})

    def _act(self, raised: RaisedAlarm) -> None:
        """As the leader: have all nodes act, this one last."""
        self.network.send_to_all({"kind": "act", **asdict(raised)})
        self._act_here(raised, was_printed=not raised.diagnosis.is_ranks_error)

    def _act_here(self, raised: RaisedAlarm, *, was_printed: bool = False) -> None:
        """What one node does about an alarm: tell its launcher, and perhaps end its ranks."""
        self._write_furthest_step()
        with contextlib.suppress(OSError):
            self.reporter.write_for_launcher(raised, was_printed=was_printed)

        ends_job = raised.action in ("restart", "stop")

        # Otherwise a failure would be reported again when the leader has exited.
        self.leader.has_acted |= ends_job or raised.alarm == "failure"
        if ends_job:
            self.ranks.kill(raised.diagnosis.what)

    async def _leave(self) -> None:
        """Report what is left, send a last heartbeat, and remove the folder."""
        self._share_scripts()
        if self._leads() and not self.leader.has_acted:
            self.leader.report_differences()

        self._send_heartbeat(is_last=True)
        await asyncio.sleep(0)
        await self.reporter.drain()

        self._write_status(is_last=True)
        await self.reporter.drain()
        await self.network.close()

        if self.options.owns_folder:
            shutil.rmtree(self.options.folder, ignore_errors=True)


def main() -> None:
    """The options come as a line of JSON on stdin."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)

    options = from_json(SidecarOptions, json.loads(sys.stdin.readline()))
    try:
        Path(options.folder, SIDECAR).write_text(str(os.getpid()), encoding="utf-8")
        if options.owns_folder:
            hold(Path(options.folder))  # until the exit
    except FileNotFoundError:  # the job was over before this process started
        return

    asyncio.run(Sidecar(options).run())
    sys.stdout.flush()

    # Do not wait for a thread that may be blocked in the run folder.
    os._exit(0)
