"""A job as Kubernetes manifests: Kubeflow's TrainJob, its older PyTorchJob, or a plain indexed Job.
Nothing is applied.

In each pod torchrun's agent starts the ranks. The rendezvous (c10d) is at the first pod, whose
address comes from Kubeflow's variables, or in a plain Job from the pod's index and a headless
Service. A task's pods run `drumline launch`; a script's image need not contain drumline, so its
pods run torchrun, unless the job may continue with fewer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from drumline.base.job_secret import SECRET_ENV
from drumline.launch.node_plan import DEFAULT_PORT, OWN_STORE_ENV, RUN_ID, Program

Api = Literal["v2", "v1", "job"]
Object = dict[str, Any]
RUNS = "/runs"
# A Service's name has the strictest rules: it becomes a DNS label, and a pod's name has `-NUMBER`
# after it.
NAME = re.compile(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?")
RUNTIME = "torch-distributed"
# What a block of YAML can hold as it is.
SCRIPT = re.compile(r"[!-~]([ -~]*\n)*[ -~]*[!-~]\n")
PLAIN_KEY = re.compile(r"[A-Za-z][A-Za-z0-9./_-]*")
POD_ADDRESS = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
# The kubelet sets it for pods of an indexed Job.
POD_NUMBER = {
    "name": "POD_NUMBER",
    "valueFrom": {
        "fieldRef": {
            "fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        }
    },
}
BACKOFF_PER_NODE = 3
SECRET_KEY = "secret"


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
    makers = {"v2": _train_job, "v1": _pytorch_job, "job": _indexed_job}
    needs = {
        "v2": f"Needs Kubeflow Trainer 2.2 or later, with its runtime {RUNTIME}.",
        "v1": "Needs the Kubeflow Training Operator (kubeflow.org/v1).",
        "job": "Needs nothing beside Kubernetes 1.27 or later.",
    }
    comments = [
        "Written by drumline launch --kubernetes; apply it with kubectl apply -f FILE.",
        needs[api],
    ]
    if job.claim is None:
        comments.append(
            "Without --claim the run folder is lost with its pod: the job cannot resume."
        )
    if job.has_secret:
        namespace = f" --namespace {job.namespace}" if job.namespace else ""
        comments += [
            f"First create its secret, so that no other pod can end or misdirect the job ({SECRET_ENV}):",
            f"  openssl rand -hex 32 | tr -d '\\n' | kubectl create secret generic {job.secret}{namespace} "
            f"--from-file={SECRET_KEY}=/dev/stdin",
        ]
    return to_yaml(makers[api](job), comments=comments)


def wrong_object_name(flag: str, name: str) -> str | None:
    if NAME.fullmatch(name):
        return None
    return f"{flag}: {name!r} is not a Kubernetes name: at most 50 lowercase letters, digits and dashes, a letter first"


def _train_job(job: KubernetesJob) -> list[Object]:
    pod = _pod(job, _agent(job, "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)", "$(PET_NODE_RANK)"))
    container = pod["containers"][0]
    trainer = {
        **{name: container[name] for name in ("image", "command", "args", "env")},
        "numNodes": job.num_nodes,
        "numProcPerNode": job.num_procs,
        **({"resourcesPerNode": container["resources"]} if job.num_gpus else {}),
    }
    # The rest of the pod is a patch of the runtime's pod.
    pod["containers"] = [{name: container[name] for name in ("name", "volumeMounts")}]
    node = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {
        "manager": "drumline.launch/manifest",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
    }
    spec = {"runtimeRef": {"name": RUNTIME}, "trainer": trainer, "runtimePatches": [patch]}
    return [_object("trainer.kubeflow.org/v1alpha1", "TrainJob", job, spec)]


def _pytorch_job(job: KubernetesJob) -> list[Object]:
    def replicas(count: int, is_host: bool) -> Object:
        command = _agent(job, "$(MASTER_ADDR):$(MASTER_PORT)", "$(RANK)", is_host=is_host)
        # The operator sets the restart policy of the pods; theirs must be left out.
        return {
            "replicas": count,
            "restartPolicy": "OnFailure",
            "template": {"spec": _pod(job, command, container="pytorch")},
        }

    specs = {"Master": replicas(1, True)}
    if job.num_nodes > 1:
        specs["Worker"] = replicas(job.num_nodes - 1, False)
    spec = {
        "nprocPerNode": str(job.num_procs),
        "runPolicy": {
            "cleanPodPolicy": "Running",
            "backoffLimit": BACKOFF_PER_NODE * job.num_nodes,
        },
        "pytorchReplicaSpecs": specs,
    }
    return [_object("kubeflow.org/v1", "PyTorchJob", job, spec)]


def _indexed_job(job: KubernetesJob) -> list[Object]:
    labels = {"app.kubernetes.io/name": job.name, "app.kubernetes.io/managed-by": "drumline"}
    service = {
        "clusterIP": "None",
        # Pods need each other's addresses before they are ready, and the first its own.
        "publishNotReadyAddresses": True,
        "selector": labels,
        "ports": [{"name": "rendezvous", "port": DEFAULT_PORT}],
    }
    pod = _pod(job, _agent(job, "$(MASTER_ADDR):$(MASTER_PORT)", "$(POD_NUMBER)"))
    pod["containers"][0]["env"][:0] = [
        {"name": "MASTER_ADDR", "value": f"{job.name}-0.{job.name}"},
        {"name": "MASTER_PORT", "value": str(DEFAULT_PORT)},
        dict(POD_NUMBER),
    ]
    batch_job = {
        "completionMode": "Indexed",
        "completions": job.num_nodes,
        "parallelism": job.num_nodes,
        "backoffLimit": BACKOFF_PER_NODE * job.num_nodes,
        "template": {
            "metadata": {"labels": labels},
            "spec": {"subdomain": job.name, "restartPolicy": "OnFailure", **pod},
        },
    }
    return [
        _object("v1", "Service", job, service, labels=labels),
        _object("batch/v1", "Job", job, batch_job, labels=labels),
    ]


def _object(
    api_version: str,
    kind: str,
    job: KubernetesJob,
    spec: Object,
    *,
    labels: Mapping[str, str] | None = None,
) -> Object:
    fields = {"name": job.name, "namespace": job.namespace, "labels": labels}
    metadata = {name: value for name, value in fields.items() if value}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}


def _pod(job: KubernetesJob, command: list[str], *, container: str = "node") -> Object:
    variables: list[Object] = [dict(POD_ADDRESS), {"name": OWN_STORE_ENV, "value": "1"}]
    if job.has_secret:
        # Without it the pod does not start: nothing runs unsealed.
        reference = {"name": job.secret, "key": SECRET_KEY}
        variables.append({"name": SECRET_ENV, "valueFrom": {"secretKeyRef": reference}})
    if job.claim and not job.program.is_task:
        variables.append({"name": "OUTPUT_DIR", "value": _literal(f"{RUNS}/{job.name}")})
    # A container's own /dev/shm has 64 MB: too little for NCCL and for loader workers.
    volumes: list[Object] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    mounts: list[Object] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]  # noqa: S108
    if job.claim:
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": job.claim}})
        mounts.append({"name": "runs", "mountPath": RUNS})
    described = {
        "name": container,
        "image": job.image,
        "command": command,
        "args": [_literal(word) for word in _arguments(job)],
        "env": variables,
        **({"resources": {"limits": {"nvidia.com/gpu": job.num_gpus}}} if job.num_gpus else {}),
        "volumeMounts": mounts,
    }
    return {"containers": [described], "volumes": volumes}


def _arguments(job: KubernetesJob) -> list[str]:
    """Of a pod's agent: the program."""
    program = job.program
    if not job.has_launcher:
        return program.torchrun_arguments()
    # The launcher takes a task's name and arguments, without the verb.
    return ["--", *(program.words[1:] if program.is_task else program.words)]


def _agent(
    job: KubernetesJob, endpoint: str, node_rank: str, *, is_host: bool | None = None
) -> list[str]:
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


def _literal(word: str) -> str:
    """Kubernetes reads `$(X)` as a variable and `$$` as `$`."""
    return word.replace("$", "$$")


def to_yaml(documents: Sequence[Mapping[str, Any]], *, comments: Sequence[str] = ()) -> str:
    """The documents below the comments: mappings, lists and scripts in blocks, other strings in
    JSON's quotes, which YAML reads."""
    head = "".join(f"# {line}\n" for comment in comments for line in comment.splitlines())
    blocks = ["".join(f"{line}\n" for line in _lines(document)) for document in documents]
    return head + "---\n".join(blocks)


def _lines(value: Mapping[str, Any] | Sequence[Any]) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            name = key if PLAIN_KEY.fullmatch(key) else json.dumps(key)
            if isinstance(item, Mapping | list) and item:
                yield f"{name}:"
                yield from (f"  {line}" for line in _lines(item))
            elif isinstance(item, str) and SCRIPT.fullmatch(item):
                yield f"{name}: |"
                yield from (f"  {line}" for line in item.split("\n")[:-1])
            else:
                yield f"{name}: {json.dumps(item)}"
    else:
        for item in value:
            has_block = isinstance(item, Mapping | list) and item
            first, *further_lines = _lines(item) if has_block else [json.dumps(item)]
            yield f"- {first}"
            yield from (f"  {line}" for line in further_lines)
