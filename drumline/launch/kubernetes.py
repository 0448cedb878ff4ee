"""A job as Kubernetes manifests: an indexed Job, a JobSet, Kubeflow's TrainJob or its older
PyTorchJob. Nothing is applied.

In each pod an agent starts the ranks. The rendezvous is at the first pod, whose address comes from
Kubeflow's variables, or from the pod's index and a headless Service. A task's pods run `drumline
launch`; a script's image need not contain drumline, so its pods run torchrun, unless the job may
continue with fewer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from drumline.base.errors import ExitCode
from drumline.base.job_secret import SECRET_ENV
from drumline.config import FlagValues
from drumline.launch.node_plan import DEFAULT_PORT, OWN_STORE_ENV, RUN_ID, Program
from drumline.launch.templates import render

Api = Literal["job", "jobset", "trainjob", "pytorchjob"]
GRACE_S = 90.0
JOIN_TIMEOUT_S = 3600
# What the launch, or a controller, sets in a pod.
RESERVED = re.compile(
    r"RANK|LOCAL_RANK|NODE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT"
    rf"|POD_IP|POD_NUMBER|{OWN_STORE_ENV}|DRUMLINE_.*|PET_.*|TORCHELASTIC_.*"
)


@dataclass(frozen=True, kw_only=True)
class KubernetesJob:
    """What a manifest is made from."""

    name: str
    program: Program
    flags: FlagValues = field(repr=False)
    """Of the launch: those that the template reads as they are."""
    num_nodes: int = 1
    num_procs: int = 1
    """Ranks on each node."""
    claims: Mapping[str, str] = field(default_factory=dict)
    """PersistentVolumeClaims by the path in the pods; run folders are in /runs."""
    tolerations: Sequence[Mapping[str, str]] = ()
    """As objects of Kubernetes."""
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """For the ranks' environment; they can be read in the manifest."""
    max_restarts: int = 0
    """Of the ranks, by the launcher in each pod."""
    min_nodes: int | None = None
    """The job continues with this many pods; None: all are needed."""
    grace_s: float = GRACE_S
    launcher_flags: Sequence[str] = (f"--join-timeout={JOIN_TIMEOUT_S}",)
    """Further flags for the launcher of each pod of several."""

    @property
    def node_selector(self) -> dict[str, str]:
        """The labels that a node must have; of two values of a label, the last."""
        labels = self.flags.node_selector or []
        return {name: value for name, _, value in (label.partition("=") for label in labels)}

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
        preempted=int(ExitCode.PREEMPTED),
        wrong_usage=int(ExitCode.USAGE),
    )
