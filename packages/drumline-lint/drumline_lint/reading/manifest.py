"""Kubernetes manifests, Compose files and Dockerfiles: each container that starts a training, as a
script.

Of this Job the script has one command, `torchrun --nnodes 2 train.py`, and its container runs on two
nodes with eight GPUs each:

    kind: Job
    spec:
      parallelism: 2
      template:
        spec:
          containers:
          - name: train
            command: [torchrun, --nnodes, "2", train.py]
            resources: {limits: {nvidia.com/gpu: 8}}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from drumline_lint.reading.launchers import launches
from drumline_lint.reading.shell import Assignment, Container, Refusal, Script, line_starts
from drumline_lint.reading.shell_parser import Command, Word, read_commands
from drumline_lint.reading.slurm import whole_number
from drumline_lint.reading.source import Silenced, silenced_lines
from drumline_lint.reading.yaml_nodes import (
    YamlNode,
    code_in,
    documents,
    is_text,
    items,
    mapping,
    mappings_in,
    member,
    merged,
    scalar,
    text_at,
)

# A manifest is a few hundred lines, and PyYAML reads about 100 kB a second.
_MOST_BYTES = 256 << 10
# A line that Kubernetes objects and Compose files have.
_MANIFEST = re.compile(rb"^['\"]?(?:kind|services)['\"]?:", re.MULTILINE)
# One of these is in every manifest that the rules have something to say about.
_LAUNCH_WORDS = re.compile(
    rb"torchrun|torch\.distributed|accelerate|deepspeed|PyTorchJob|MASTER_ADDR|WORLD_SIZE|NCCL_"
)
DEFAULT_SHARED_MEMORY = 64 << 20
"""What Docker and Kubernetes give a container."""
_SHARED_MEMORY = "/dev/shm"  # noqa: S108
_GPU_RESOURCE = re.compile(r"(?:nvidia|amd)\.com/gpu|gpu\.intel\.com/\w+")
# Fields of which each pod has its own, by the variable that scripts have for the same.
_OF_EACH_POD = {"status.podIP": "POD_IP", "metadata.name": "HOSTNAME"}
# Keys of a service; `extends` may bring one of them.
_MAKES_GPUS_VISIBLE = {"gpus", "runtime", "devices", "privileged", "extends"}
_OTHER_HOSTS = {"extra_hosts", "external_links", "links", "dns", "network_mode", "extends"}
_INDEX = re.compile("JOB_COMPLETION_INDEX")
# `16gb`, `32Gi`: a number and the power of two of its unit.
_SIZE = re.compile(r"([0-9]{1,15})\s*([kmgt]?)i?b?", re.IGNORECASE)
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


@dataclass(eq=False)
class Manifest:
    """A YAML file with containers."""

    path: Path
    text: str
    scripts: Sequence[Script]

    @cached_property
    def silenced(self) -> Silenced:
        """The lines with `# noqa`."""
        return silenced_lines(self.text, list)


def may_be_manifest(data: bytes) -> bool:
    """Whether YAML can start a training that the rules know. Most YAML is something else, and this
    is a hundred times faster than reading it."""
    is_small = len(data) <= _MOST_BYTES
    return is_small and bool(_MANIFEST.search(data) and _LAUNCH_WORDS.search(data))


def read_manifest(path: Path, text: str) -> Manifest:
    """Raises ValueError for text that is not YAML."""
    nodes = documents(text)
    reader = _ManifestReader(path, text, nodes)
    scripts = [script for node in nodes for script in reader.scripts(node)]
    return Manifest(path, text, [script for script in scripts if launches(script)])


@dataclass(frozen=True)
class _Pod:
    """The spec of the pods that a workload makes."""

    spec: YamlNode
    workload: YamlNode
    replicas: int | None
    """How many of them work together; None if it is not known."""

    @property
    def kind(self) -> str:
        """Of the workload: `Job`, `PyTorchJob`."""
        return text_at(self.workload, "kind")


class _ManifestReader:
    """Makes scripts of the containers in the documents of one file."""

    def __init__(self, path: Path, text: str, nodes: Sequence[YamlNode]) -> None:
        self.path = path
        self.text = text
        self.nodes = nodes
        self.line_starts = line_starts(text)

        letters = list(text)
        for node in nodes:
            for position in _folded_line_ends(node, text):
                letters[position] = " "

        self.shell_text = "".join(letters)
        """The text, with blanks for the line ends that YAML folds."""

    def scripts(self, document: YamlNode) -> Iterator[Script]:
        """The containers of a Compose file, or of a Kubernetes object."""
        is_kubernetes = member(document, "kind") is not None
        if is_kubernetes:
            yield from self._containers(document)
        elif mapping(member(document, "services")):
            yield from self._services(member(document, "services"))

    # Kubernetes

    def _containers(self, document: YamlNode) -> Iterator[Script]:
        """Each container once, with the workload that says most of it."""
        visited: set[int] = set()

        for pod in _all_pods(document):
            for node in items(member(pod.spec, "containers")):
                if id(node) not in visited:
                    visited.add(id(node))
                    yield self._container(node, pod)

    def _container(self, node: YamlNode, pod: _Pod) -> Script:
        """One container: what is known of its processes, its command and its variables."""
        limits = mapping(member(node, "resources", "limits"))
        gpus = [scalar(count) for name, count in limits if _GPU_RESOURCE.fullmatch(name)]

        refused = list(self._refusals(node, pod))
        if gpus and (pod.replicas or 1) > 1:
            refused += self._volumes_of_one_node(pod)

        container = Container(
            kind=pod.kind,
            replicas=pod.replicas,
            gpus=whole_number(gpus[0]) if gpus else None,
            is_without_gpu=bool(limits) and not gpus,
            shared_memory=_shared_memory_of_pod(node, pod.spec),
            processes=self._scalar_word(member(pod.workload, "spec", "nprocPerNode")),
            name=self._scalar_word(member(node, "name")),
            refused=tuple(refused),
            unresolved=self._unresolved(pod),
        )

        items_written = _command_items(node)
        words = [self._word(item, _kubernetes_text(scalar(item) or "")) for item in items_written]
        script = self._script(container, [Command(tuple(words))] if words else [])

        for entry in items(member(node, "env")):
            self._add_entry(script, entry)

        return script

    def _add_entry(self, script: Script, entry: YamlNode) -> None:
        """A variable in `env`: its value, or a field of which each pod has its own.

        - {name: MASTER_PORT, value: "29500"}
        - {name: HOST, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        """
        name = text_at(entry, "name")
        value = member(entry, "value")
        if value is not None:
            self._add_variable(script, name, value, _kubernetes_text(scalar(value) or ""))
            return

        field_path = member(entry, "valueFrom", "fieldRef", "fieldPath")
        variable = _OF_EACH_POD.get(scalar(field_path) or "")
        if variable is not None:
            self._add_variable(script, name, field_path, f"${variable}")

    def _refusals(self, node: YamlNode, pod: _Pod) -> Iterator[Refusal]:
        """All for which Kubernetes, or an operator, refuses a container."""
        if pod.kind == "PyTorchJob":
            yield from self._refused_name(node, pod)

        is_job = text_at(pod.workload, "apiVersion") == "batch/v1"
        if is_job:
            yield from self._refused_policy(node, pod)

        if is_job and text_at(pod.workload, "spec", "completionMode") != "Indexed":
            yield from self._refused_index(node)

        yield from self._refused_values(node)

    def _refused_name(self, node: YamlNode, pod: _Pod) -> Iterator[Refusal]:
        """The container of a PyTorchJob has a fixed name."""
        names = [text_at(container, "name") for container in items(member(pod.spec, "containers"))]
        name = self._scalar_word(member(node, "name"))

        if "pytorch" not in names and name:
            message = (
                f"the operator looks for a container named pytorch, and this one is {name.text}"
            )
            yield Refusal(name, message, "name the container pytorch")

    def _refused_policy(self, node: YamlNode, pod: _Pod) -> Iterator[Refusal]:
        """The restart policy of a Job; where it is left out, the container is the place."""
        name = self._scalar_word(member(node, "name"))
        policy = self._scalar_word(member(pod.spec, "restartPolicy")) or name

        if policy and policy.text not in {"Never", "OnFailure"}:
            message = "a Job is refused without restartPolicy: Never or OnFailure"
            yield Refusal(policy, message, "write restartPolicy: Never")

    def _refused_index(self, node: YamlNode) -> Iterator[Refusal]:
        """The variable of an indexed Job, in one that is not."""
        message = "only pods of a Job with completionMode: Indexed have JOB_COMPLETION_INDEX"

        for item in _command_items(node):
            index = _INDEX.search(self.text, *code_in(item, self.text)) if scalar(item) else None
            if index:
                place = Word(*index.span(), index[0])
                yield Refusal(place, message, "write completionMode: Indexed")

    def _refused_values(self, node: YamlNode) -> Iterator[Refusal]:
        """Numbers and the like, where Kubernetes wants strings: `value: 29500`."""
        values = [member(entry, "value") for entry in items(member(node, "env"))]

        for value in [*values, *_command_items(node)]:
            word = self._scalar_word(value)
            if word is not None and not is_text(value):
                message = f"{word.text} is no string, and Kubernetes refuses the manifest"
                yield Refusal(word, message, f'write "{word.text}"')

    def _volumes_of_one_node(self, pod: _Pod) -> Iterator[Refusal]:
        """Claims of this file that only one node may mount, in pods on several nodes.

        kind: PersistentVolumeClaim
        spec: {accessModes: [ReadWriteOnce]}
        """
        claims = self._named("PersistentVolumeClaim")
        message = "pods on several nodes mount this volume, and ReadWriteOnce allows one node"

        for volume in items(member(pod.spec, "volumes")):
            claim = claims.get(text_at(volume, "persistentVolumeClaim", "claimName"))
            modes = items(member(claim, "spec", "accessModes"))
            places = [self._scalar_word(mode) for mode in modes]
            if len(places) == 1 and places[0] and places[0].text == "ReadWriteOnce":
                yield Refusal(places[0], message, "write ReadWriteMany, with a class that has it")

    def _unresolved(self, pod: _Pod) -> str:
        """Pods have names of their own in a headless service only."""
        if pod.kind == "StatefulSet":
            name = text_at(pod.workload, "spec", "serviceName")
        else:
            name = text_at(pod.spec, "subdomain")

        services = self._named("Service")
        if name in services and text_at(services[name], "spec", "clusterIP") != "None":
            return f"the service {name} is not headless (clusterIP: None)"

        used = [service for service in services if f".{service}" in self.text]
        if pod.kind == "Job" and not name and used:
            return f"without subdomain: {used[0]}, the pods have no names in it"

        return ""

    def _named(self, kind: str) -> dict[str, YamlNode]:
        """The objects of a kind in this file, by their names."""
        return {
            text_at(node, "metadata", "name"): node
            for node in self.nodes
            if text_at(node, "kind") == kind
        }

    # Compose

    def _services(self, listed: YamlNode) -> list[Script]:
        """The containers of a Compose file; each has the list of all.

        services:
          node0:
            command: torchrun --nnodes 2 --node-rank 0 train.py
          node1:
            command: torchrun --nnodes 2 --node-rank 1 train.py
        """
        services = mapping(listed)
        hosts = frozenset(host for name, node in services for host in _hosts(name, node))
        keys = {scalar(key): key for key, _ in listed.value}
        scripts: list[Script] = []

        for name, node in services:
            word = self._scalar_word(keys.get(name))
            scripts.append(self._service(word, node, hosts, scripts))

        return scripts

    def _service(
        self, name: Word | None, node: YamlNode, hosts: frozenset[str], services: list[Script]
    ) -> Script:
        """One service: what is known of its processes, its command and its variables."""
        devices = items(member(node, "deploy", "resources", "reservations", "devices"))
        keys = {key for key, _ in mapping(node)}

        container = Container(
            kind="service",
            name=name,
            replicas=whole_number(text_at(node, "deploy", "replicas")) or 1,
            gpus=_num_devices(devices[0]) if devices else None,
            shared_memory=_shared_memory_of_service(node),
            is_on_shared_network=text_at(node, "network_mode") not in {"", "bridge", "none"},
            is_without_gpu=not devices and not keys & _MAKES_GPUS_VISIBLE,
            hosts=frozenset() if keys & _OTHER_HOSTS else hosts,
            services=[] if "profiles" in keys else services,
            replaced=_replaced_variables(node),
        )

        script = self._script(container, self._service_commands(node))
        environment = member(node, "environment")
        for key, value in mapping(environment):
            self._add_variable(script, key, value, _compose_text(scalar(value) or ""))

        for item in items(environment):
            key, _, text = (scalar(item) or "").partition("=")
            self._add_variable(script, key, item, _compose_text(text))

        return script

    def _service_commands(self, node: YamlNode) -> list[Command]:
        """`entrypoint` and `command`: the code of a shell, or a list of words."""
        words: list[Word] = []
        commands: list[Command] = []

        for key in ("entrypoint", "command"):
            value = member(node, key)
            words += [self._word(item, _compose_text(scalar(item) or "")) for item in items(value)]
            if scalar(value) is not None:
                commands += read_commands(self.shell_text, *code_in(value, self.text))

        if words:
            commands.append(Command(tuple(words)))

        return commands

    # Both

    def _word(self, node: YamlNode, text: str) -> Word:
        """A scalar with its place, and the text that a shell would get."""
        code = code_in(node, self.text)
        start = node.start_mark.index
        end = max(start + 1, min(node.end_mark.index, code[1] + 1))
        return Word(start, end, text, code=code)

    def _scalar_word(self, node: YamlNode | None) -> Word | None:
        """A scalar as it is written; None for anything else."""
        text = scalar(node)
        return None if node is None or text is None else self._word(node, text)

    def _add_variable(self, script: Script, name: str, node: YamlNode, text: str) -> None:
        """A variable that the container is started with."""
        word = self._word(node, text)
        script.environment.append(Assignment(script, name, word, word.start, word.end))

    def _script(self, container: Container, commands: Sequence[Command]) -> Script:
        """The script of a container, with places in the file."""
        return Script(
            self.path,
            self.shell_text,
            container=container,
            written_commands=commands,
            line_starts=self.line_starts,
        )


def _folded_line_ends(document: YamlNode, text: str) -> Iterator[int]:
    """The line ends that YAML turns into blanks, so that a shell does not see them.

    All in a scalar over several lines, but for those after `|`.
    """
    for inner in mappings_in(document):
        for _, value in inner.value:
            for node in (value, *items(value)):
                if node.id == "scalar" and node.style != "|":
                    start, end = code_in(node, text)
                    yield from (start + line.start() for line in re.finditer("\n", text[start:end]))


def _command_items(container: YamlNode) -> list[YamlNode]:
    """The words of a container's command."""
    return [*items(member(container, "command")), *items(member(container, "args"))]


def _replaced_variables(service: YamlNode) -> frozenset[str]:
    """The variables that the environment of a service takes from it, as `<<` merges no deeper.

    Here MASTER_ADDR:

        x-trainer: &trainer
          environment: {MASTER_ADDR: first, NODE_RANK: "0"}
        services:
          second:
            <<: *trainer
            environment: {NODE_RANK: "1"}
    """
    keys = {scalar(key) for key, _ in service.value} if service.id == "mapping" else set()
    elsewhere = {"env_file", "extends"} & {key for key, _ in mapping(service)}
    if "environment" not in keys or elsewhere:
        return frozenset()

    names = {name for base in merged(service) for name in _variables(member(base, "environment"))}
    return frozenset(names) - _variables(member(service, "environment"))


def _variables(environment: YamlNode | None) -> set[str]:
    """The names in `{RANK: 0}` or in `[RANK=0]`."""
    listed = {(scalar(item) or "").partition("=")[0] for item in items(environment)}
    return {name for name, _ in mapping(environment)} | listed


def _num_devices(device: YamlNode) -> int | None:
    """How many GPUs a reservation of Compose has, by their ids or by their number."""
    return len(items(member(device, "device_ids"))) or whole_number(text_at(device, "count"))


def _kubernetes_text(text: str) -> str:
    """The text as a shell has it: Kubernetes expands `$(NAME)`, and nothing else.

    `$(RANK)` becomes `${RANK}`, and `$RANK` becomes `\\$RANK`.
    """
    return re.sub(r"\\\$\(([A-Za-z_]\w*)\)", r"${\1}", text.replace("$", "\\$"))


def _compose_text(text: str) -> str:
    """The text with each variable as something unknown: Compose expands `$NAME` and `${NAME:-1}`
    from the shell that starts it.

    `${RANK:-0}` becomes `$(RANK)`.
    """
    return re.sub(r"\$\{?(\w+)(?:[^{}\w][^{}]*)?\}?", r"$(\1)", text)


def _hosts(name: str, service: YamlNode) -> Iterator[str]:
    """The names that other services reach it by."""
    yield from (name, text_at(service, "container_name"), text_at(service, "hostname"))

    for _, network in mapping(member(service, "networks")):
        yield from (scalar(alias) or "" for alias in items(member(network, "aliases")))


def _all_pods(document: YamlNode) -> Iterator[_Pod]:
    """Each workload's pods; then, for containers of other operators, any mapping as if it were a pod:
    of those it is not known how many there are."""
    for workload in mappings_in(document):
        if member(workload, "spec") is not None and text_at(workload, "kind"):
            yield from _pods(workload, member(workload, "spec"))

    for spec in mappings_in(document):
        yield _Pod(spec, document, None)


def _pods(workload: YamlNode, spec: YamlNode) -> Iterator[_Pod]:
    """The pods of one workload.

    - a PyTorchJob: the template of each group, such as Master and Worker, and how many pods all
      groups have
    - a Pod: its own spec
    - a Job, a StatefulSet and the like: the template, and how many pods it makes
    """
    groups = [group for _, group in mapping(member(spec, "pytorchReplicaSpecs"))]
    counts = [_count(member(group, "replicas")) for group in groups]
    is_fixed = all(counts) and member(spec, "elasticPolicy") is None
    total = sum(counts) if is_fixed else None

    for group in groups:
        yield _Pod(member(group, "template", "spec"), workload, total)

    if member(spec, "containers") is not None:
        yield _Pod(spec, workload, 1)

    is_job = text_at(workload, "kind") == "Job"
    replicas = _count(member(spec, "parallelism" if is_job else "replicas"))
    completions = member(spec, "completions")
    if is_job and completions is not None:
        replicas = min(replicas, _count(completions))

    yield _Pod(member(spec, "template", "spec"), workload, replicas or None)


def _count(node: YamlNode | None) -> int:
    """1 if it is left out, and 0 if it is not a number yet."""
    return 1 if node is None else whole_number(scalar(node)) or 0


def _shared_memory_of_pod(container: YamlNode, pod: YamlNode) -> int | None:
    """The size of what is mounted to /dev/shm, 0 if it is on disk.

    As with `volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 16Gi}}]`, and
    `volumeMounts: [{name: shm, mountPath: /dev/shm}]` in the container.
    """
    if text_at(pod, "hostIPC") == "true":
        return None

    volumes = {text_at(volume, "name"): volume for volume in items(member(pod, "volumes"))}
    for mount in items(member(container, "volumeMounts")):
        if text_at(mount, "mountPath").rstrip("/") != _SHARED_MEMORY:
            continue
        directory = member(volumes.get(text_at(mount, "name")), "emptyDir")
        is_on_disk = directory is not None and text_at(directory, "medium") != "Memory"
        return 0 if is_on_disk else parse_size(text_at(directory, "sizeLimit"))

    return DEFAULT_SHARED_MEMORY


def _shared_memory_of_service(service: YamlNode) -> int | None:
    """`shm_size`; None if /dev/shm is mounted, or shared with other containers."""
    if size := text_at(service, "shm_size"):
        return parse_size(size)
    if member(service, "ipc") is not None:
        return None

    for key in ("volumes", "tmpfs"):
        volume = member(service, key)
        for mount in (volume, *items(volume)):
            if _SHARED_MEMORY in f"{scalar(mount)} {text_at(mount, 'target')}":
                return None

    return DEFAULT_SHARED_MEMORY


def parse_size(text: str) -> int | None:
    """`16gb`, `32Gi` or `1073741824` in bytes; None if it is something else."""
    size = _SIZE.fullmatch(text.strip())
    return int(size[1]) << _UNITS[size[2].lower()] if size else None


# Dockerfiles


# `NAME rest`, over all lines that end with a backslash.
_INSTRUCTION = re.compile(
    r"^[ \t]*(?P<name>[A-Za-z]+)[ \t]+(?P<rest>(?:[^\n\\]|\\[^\n]|\\\r?\n(?:[ \t]*#[^\n]*\n)*)*)",
    re.MULTILINE,
)
# A text in the list of `CMD ["torchrun", "train.py"]`.
_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
# `NAME=value`, `NAME="a value"`, `NAME value`.
_ENV = re.compile(
    r"""([A-Za-z_]\w*)(?:=|[ \t]+)("(?:[^"\\]|\\.)*"|'[^']*'|(?:[^\s\\]|\\[^\r\n])+)"""
)


def read_dockerfile(path: Path, text: str) -> Script:
    """The variables and the command of an image.

    ENV NCCL_DEBUG=INFO
    ENTRYPOINT ["torchrun", "--standalone"]
    CMD ["train.py"]
    """
    script = Script(path, text, container=Container(kind="image", replicas=None))
    started: dict[str, list[Command]] = {"ENTRYPOINT": [], "CMD": []}

    for instruction in _INSTRUCTION.finditer(text):
        name = instruction["name"].upper()
        span = instruction.span("rest")
        if name == "FROM":  # The image is the last of its stages.
            script.environment.clear()
        elif name == "ENV":
            script.environment += _image_variables(script, *span)
        elif name in started:
            started[name] = _image_commands(text, *span)

    commands = started["ENTRYPOINT"] or started["CMD"]
    if len(started["ENTRYPOINT"]) == 1 and started["CMD"]:
        arguments = started["CMD"][0].words
        commands = [Command((*commands[0].words, *arguments))]

    script.written_commands = commands
    return script


def _image_variables(script: Script, start: int, end: int) -> Iterator[Assignment]:
    """`ENV NAME=value OTHER="a value"`, `ENV NAME value`."""
    for pair in _ENV.finditer(script.text, start, end):
        value = Word(*pair.span(2), pair[2].strip("\"'"))
        yield Assignment(script, pair[1], value, *pair.span())


def _image_commands(text: str, start: int, end: int) -> list[Command]:
    """`CMD torchrun train.py`, which a shell reads, or `CMD ["torchrun", "train.py"]`."""
    if not text.startswith("[", start):
        return read_commands(text, start, end)

    words = [
        Word(*word.span(), word[1].replace("$", "\\$"), code=word.span(1))
        for word in _TEXT.finditer(text, start, end)
    ]
    return [Command(tuple(words))] if words else []
