"""A job as Kubernetes manifests: Kubeflow's TrainJob, its older PyTorchJob, or a plain indexed Job.
Nothing is applied.

In each pod torchrun's agent starts the ranks. The rendezvous (c10d) is at the first pod, whose
address comes from Kubeflow's variables, or in a plain Job from the pod's index and a headless
Service. A task's pods run `drumline launch`; a script's image need not contain drumline, so its
pods run torchrun, unless the job may continue with fewer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Literal

from drumline.base.job_secret import SECRET_ENV
from drumline.launch.node_plan import DEFAULT_PORT, OWN_STORE_ENV, RUN_ID, Program
from drumline.launch.yaml_template import render_yaml

Api = Literal["v2", "v1", "job"]
# A Service's name has the strictest rules: it becomes a DNS label, and a pod's name has `-NUMBER`
# after it.
NAME = re.compile(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class KubernetesJob:
    name: str
    image: str
    program: Program
    namespace: str | None = None
    num_nodes: int = 1
    num_procs: int = 1
    num_gpus: int = 0
    """Ranks on each node."""
    claim: str | None = None
    """A PersistentVolumeClaim that all nodes can write to; mounted at /runs."""
    max_restarts: int = 0
    min_nodes: int | None = None
    """The job continues with this many pods; None: all are needed."""

    @property
    def has_launcher(self) -> bool:
        """Whether pods run `drumline launch`: then drumline must be in the image."""
        return self.program.is_task or self.min_nodes is not None

    @property
    def has_secret(self) -> bool:
        return self.num_nodes > 1 and self.has_launcher

    @property
    def secret(self) -> str:
        return f"{self.name}-secret"


def manifest_text(job: KubernetesJob, api: Api) -> str:
    """The YAML that `kubectl apply -f` takes."""
    return render_yaml(
        "kubernetes.yaml.j2",
        job=job,
        api=api,
        command=partial(_agent, job),
        arguments=_arguments(job),
        port=DEFAULT_PORT,
        own_store=OWN_STORE_ENV,
        secret_name=SECRET_ENV,
    )


def wrong_object_name(flag: str, name: str) -> str | None:
    if NAME.fullmatch(name):
        return None
    return f"{flag}: {name!r} is not a Kubernetes name: at most 50 lowercase letters, digits and dashes, a letter first"


def _arguments(job: KubernetesJob) -> list[str]:
    """Of a pod's agent: the program."""
    program = job.program
    if not job.has_launcher:
        return program.torchrun_arguments()
    # The launcher takes a task's name and arguments, without the verb.
    return ["--", *(program.words[1:] if program.is_task else program.words)]


def _agent(job: KubernetesJob, endpoint: str, node_rank: str, is_host: bool | None) -> list[str]:
    """The agent of a pod, which gives its address: pods cannot resolve each other's host names."""
    if job.has_launcher:
        return _launcher_command(job, endpoint, node_rank)
    command = ["torchrun", "--nnodes", str(job.num_nodes), "--nproc-per-node", str(job.num_procs)]
    command += ["--max-restarts", str(job.max_restarts)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", RUN_ID]
    if is_host is not None:
        command += ["--rdzv-conf", f"is_host={'true' if is_host else 'false'}"]
    return [*command, "--local-addr", "$(POD_IP)"]


def _launcher_command(job: KubernetesJob, endpoint: str, node_rank: str) -> list[str]:
    command = ["drumline", "launch", "--procs", str(job.num_procs)]
    command += ["--max-restarts", str(job.max_restarts)]
    if job.num_nodes == 1:
        # Needed because an operator sets RANK in a pod, and the launcher would believe that it is a
        # rank.
        return [*command, "--nodes", "1", "--node-rank", "0"]
    command += ["--nodes", str(job.num_nodes), "--node-rank", node_rank, "--master", endpoint]
    if job.min_nodes is not None:
        command += ["--nnodes", f"{job.min_nodes}:{job.num_nodes}"]
    return [*command, "--address", "$(POD_IP)"]
