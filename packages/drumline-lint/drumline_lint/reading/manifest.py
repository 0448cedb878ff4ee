"""Kubernetes manifests and Compose files: each container that starts a training, as a script."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from drumline_lint.reading.container_words import (
    Span,
    compose_word,
    container_variable,
    kubernetes_word,
)
from drumline_lint.reading.launchers import launches
from drumline_lint.reading.shell import Assignment, Container, Refusal, Script
from drumline_lint.reading.shell_parser import Command, Kind, Piece, Word, read_commands
from drumline_lint.reading.source import Silenced, silenced_lines
from drumline_lint.reading.yaml_nodes import (
    YamlNode,
    code_in,
    documents,
    is_folded,
    is_text,
    items,
    mapping,
    mappings_in,
    member,
    number,
    scalar,
    span_of,
)

# A manifest is a few hundred lines, and PyYAML reads about 100 kB a second.
_MOST_BYTES = 256 << 10
_MANIFEST = re.compile(rb"^['\"]?(?:kind|services)['\"]?:", re.MULTILINE)
_LAUNCH_WORDS = re.compile(
    rb"torchrun|torch\.distributed|accelerate|deepspeed|PyTorchJob|MASTER_ADDR|WORLD_SIZE|NCCL_"
)
DEFAULT_SHARED_MEMORY = 64 << 20
"""What Docker and Kubernetes give a container."""
_GPU_RESOURCE = re.compile(r"(?:nvidia|amd)\.com/gpu|gpu\.intel\.com/\w+")
# Keys of a service; `extends` may bring one of them.
_MAKES_GPUS_VISIBLE = re.compile(r"gpus|runtime|devices|privileged|extends|device_cgroup_rules")
_SIZE = re.compile(r"([0-9]+)\s*([kmgt]?)i?b?", re.IGNORECASE)
# A hostile file has thousands, which must not all be compared.
_MOST_SIBLINGS = 32
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
MakeWord = Callable[[str, Span, Span | None], Word]


@dataclass(eq=False)
class Manifest:
    """A YAML file with containers."""

    path: Path
    text: str
    scripts: Sequence[Script]

    @cached_property
    def silenced(self) -> Silenced:
        return silenced_lines(self.text, list)


def may_be_manifest(data: bytes) -> bool:
    """Whether YAML can start a training that the rules know. Most YAML is something else, and this
    is a hundred times faster than reading it."""
    is_small = len(data) <= _MOST_BYTES
    return is_small and bool(_MANIFEST.search(data) and _LAUNCH_WORDS.search(data))


def read_manifest(path: Path, text: str) -> Manifest:
    """Raises ValueError for text that is not YAML."""
    nodes = documents(text)
    letters = list(text)
    for line_end in _folded_lines(nodes, text):
        letters[line_end] = " "
    services = {
        scalar(member(node, "metadata", "name")) or "": node
        for node in nodes
        if scalar(member(node, "kind")) == "Service"
    }
    reader = _ManifestReader(path, text, "".join(letters), services)
    scripts = [script for node in nodes for script in reader.scripts(node)]
    return Manifest(path, text, [script for script in scripts if launches(script)])


def _folded_lines(nodes: Sequence[YamlNode], text: str) -> Iterator[int]:
    """The line ends that YAML turns into blanks, so that a shell does not see them."""
    for node in nodes:
        for inner in mappings_in(node):
            values = [value for _, value in mapping(inner)]
            listed = [item for value in values for item in items(value)]
            for scalar_node in filter(is_folded, [*values, *listed]):
                start, end = code_in(scalar_node, text)
                yield from (start + line.start() for line in re.finditer("\n", text[start:end]))


@dataclass
class _ManifestReader:
    path: Path
    text: str
    shell_text: str
    """The text, with blanks for the line ends that YAML folds."""
    services: Mapping[str, YamlNode]
    """The services of the file, by their names."""

    @cached_property
    def line_starts(self) -> Sequence[int]:
        return [0, *(line_end.end() for line_end in re.finditer(r"\r\n|\n|\r", self.text))]

    def scripts(self, document: YamlNode) -> Iterator[Script]:
        if member(document, "services") is not None and member(document, "kind") is None:
            services: list[Script] = []
            listed: YamlNode = member(document, "services")
            nodes = mapping(listed)
            hosts = frozenset(host for name, node in nodes for host in _hosts(name, node))
            for key, node in listed.value if nodes else ():
                service = self._service(node, hosts, self._scalar_word(key))
                service.siblings = tuple(services[-_MOST_SIBLINGS:])
                services.append(service)
            yield from services
        elif member(document, "kind") is not None:
            yield from self._workload(document)

    # Kubernetes

    def _workload(self, document: YamlNode) -> Iterator[Script]:
        visited: set[int] = set()
        for workload, pod, replicas in _all_pods(document):
            for node in items(member(pod, "containers")):
                if id(node) not in visited:
                    visited.add(id(node))
                    yield self._container(node, pod, workload, replicas)

    def _container(
        self, node: YamlNode, pod: YamlNode, workload: YamlNode, replicas: int | None
    ) -> Script:
        kind = scalar(member(workload, "kind")) or ""
        mode = scalar(member(workload, "spec", "completionMode"))
        container = Container(
            kind=kind,
            replicas=replicas,
            gpus=_gpu_limit(node),
            is_without_gpu=_is_without_gpu(node),
            shared_memory=_shared_memory_of_pod(node, pod),
            processes=self._scalar_word(member(workload, "spec", "nprocPerNode")),
            name=self._scalar_word(member(node, "name")),
            names_in_pod=frozenset(
                scalar(member(container, "name")) or ""
                for container in items(member(pod, "containers"))
            ),
            refused=tuple(self._refusals(node, pod, workload)),
            unresolved=_unresolved(pod) or self._unresolved_name(pod, workload),
            is_indexed=kind != "Job" or mode == "Indexed",
        )
        variables = [*self._kubernetes_variables(node)]
        words = [
            self._word(item, kubernetes_word)
            for key in ("command", "args")
            for item in items(member(node, key))
        ]
        commands = [Command(words=tuple(words))] if words else []
        return self._script(container, commands, variables)

    def _refusals(self, node: YamlNode, pod: YamlNode, workload: YamlNode) -> Iterator[Refusal]:
        name = member(node, "name")
        if scalar(member(workload, "apiVersion")) == "batch/v1":
            policy = member(pod, "restartPolicy")
            if scalar(policy) not in {"Never", "OnFailure"}:
                message = "a Job is refused without restartPolicy: Never or OnFailure"
                yield from self._refusal(policy or name, message, "write restartPolicy: Never")
            mode = member(workload, "spec", "completionMode")
            if scalar(mode) == "Indexed" and member(workload, "spec", "completions") is None:
                message = "an indexed Job is refused without a number of completions"
                yield from self._refusal(mode, message, "write completions, and parallelism")
        masters = member(workload, "spec", "pytorchReplicaSpecs", "Master")
        replicas = member(masters, "replicas")
        if (number(replicas) or 1) > 1 and member(masters, "template", "spec") is pod:
            message = "a PyTorchJob has one master, and the operator refuses more"
            yield from self._refusal(
                replicas, message, "count the other pods as replicas of Worker"
            )
        limits = dict(mapping(member(node, "resources", "limits")))
        for resource, count in mapping(member(node, "resources", "requests")):
            if _GPU_RESOURCE.fullmatch(resource) and scalar(limits.get(resource)) != scalar(count):
                message = f"requests of {resource} are refused unless limits have the same number"
                yield from self._refusal(count, message, "write it under limits")
        values = [member(entry, "value") for entry in items(member(node, "env"))]
        values += [item for key in ("command", "args") for item in items(member(node, key))]
        for value in values:
            text = scalar(value)
            if text is not None and not is_text(value):
                message = f"{text} is no string, and Kubernetes refuses the manifest"
                yield from self._refusal(value, message, f'write "{text}"')

    def _refusal(self, node: YamlNode | None, message: str, fix: str) -> Iterator[Refusal]:
        place = self._scalar_word(node)
        if place is not None:
            yield Refusal(place, message, fix)

    def _unresolved_name(self, pod: YamlNode, workload: YamlNode) -> str:
        """Pods have names of their own in a headless service only."""
        key = "serviceName" if scalar(member(workload, "kind")) == "StatefulSet" else ""
        name = scalar(member(workload, "spec", key)) if key else scalar(member(pod, "subdomain"))
        service = self.services.get(name or "")
        if service is not None and scalar(member(service, "spec", "clusterIP")) != "None":
            return f"the service {name} is not headless (clusterIP: None)"
        if scalar(member(workload, "kind")) == "Job" and name is None:
            used = [service for service in self.services if f".{service}" in self.text]
            return f"without subdomain: {used[0]}, the pods have no names in it" if used else ""
        return ""

    def _kubernetes_variables(self, node: YamlNode) -> Iterator[Assignment]:
        for entry in items(member(node, "env")):
            name = scalar(member(entry, "name"))
            value = member(entry, "value")
            field_path = member(entry, "valueFrom", "fieldRef", "fieldPath")
            if name and value is not None and scalar(value) is not None:
                yield container_variable(name, self._word(value, kubernetes_word), span_of(value))
            elif name and field_path is not None:
                piece = Piece(Kind.UNKNOWN, scalar(field_path) or "")
                yield container_variable(
                    name, Word(*span_of(field_path), (piece,)), span_of(field_path)
                )

    # Compose

    def _service(self, node: YamlNode, hosts: frozenset[str], name: Word | None) -> Script:
        devices = items(member(node, "deploy", "resources", "reservations", "devices"))
        names = [name for name, _ in _with_merged(node)]
        container = Container(
            kind="service",
            name=name,
            replicas=number(member(node, "deploy", "replicas")) or 1,
            gpus=_gpus_of_devices(devices),
            shared_memory=_shared_memory_of_service(node),
            is_on_shared_network=_shares_network(scalar(member(node, "network_mode"))),
            is_without_gpu=not devices and not any(map(_MAKES_GPUS_VISIBLE.match, names)),
            hosts=frozenset() if _uses_other_networks(node) else hosts,
        )
        variables = [*self._compose_variables(member(node, "environment"))]
        words: list[Word] = []
        commands: list[Command] = []
        for key in ("entrypoint", "command"):
            value = member(node, key)
            words += [self._word(item, compose_word) for item in items(value)]
            if value is not None and scalar(value) is not None:
                commands += read_commands(self.shell_text, *code_in(value, self.text))
        if words:
            commands.append(Command(words=tuple(words)))
        return self._script(container, commands, variables)

    def _compose_variables(self, node: YamlNode | None) -> Iterator[Assignment]:
        for name, value in _with_merged(node):
            if scalar(value) is not None:
                yield container_variable(name, self._word(value, compose_word), span_of(value))
        for item in items(node):
            name, equals, text = (scalar(item) or "").partition("=")
            if equals:
                yield container_variable(name, compose_word(text, span_of(item)), span_of(item))

    # Both

    def _word(self, node: YamlNode, make: MakeWord) -> Word:
        start, end = span_of(node)
        code = code_in(node, self.text)
        return make(scalar(node) or "", (start, max(start + 1, min(end, code[1] + 1))), code)

    def _scalar_word(self, node: YamlNode | None) -> Word | None:
        text = scalar(node)
        return (
            None
            if node is None or text is None
            else Word(*span_of(node), (Piece(Kind.TEXT, text),))
        )

    def _script(
        self, container: Container, commands: Sequence[Command], variables: Sequence[Assignment]
    ) -> Script:
        return Script(
            self.path,
            self.shell_text,
            container=container,
            written_commands=commands,
            environment=variables,
            line_starts=self.line_starts,
        )


def _hosts(name: str, service: YamlNode) -> Iterator[str]:
    yield name
    for key in ("container_name", "hostname"):
        yield scalar(member(service, key)) or ""
    for _, network in mapping(member(service, "networks")):
        yield from (scalar(alias) or "" for alias in items(member(network, "aliases")))
        yield scalar(member(network, "ipv4_address")) or ""


def _uses_other_networks(service: YamlNode) -> bool:
    """Whether there may be hosts that this file does not name."""
    keys = ("extra_hosts", "external_links", "links", "dns", "network_mode", "extends")
    return any(member(service, key) is not None for key in keys)


def _unresolved(pod: YamlNode) -> str:
    """On the host's network, a pod asks the host's name servers unless it is said otherwise."""
    is_on_host = scalar(member(pod, "hostNetwork")) == "true"
    policy = scalar(member(pod, "dnsPolicy")) or "ClusterFirst"
    is_default = is_on_host and policy == "ClusterFirst" and member(pod, "dnsConfig") is None
    return "hostNetwork without dnsPolicy: ClusterFirstWithHostNet" if is_default else ""


def _with_merged(node: YamlNode | None, depth: int = 0) -> list[tuple[str, YamlNode]]:
    """The members of a mapping, with those of `<<` that it does not replace."""
    pairs = dict(mapping(node))
    merged = pairs.pop("<<", None)
    if merged is None or depth > 4:
        return list(pairs.items())
    inherited: dict[str, YamlNode] = {}
    for base in items(merged) or [merged]:
        inherited = dict(_with_merged(base, depth + 1)) | inherited
    return list((inherited | pairs).items())


def _all_pods(document: YamlNode) -> Iterator[tuple[YamlNode, YamlNode, int | None]]:
    """Each workload, the spec of each of its pods, and the number of pods that work together."""
    for workload in mappings_in(document):
        kind = scalar(member(workload, "kind"))
        if kind is not None and member(workload, "spec") is not None:
            for pod, replicas in _pods(member(workload, "spec"), kind):
                yield workload, pod, replicas
    # Of other operators only the containers are known, not how many there are.
    for pod in mappings_in(document):
        yield document, pod, None


def _pods(spec: YamlNode | None, kind: str) -> Iterator[tuple[YamlNode | None, int | None]]:
    groups = [group for _, group in mapping(member(spec, "pytorchReplicaSpecs"))]
    counts = [_count(member(group, "replicas")) for group in groups]
    is_fixed = all(counts) and member(spec, "elasticPolicy") is None
    for group in groups:
        yield member(group, "template", "spec"), sum(counts) if is_fixed else None
    # Of Volcano's Job.
    tasks = items(member(spec, "tasks"))
    for task in tasks:
        is_only = len(tasks) == 1
        yield (
            member(task, "template", "spec"),
            _count(member(task, "replicas")) if is_only else None,
        )
    if member(spec, "containers") is not None:
        yield spec, 1
    size = "parallelism" if kind in {"Job", "CronJob"} else "replicas"
    pods = _count(member(spec, size))
    if kind == "Job" and member(spec, "completions") is not None:
        pods = min(pods, _count(member(spec, "completions")))
    yield member(spec, "template", "spec"), pods or None
    for job in items(member(spec, "replicatedJobs")):
        inner = member(job, "template", "spec")
        replicas = _count(member(job, "replicas")) * _count(member(inner, "parallelism"))
        yield member(inner, "template", "spec"), replicas or None


def _count(node: YamlNode | None) -> int:
    """1 if it is left out, and 0 if it is not a number yet."""
    return 1 if node is None else number(node) or 0


def _shares_network(mode: str | None) -> bool:
    """`host` or `service:NAME`."""
    return mode is not None and mode not in {"bridge", "none"}


def _gpu_limit(container: YamlNode) -> int | None:
    for where in ("limits", "requests"):
        for name, value in mapping(member(container, "resources", where)):
            if _GPU_RESOURCE.fullmatch(name):
                return number(value)
    return None


def _is_without_gpu(container: YamlNode) -> bool:
    """Whether it asks for CPUs or memory, but for no device."""
    limits = mapping(member(container, "resources", "limits"))
    return bool(limits) and all(name in {"cpu", "memory"} for name, _ in limits)


def _shared_memory_of_pod(container: YamlNode, pod: YamlNode) -> int | None:
    if scalar(member(pod, "hostIPC")) == "true":
        return None
    for mount in items(member(container, "volumeMounts")):
        if (scalar(member(mount, "mountPath")) or "").rstrip("/") == "/dev/shm":  # noqa: S108
            name = scalar(member(mount, "name"))
            volumes = [
                v for v in items(member(pod, "volumes")) if scalar(member(v, "name")) == name
            ]
            directory = member(volumes[0], "emptyDir") if volumes else None
            if directory is not None and scalar(member(directory, "medium")) != "Memory":
                return 0
            return parse_size(scalar(member(directory, "sizeLimit")) or "")
    return DEFAULT_SHARED_MEMORY


def _shared_memory_of_service(service: YamlNode) -> int | None:
    size = scalar(member(service, "shm_size"))
    if size is not None:
        return parse_size(size)
    ipc = member(service, "ipc")
    mounts = [*items(member(service, "volumes")), *items(member(service, "tmpfs"))]
    mounts += [value for value in [member(service, "tmpfs")] if value is not None]
    is_mounted = any("/dev/shm" in (scalar(mount) or "") for mount in mounts)  # noqa: S108
    is_mounted |= any(scalar(member(mount, "target")) == "/dev/shm" for mount in mounts)  # noqa: S108
    return None if ipc is not None or is_mounted else DEFAULT_SHARED_MEMORY


def _gpus_of_devices(devices: Sequence[YamlNode]) -> int | None:
    for device in devices:
        if ids := items(member(device, "device_ids")):
            return len(ids)
        if (count := number(member(device, "count"))) is not None:
            return count
    return None


def parse_size(text: str) -> int | None:
    """`16gb`, `32Gi` or `1073741824` in bytes; None if it is something else."""
    size = _SIZE.fullmatch(text.strip())
    return int(size[1]) << _UNITS[size[2].lower()] if size and len(size[1]) < 16 else None
