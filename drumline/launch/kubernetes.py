"""A job as Kubernetes manifests: an indexed Job, a JobSet, Kubeflow's TrainJob or its older
PyTorchJob. Nothing is applied.

In each pod an agent starts the ranks. The rendezvous is at the first pod, whose address comes from
Kubeflow's variables, or from the pod's index and a headless Service. A task's pods run `drumline
launch`; a script's image need not contain drumline, so its pods run torchrun, unless the job may
continue with fewer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from drumline.base.errors import ExitCode
from drumline.base.job_secret import SECRET_ENV
from drumline.launch.node_plan import DEFAULT_PORT, OWN_STORE_ENV, RUN_ID, Program
from drumline.launch.templates import render

Api = Literal["job", "jobset", "trainjob", "pytorchjob"]
GRACE_S = 90.0
JOIN_TIMEOUT_S = 3600
# A Service's name has the strictest rules: it becomes a DNS label, and a pod's name has `-NUMBER`
# after it.
NAME = re.compile(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?")
NAME_FORM = "a Kubernetes name: at most 50 lowercase letters, digits and dashes, a letter first"
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]*")
QUANTITY = re.compile(r"[1-9][0-9]{0,8}(\.[0-9]{1,3})?([kMGTP]|[KMGTP]i)?")
_DOMAIN = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
LABEL = re.compile(rf"(?P<key>({_DOMAIN}/)?{_LABEL})=(?P<value>({_LABEL})?)")
TAINT = re.compile(
    rf"(?P<key>({_DOMAIN}/)?{_LABEL})(=(?P<value>({_LABEL})?))?"
    r"(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
)
RDMA = re.compile(rf"(?P<resource>{_DOMAIN}/{_LABEL})(:(?P<count>[1-9][0-9]{{0,2}}))?")
CLAIM = re.compile(rf"(?P<claim>{_DOMAIN})(:(?P<path>(/[A-Za-z0-9_.-]+)+))?")
RUNS = "/runs"
TAKEN_PATHS = ("/tmp", "/dev/shm")  # noqa: S108 - of the pod, which has its own
# What the launch, or a controller, sets in a pod.
RESERVED = re.compile(
    r"RANK|LOCAL_RANK|NODE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT"
    rf"|POD_IP|POD_NUMBER|{OWN_STORE_ENV}|DRUMLINE_.*|PET_.*|TORCHELASTIC_.*"
)


@dataclass(frozen=True, kw_only=True)
class KubernetesJob:
    """What a manifest is made from."""

    name: str
    image: str
    program: Program
    namespace: str | None = None
    queue: str | None = None
    """Of Kueue."""
    num_nodes: int = 1
    num_procs: int = 1
    num_gpus: int = 0
    """Ranks on each node."""
    num_cpus: int | None = None
    memory: str | None = None
    shared_memory: str | None = None
    num_efa: int = 0
    rdma: str | None = None
    """A resource, with or without `:N`."""
    claims: Mapping[str, str] = field(default_factory=dict)
    """PersistentVolumeClaims by the path in the pods; run folders are in /runs."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, str]] = ()
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    max_restarts: int = 0
    min_nodes: int | None = None
    """The job continues with this many pods; None: all are needed."""
    grace_s: float = GRACE_S
    launcher_flags: Sequence[str] = (f"--join-timeout={JOIN_TIMEOUT_S}",)
    """Further flags for the launcher of each pod of several."""

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


def toleration(taint: str) -> dict[str, str]:
    """The toleration of `KEY[=VALUE][:EFFECT]`, as `kubectl taint` writes it."""
    match = TAINT.fullmatch(taint)
    assert match is not None  # it was checked
    operator = "Exists" if match["value"] is None else "Equal"
    fields = {"key": match["key"], "operator": operator}
    fields |= {name: match[name] for name in ("value", "effect") if match[name]}
    return fields


def claim_paths(claims: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The path and the claim of each `NAME[:PATH]`."""
    for word in claims:
        name, _, path = word.partition(":")
        yield path or RUNS, name


def wrong_claims(claims: Iterable[str]) -> Iterator[str]:
    """The mistakes in the values of --pvc, each of which has its form."""
    paths = [path for path, _ in claim_paths(claims)]
    for path in dict.fromkeys(paths):
        if paths.count(path) > 1:
            yield f"--pvc: {paths.count(path)} volumes at {path}; give another NAME:/PATH"
        if path in TAKEN_PATHS or ".." in path.split("/"):
            yield f"--pvc: {path} cannot be the path of a volume; give another NAME:/PATH"
