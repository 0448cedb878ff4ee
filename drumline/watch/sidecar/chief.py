"""The sidecar that has the whole picture: it sees when something is wrong, has all look closely, and says what it is.

Every hub could be the chief, and follows the run as if it were; the lowest that is heard speaks and acts.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from drumline.watch.beats.phase import Phase
from drumline.watch.diagnosis.diagnose import diagnose
from drumline.watch.diagnosis.diagnosis import Cause, Diagnosis
from drumline.watch.diagnosis.triggers import urgent_symptoms
from drumline.watch.diagnosis.watchdog import Recovery, Watchdog
from drumline.watch.facts import Answer, NodeFacts, Picture, Silent, node_from_json
from drumline.watch.scripts.differing import ScriptComparison
from drumline.watch.scripts.notes import Note, note_from_json
from drumline.watch.sidecar.channel import Channel, Peer, heard_at_all
from drumline.watch.sidecar.line import ANSWERS
from drumline.watch.sidecar.node import Node
from drumline.watch.sidecar.telling import Teller
from drumline.watch.sidecar.terms import Terms
from drumline.watch.sidecar.unheard import PATIENCE_S, Unheard
from drumline.watch.stragglers import Stragglers

# Pulses come twice a second.
SILENT_S = 1.5
GATHER_S = 2.0


class Chief:
    """What one sidecar knows of all nodes, and makes of it."""

    def __init__(
        self,
        terms: Terms,
        node: Node,
        channel: Channel | None,
        teller: Teller,
        act: Callable[[str, Diagnosis, str], None],
    ) -> None:
        self.terms = terms
        self.node = node
        self.channel = channel
        self.teller = teller
        self._act = act
        self._latest: dict[int, NodeFacts] = {}
        self._gathered: dict[int, NodeFacts] = {}
        self._gathering = 0
        self._gone: set[int] = set()
        self._watchdog = Watchdog(hang_s=terms.hang_s, world_size=terms.world_size)
        self._stragglers = Stragglers(terms.slow_factor)
        self._unheard = Unheard(terms.host)
        self._notes: dict[int, Note] = {}
        self._comparison = ScriptComparison(terms.world_size)
        self.last_words: list[str] = []
        self._has_new_notes = False
        self.has_news = False
        """Whether a rank has ended or was stopped since the last look: the next one need not wait."""
        self.has_acted = False
        """Whether the run was ended: nothing that follows is news."""

    def hear_pulse(self, node: int, message: Mapping[str, Any]) -> None:
        before, facts = self._latest.get(node), node_from_json(message["facts"])
        self.has_news |= before is not None and urgent(before) != urgent(facts)
        self._latest[node] = facts
        if message.get("is_last"):
            self._gone.add(node)

    def hear_note(self, rank: int, record: Mapping[str, Any]) -> None:
        self._notes[rank] = note_from_json(record)
        self._has_new_notes = True

    def hear_gathered(self, node: int, message: Mapping[str, Any]) -> None:
        if message["number"] == self._gathering:
            self._gathered[node] = node_from_json(message["facts"])

    def picture(self, closely: Mapping[int, NodeFacts] | None = None) -> Picture:
        """As of now; with what was gathered where there is something."""
        self._latest[self.terms.node] = self.node.facts
        nodes = {**self._latest, **(closely or {})}
        heard = {} if self.channel is None else self.channel.heard_s()
        mine = replace(nodes[self.terms.node], heard_s=heard_at_all(heard))
        nodes[self.terms.node] = mine
        # What a silent node said last still holds, and may explain its silence.
        return Picture(
            me=self.terms.node,
            nodes=tuple(facts for _, facts in sorted(nodes.items())),
            silent=tuple(
                self._silent(peer, nodes.get(peer.node), mine.heard_s[peer.node])
                for peer in self.terms.peers
                if peer.node not in self._gone and mine.heard_s.get(peer.node, 0.0) > SILENT_S
            ),
            unheard=tuple(self._never_heard(heard)),
        )

    def _silent(self, peer: Peer, last: NodeFacts | None, silent_s: float) -> Silent:
        how = "" if self.channel is None else self.channel.how_silent(peer.node)
        return Silent(
            node=peer.node,
            host=peer.host if last is None else last.host,
            ranks=() if last is None else tuple(rank.rank for rank in last.ranks),
            silent_s=silent_s,
            how=how,
            answer=ANSWERS.get(how, Answer.NONE),
        )

    def _never_heard(self, heard: Mapping[int, float]) -> Iterator[Silent]:
        """They have not begun yet, or are gone already. Later on their port is closed to us while their ranks train,
        and that is said."""
        up_s = math.inf if self.channel is None else self.channel.up_s()
        for peer in self.terms.peers:
            if heard.get(peer.node) == math.inf and up_s < PATIENCE_S:
                yield self._silent(peer, None, up_s)

    def has_nobody_left(self) -> bool:
        """Whether every rank that is known of is out of its loop; of a node that was not heard nothing is known."""
        ranks = self.picture().ranks
        return len(ranks) < self.terms.world_size or all(rank.phase is Phase.LEFT for rank in ranks)

    async def consider(self, clock: Callable[[], float], *, speaks: bool) -> None:
        """One look at the whole. `clock`: seconds in which this process was awake."""
        picture, now = self.picture(), clock()
        recovery = self._watchdog.observe(picture, now)
        self.has_news = self._watchdog.is_in_grace
        if not speaks or self.has_acted:
            return
        if recovery is not None:
            self._tell_recovery(recovery)
        self.report_differences()
        for straggler in self._stragglers.observe(_activity(picture), now):
            kind = "recovery" if straggler.is_over else "straggler"
            self.teller.notice(
                kind,
                rank=straggler.rank,
                host=straggler.host,
                message=straggler.sentence,
                what=straggler.what,
            )
            self.last_words.append(straggler.sentence)
        if warning := self._unheard.look(self.channel, now):
            self.teller.say(warning)
            self.last_words.append(warning)
        if self._watchdog.wants_evidence:
            closely = self.picture(await self._gather())
            self._conclude(diagnose(closely), closely, clock())

    def report_differences(self) -> None:
        """Of ranks that run a script."""
        if not self._has_new_notes:
            return
        self._has_new_notes = False
        for found in self._comparison.look(self._notes):
            self.teller.notice(
                "difference", rank=found.rank, host=found.host, step=found.step, message=found.sentence
            )
            self.last_words.append(found.sentence)

    def _conclude(self, diagnosis: Diagnosis | None, picture: Picture, now: float) -> None:
        alarm = self._watchdog.decide(diagnosis, self.picture(), now)
        if alarm is None or diagnosis is None:
            return
        if alarm == "stall":
            diagnosis = self._watchdog.with_duration(diagnosis, ends_job=self.terms.on_hang != "report")
        at = time.time()
        action = self.terms.on_hang if alarm == "hang" else "none"
        sentence = diagnosis.sentence(alarm)
        if is_said(diagnosis):
            self.teller.say(sentence)
        self.last_words.append(sentence)
        self.teller.write_down(alarm, diagnosis, picture, action, at)
        if alarm != "stall":
            self.has_acted = action in ("restart", "stop") or alarm == "failure"
            self._act(alarm, diagnosis, action)

    def _tell_recovery(self, recovery: Recovery) -> None:
        self.last_words.append(recovery.sentence)
        diagnosis = recovery.diagnosis
        self.teller.notice("stall", rank=diagnosis.rank, host=diagnosis.host, message=recovery.sentence)

    async def _gather(self) -> dict[int, NodeFacts]:
        """Every node that is heard looks closely, this one too."""
        self._gathering += 1
        self._gathered = {}
        heard = {} if self.channel is None else self.channel.heard_s()
        asked = {
            node
            for node, age in heard.items()
            if age <= SILENT_S
            and node not in self._gone
            and self.channel is not None
            and self.channel.send(node, {"kind": "gather", "number": self._gathering})
        }
        mine = asyncio.ensure_future(self.node.look_closely(self.node.facts.heard_s))
        deadline = time.monotonic() + GATHER_S
        while (not mine.done() or not asked <= self._gathered.keys()) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        found = dict(self._gathered)
        if mine.done():
            found[self.terms.node] = mine.result()
        else:
            mine.cancel()
        return found


def _activity(picture: Picture) -> Picture:
    """With what scripts are seen to do, where ranks mark no phases themselves."""
    nodes = tuple(replace(node, ranks=node.activity or node.ranks) for node in picture.nodes)
    return replace(picture, nodes=nodes)


def urgent(node: NodeFacts) -> frozenset[str]:
    """What is certainly wrong with its ranks."""
    return urgent_symptoms(node.ranks)


def is_said(diagnosis: Diagnosis) -> bool:
    """Whether a sidecar says it on its screen; an error is told by the rank itself, or by the launcher."""
    return diagnosis.cause is not Cause.EXCEPTION
