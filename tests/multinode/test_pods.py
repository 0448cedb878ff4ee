"""The commands of a manifest's pods as they are written, run on test hosts with what Kubernetes sets:
the downward API's variables, the secret, and the names of the headless service."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from drumline.config import FlagValues
from drumline.launch.kubernetes import Api, KubernetesJob, manifest_text
from drumline.launch.node_plan import Program
from drumline.launch.pod_template import pods_of
from drumline.runs.events import read_events
from tests.multinode import processes
from tests.multinode.hosts import Host, Testbed
from tests.multinode.job import Job

yaml = pytest.importorskip("yaml", reason="pip install 'drumline[dev]' brings it")
ROOT = Path(__file__).parents[2]
MakeTestbed = Callable[..., Testbed]
# By the names of the services that the forms have.
FIRST_POD: dict[Api, str] = {
    "job": "digits-0.digits",
    "jobset": "digits-node-0-0.digits",
    "trainjob": "digits-node-0-0.digits",
    "pytorchjob": "digits-master-0",
}
PROGRAMS = {"drumline": "drumline", "torchrun": "torch.distributed.run"}
SECRET = "of the Secret digits-secret"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
SCRIPT = """
import os, socket
words = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")]
print(socket.gethostname(), *words, flush=True)
"""
TASK = """
import os, time
from drumline.training.tasks import ImageClassification

class Digits(ImageClassification):
    defaults = {"data.name": "digits", "model.widths": [4], "train.steps": 12, "train.batch_size": 64}

    def loss(self, model, batch):
        time.sleep(0.3 if os.path.exists("slow") else 0)
        return super().loss(model, batch)
"""


def container_of(job: KubernetesJob, api: Api = "job", *, number: int = 0) -> dict[str, Any]:
    """Of the pod with this index: in a PyTorchJob the first one has a template of its own."""
    templates = list(pods_of(list(yaml.safe_load_all(manifest_text(job, api)))))
    container: dict[str, Any] = templates[min(number, len(templates) - 1)]["spec"]["containers"][0]
    return container


def operator_variables(api: Api, number: int) -> dict[str, str]:
    """What an operator adds to a pod."""
    if api == "trainjob":
        address = {"PET_MASTER_ADDR": FIRST_POD[api], "PET_MASTER_PORT": "29500"}
        return {**address, "PET_NODE_RANK": str(number), "PET_NNODES": "2"}
    if api == "pytorchjob":
        address = {"MASTER_ADDR": FIRST_POD[api], "MASTER_PORT": "23456"}
        return {**address, "RANK": str(number), "WORLD_SIZE": "2", "PET_NNODES": "2"}
    # Of a pod that is none of theirs: ranks of another counting.
    return {"RANK": "7"}


def environment(
    container: dict[str, Any], *, number: int, address: str, api: Api = "job"
) -> dict[str, str]:
    """As the kubelet makes it."""
    fields = {"status.podIP": address, INDEX: str(number)}
    values = operator_variables(api, number)
    for entry in container["env"]:
        source = entry.get("valueFrom", {})
        if "fieldRef" in source:
            values[entry["name"]] = fields[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            values[entry["name"]] = SECRET
        else:
            values[entry["name"]] = entry["value"].replace("$$", "$")
    return values


def command(container: dict[str, Any], variables: dict[str, str]) -> list[str]:
    """As Kubernetes expands it: `$$` is `$`, `$(X)` a variable."""
    expanded = lambda match: "$" if match[0] == "$$" else variables[match[1]]  # noqa: E731
    words = container["command"] + container["args"]
    return [re.sub(r"\$\$|\$\((\w+)\)", expanded, word) for word in words]


def start_pod(
    container: dict[str, Any], *, number: int, host: Host, cwd: Path, api: Api = "job"
) -> Job:
    """The pod with this index on the host."""
    variables = environment(container, number=number, address=host.address, api=api)
    program, *words = command(container, variables)
    # The image has drumline, torch and the code.
    variables |= {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    return host.start(host.python, "-m", PROGRAMS[program], *words, env=variables, cwd=cwd)


def publish(bed: Testbed, job: str, pods: Sequence[Host]) -> None:
    """The records of the headless service: `JOB-INDEX.JOB` is the pod's address, and no more."""
    names = {f"{job}-{number}.{job}": host.address for number, host in enumerate(pods)}
    for host in bed:
        host.set_names({host.name: host.address, **names})


LAUNCHERS = {"drumline": 1, "torchrun": None}


@pytest.mark.parametrize(
    ("api", "launcher"),
    [
        pytest.param(
            api, launcher, marks=() if (api, launcher) == ("job", "drumline") else pytest.mark.soak
        )
        for api in FIRST_POD
        for launcher in LAUNCHERS
    ],
)
def test_pods_of_a_script_join_as_one_job(
    make_testbed: MakeTestbed, tmp_path: Path, api: Api, launcher: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    bed = make_testbed("a", "b", warm=True)
    for host in bed:
        host.set_names({host.name: host.address, FIRST_POD[api]: bed["a"].address})
    manifest = KubernetesJob(
        name="digits",
        flags=FlagValues({"image": "i"}),
        program=Program(("script.py",)),
        num_nodes=2,
        num_procs=2,
        min_nodes=LAUNCHERS[launcher],
    )
    jobs = []
    for number, host in enumerate(bed):
        container = container_of(manifest, api, number=number)
        assert container["command"][0] == launcher
        jobs.append(start_pod(container, number=number, host=host, cwd=tmp_path, api=api))
    assert [job.wait(100) for job in jobs] == [0, 0], [job.text() for job in jobs]
    lines = [line.split() for job in jobs for line in job.text().splitlines()]
    ranks = {words[1]: words for words in lines if words[:1] in (["a"], ["b"])}
    assert sorted(ranks) == ["0", "1", "2", "3"]
    assert all(words[2] == "4" for words in ranks.values())
    if launcher == "drumline":  # torchrun numbers nodes as they come
        assert [ranks[rank][0] for rank in sorted(ranks)] == ["a", "a", "b", "b"]


def task_job(folder: Path, **changes: Any) -> KubernetesJob:
    run = str(folder / "run")
    words = ("train", "task.py:Digits", "--run", run, "--log.every_steps", "1")
    program = Program(words, is_task=True, run=run)
    fields: dict[str, Any] = {"name": "digits", "program": program, "num_nodes": 2}
    return KubernetesJob(flags=FlagValues({"image": "i"}), **{**fields, **changes})


def wait_for_steps(run: Path) -> None:
    events = run / "events" / "rank-00000.jsonl"
    has_steps = lambda: (  # noqa: E731
        events.exists() and any(event["kind"] == "train" for event in read_events(events))
    )
    processes.wait_until(has_steps, "steps", timeout_s=100)


def test_a_drained_pod_saves_and_its_replacement_resumes(
    make_testbed: MakeTestbed, tmp_path: Path
) -> None:
    """The node of pod 1 is drained: the kubelet sends SIGTERM to the pod's first process. Both
    pods exit with 75, which the policy ignores; the controller makes them again, one elsewhere."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "slow").touch()
    bed = make_testbed("a", "b", "c", warm=True)
    container = container_of(task_job(tmp_path))
    publish(bed, "digits", [bed["a"], bed["b"]])
    pods = [
        start_pod(container, number=number, host=bed[name], cwd=tmp_path)
        for number, name in enumerate("ab")
    ]
    wait_for_steps(tmp_path / "run")
    pods[1].send(signal.SIGTERM)
    assert [pod.wait(100) for pod in pods] == [75, 75], [pod.text() for pod in pods]
    assert "preempted by SIGTERM to rank 1 on b: saved step" in pods[0].text()

    (tmp_path / "slow").unlink()
    publish(bed, "digits", [bed["a"], bed["c"]])
    pods = [
        start_pod(container, number=number, host=bed[name], cwd=tmp_path)
        for number, name in enumerate("ac")
    ]
    assert [pod.wait(100) for pod in pods] == [0, 0], [pod.text() for pod in pods]
    text = pods[0].text()
    assert text.count("resumed at step ") == 1, text
    assert "done: 12 steps" in text
