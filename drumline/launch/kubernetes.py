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
from typing import Literal

from drumline.base.job_secret import SECRET_ENV
from drumline.launch.node_plan import DEFAULT_PORT, OWN_STORE_ENV, RUN_ID, Program
from drumline.launch.templates import render

Api = Literal["v2", "v1", "job"]
# A Service's name has the strictest rules: it becomes a DNS label, and a pod's name has `-NUMBER`
# after it.
NAME = re.compile(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class KubernetesJob:
    """What a manifest is made from."""

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
        """Whether its pods share a secret, which a plain script has no use for."""
        return self.num_nodes > 1 and self.has_launcher

    @property
    def secret(self) -> str:
        """The name of its Secret."""
        return f"{self.name}-secret"


def manifest_text(job: KubernetesJob, api: Api) -> str:
    """The YAML that `kubectl apply -f` takes."""
    return render(
        "kubernetes.yaml.j2",
        job=job,
        api=api,
        port=DEFAULT_PORT,
        run_id=RUN_ID,
        own_store=OWN_STORE_ENV,
        secret_name=SECRET_ENV,
    )


def wrong_object_name(flag: str, name: str) -> str | None:
    """What is wrong with the value of this flag; None: nothing."""
    if NAME.fullmatch(name):
        return None
    return f"{flag}: {name!r} is not a Kubernetes name: at most 50 lowercase letters, digits and dashes, a letter first"
