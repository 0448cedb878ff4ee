"""The sidecar: a process that the first rank of each node starts (rank/beside.py); its terms come on stdin.

It looks at its ranks five times a second and tells the hubs twice a second, and at once when one has ended or is
stopped. Nothing that happens to it is felt by the ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from drumline.launch.node.watch_folder import SIDECAR, hold
from drumline.watch.diagnosis.diagnosis import Diagnosis
from drumline.watch.diagnosis.evidence import is_done
from drumline.watch.facts import to_json
from drumline.watch.sidecar.channel import NUM_HUBS, Channel, heard_at_all
from drumline.watch.sidecar.chief import SILENT_S, Chief, is_said, urgent
from drumline.watch.sidecar.ending import Ending
from drumline.watch.sidecar.node import Node
from drumline.watch.sidecar.noted import Noted
from drumline.watch.sidecar.telling import Teller
from drumline.watch.sidecar.terms import Terms, terms_from_json
from drumline.watch.status.record import StepRates, status_record

TICK_S = 0.2
CONSIDER_S = 0.4
PULSE_S = 0.5
STATUS_S = 1.0
# Behind the ranks, where they leave no core free; when they hang, they do.
NICE = 5
# In which this process did not run, and so could see nothing.
LATE_S = 1.0


class Sidecar:
    """One node's."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.teller = Teller(terms)
        listener = None if terms.listener is None else socket.socket(fileno=terms.listener)
        self.node = Node(terms, "" if listener is None else listener.getsockname()[0])
        self.channel = None if listener is None else self._open_channel(listener)
        self.chief = Chief(terms, self.node, self.channel, self.teller, self._act)
        self.noted = Noted(terms)
        self.ending = Ending(Path(terms.folder), self.node, self.chief)
        self._considering: asyncio.Task[None] | None = None
        self._awake_s = 0.0
        self._pulse_at = self._status_at = self._considered_at = 0.0
        self._rates = StepRates()
        self._tasks: set[asyncio.Task[None]] = set()
        self._errors: set[str] = set()

    async def run(self) -> None:
        """To the end of the node's ranks."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._told_to_end)
        loop.add_reader(sys.stdin.fileno(), self._starter_closed)
        if self.channel is not None:
            await self.channel.start()
        before = time.monotonic()
        while not self.ending.is_due(time.monotonic()):
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self._awake_s += min(now - before, LATE_S)
            before = now
            seen = urgent(self.node.facts)
            is_urgent = urgent(self.node.look(now, self._heard())) != seen
            self.chief.has_news |= is_urgent
            self.node.hear_ends(loop)
            self._share_notes()
            self._send_pulse(now, at_once=is_urgent)
            self._consider(now)
            self._show_status(now)
        await self._leave()

    def _told_to_end(self) -> None:
        self.ending.is_told = True

    def _starter_closed(self) -> None:
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        self.ending.has_lost_starter = True

    def _heard(self) -> dict[int, float]:
        return {} if self.channel is None else heard_at_all(self.channel.heard_s())

    def _is_chief(self) -> bool:
        heard = self._heard()
        lower = [
            node
            for node in range(min(self.terms.node, NUM_HUBS))
            if heard.get(node, SILENT_S + 1) <= SILENT_S
        ]
        return not lower

    def _consider(self, now: float) -> None:
        if self._considering is not None and self._considering.done():
            self._note_error(self._considering)
            self._considering = None
        is_due = now - self._considered_at >= CONSIDER_S or self.chief.has_news
        if self._considering is None and self.node.has_begun and is_due:
            self._considered_at = now
            work = self.chief.consider(lambda: self._awake_s, speaks=self._is_chief())
            self._considering = asyncio.ensure_future(work)

    def _share_notes(self) -> None:
        for rank, record in self.noted.look(self.channel):
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
                self.chief.hear_note(rank, record)

    def _send_pulse(self, now: float, *, is_last: bool = False, at_once: bool = False) -> None:
        if self.channel is None or (now - self._pulse_at < PULSE_S and not (is_last or at_once)):
            return
        self._pulse_at = now
        message = {"kind": "pulse", "facts": to_json(self.node.facts), "is_last": is_last}
        for peer in self.terms.peers:
            self.channel.send(peer.node, message)

    def _show_status(self, now: float, *, is_last: bool = False) -> None:
        if (
            not self.node.has_begun
            or not self._is_chief()
            or (now - self._status_at < STATUS_S and not is_last)
        ):
            return
        self._status_at = now
        picture = self.chief.picture()
        record = status_record(
            picture,
            now=time.time(),
            world_size=self.terms.world_size,
            hang_s=self.terms.hang_s,
            rates=self._rates.look(picture, now),
            words=self.chief.last_words,
            # After a hang or a failure the launcher may start it again.
            has_ended=is_last and all(map(is_done, picture.ranks)),
        )
        self.teller.show_status(record)

    def _open_channel(self, listener: socket.socket) -> Channel:
        return Channel(
            me=self.terms.node,
            peers=self.terms.peers,
            secret=self.terms.secret.encode(),
            on_message=self._hear,
            listener=listener,
        )

    def _hear(self, node: int, message: dict[str, Any]) -> None:
        """Of a peer that knows the secret; what makes no sense is of another version, and left aside."""
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            match message["kind"]:
                case "pulse":
                    self.chief.hear_pulse(node, message)
                case "note":
                    self.chief.hear_note(int(message["rank"]), message["note"])
                case "gathered":
                    self.chief.hear_gathered(node, message)
                case "gather":
                    self._spawn(self._answer(node, int(message["number"])))
                case "act":
                    self._end_ranks(
                        message["alarm"], Diagnosis.from_json(message["diagnosis"]), message["action"]
                    )

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._note_error)

    def _note_error(self, task: asyncio.Task[None]) -> None:
        """One of our own making. It is told once of a kind, and the next look may be a better one."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        where = traceback.extract_tb(error.__traceback__)[-1]
        told = f"{type(error).__name__}: {error} ({Path(where.filename).name}, line {where.lineno})"
        if told not in self._errors:
            self._errors.add(told)
            self.teller.say(f"the watch on {self.terms.host} has an error of its own, and goes on: {told}")

    async def _answer(self, node: int, number: int) -> None:
        facts = await self.node.look_closely(self._heard())
        assert self.channel is not None
        self.channel.send(node, {"kind": "gathered", "number": number, "facts": to_json(facts)})

    def _act(self, alarm: str, diagnosis: Diagnosis, action: str) -> None:
        """As the chief: all nodes do the same, this one last."""
        message = {"kind": "act", "alarm": alarm, "diagnosis": diagnosis.to_json(), "action": action}
        for peer in self.terms.peers:
            if self.channel is not None:
                self.channel.send(peer.node, message)
        self._end_ranks(alarm, diagnosis, action, was_told=is_said(diagnosis))

    def _end_ranks(self, alarm: str, diagnosis: Diagnosis, action: str, *, was_told: bool = False) -> None:
        with contextlib.suppress(OSError):
            self.teller.hand_to_launcher(alarm, diagnosis, action, was_told=was_told)
        if action in ("restart", "stop"):
            self.chief.has_acted = True
            self.node.kill()
        elif alarm == "failure":
            self.chief.has_acted = True  # or it would be told once more when the chief has left

    async def _leave(self) -> None:
        self._share_notes()
        if self._is_chief() and not self.chief.has_acted:
            self.chief.report_differences()
        if self.channel is not None:
            self._send_pulse(time.monotonic(), is_last=True)
            await asyncio.sleep(0)
        await self.teller.drain()
        self._show_status(time.monotonic(), is_last=True)
        await self.teller.drain()
        if self.channel is not None:
            await self.channel.close()
        if self.terms.owns_folder:
            shutil.rmtree(self.terms.folder, ignore_errors=True)


def main() -> None:
    """Read the terms, and watch."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    terms = terms_from_json(sys.stdin.readline())
    try:
        Path(terms.folder, SIDECAR).write_text(str(os.getpid()), encoding="utf-8")
        if terms.owns_folder:
            hold(Path(terms.folder))  # to the end
    except FileNotFoundError:  # the job was over before this process was there
        return
    asyncio.run(Sidecar(terms).run())
    sys.stdout.flush()
    # Not waiting for a thread that may hang in the run folder.
    os._exit(0)
