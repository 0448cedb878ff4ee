"""`drumline launch [where] TASK|SCRIPT.py [args]`: starts a job's ranks here, or shows how to start them elsewhere."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from drumline.cli import train
from drumline.cli.loading import load_agent
from drumline.config import Flags, read_flags
from drumline.config.schema import Bounds, Count, CountOrZero
from drumline.config.values import SWITCH_WORDS
from drumline.errors import ConfigError, ExitCode, UsageError
from drumline.launch.env_file import NodeSettings, read_env_file
from drumline.launch.hosts import hosts_from_file, hosts_from_flag
from drumline.launch.kubernetes import Manifest, manifest_text, wrong_name
from drumline.launch.plan import (
    SCRIPT_RESTARTS,
    TASK_RESTARTS,
    default_restarts,
    node_from_settings,
    nodes_of_hosts,
    settings_defaults,
    task_program,
)
from drumline.launch.topology import topology_from
from drumline.launch.torchrun import DEFAULT_PORT, Node, Program, torchrun_command

OWN_FLAGS: Mapping[str, tuple[Any, str, str]] = {
    "procs": (Count, "N", "Ranks of each node [one per GPU, or 1; with --kubernetes 1]."),
    "max-restarts": (
        CountOrZero,
        "N",
        f"How often failed ranks are started again [{TASK_RESTARTS} for a task, which goes on from its newest "
        f"checkpoint; {SCRIPT_RESTARTS} for a script, which may begin anew each time].",
    ),
    "print": (bool, "", "Show the torchrun line of each node, and start nothing."),
    "env-file": (
        str,
        "FILE",
        "This machine is one node of a job, and the same command is typed on each. The file has NUMBER_OF_NODES, "
        "NODE_RANK, NUMBER_OF_GPUS, MASTER_ADDR and MASTER_PORT; if wanted DDP_TIMEOUT_SECONDS, DATASET_DIR and "
        "OUTPUT_DIR; and whatever else the ranks' environment shall hold.",
    ),
    "hosts": (str, "A,B:4,C", "With --print: the hosts, each with its number of ranks if they differ."),
    "hostfile": (str, "FILE", "With --print: the hosts, one on a line: `host` or `host slots=N`."),
    "port": (
        Annotated[int, Bounds(low=1, high=65535)],
        "N",
        f"Where the hosts meet, on the first of them [{DEFAULT_PORT}].",
    ),
    "kubernetes": (bool, "", "Write a manifest for kubectl; nothing is applied."),
    "api": (
        Literal["v2", "v1", "job"],
        "v2 | v1 | job",
        "Kubeflow's TrainJob, its older PyTorchJob, or a plain indexed Job with a headless Service [v2].",
    ),
    "image": (str, "IMAGE", "The container image; it holds the code, and drumline for a task."),
    "name": (str, "NAME", "What the job is called in the cluster [after the task or script]."),
    "namespace": (str, "NAME", "The namespace it belongs to [kubectl's own]."),
    "nodes": (Count, "N", "Pods [1]."),
    "gpus": (CountOrZero, "N", "GPUs of each pod [one per rank]; 0 for none."),
    "claim": (str, "NAME", "A PersistentVolumeClaim for run folders, mounted at /runs in every pod."),
    "out": (str, "FILE", "Where to write the manifest [the screen]."),
    "help": (bool, "", "Show this text."),
}
WHERES = ("env-file", "hosts", "hostfile", "kubernetes")
OF_KUBERNETES = ("api", "image", "name", "namespace", "nodes", "gpus", "claim", "out")
USAGE = """\
usage: drumline launch [flags] TASK|SCRIPT.py [arguments]

Starts any script that torchrun could start, or `drumline train TASK`, on several ranks of this machine, or on this
machine as one node of a job; or shows how to start it on other hosts. What stands behind the script's or
task's name belongs to it.
"""
EXIT_CODES = """\
exit codes: 0 success, 2 wrong usage, 3 the nodes did not meet, 130 interrupted; otherwise that of the rank that
            failed first (1 when a signal ended it)
"""


def run(argv: Sequence[str]) -> int:
    """The verb. Everything that can be wrong with the command is said before torch is imported."""
    own, target, arguments = split_command(argv)
    flags = read_flags(own, own={name: kind for name, (kind, *_) in OWN_FLAGS.items()})
    if flags.own.get("help"):
        print(_help(), end="")
        return ExitCode.SUCCESS
    if problems := [*_wrong_flags(flags), *_wrong_target(flags, target)]:
        raise ConfigError(problems, next_step="`drumline launch --help` says what it takes")
    assert target is not None
    if flags.own.get("kubernetes"):
        return _write_manifest(flags, target, arguments)
    if "hosts" in flags.own or "hostfile" in flags.own:
        return _print_hosts(flags, target, arguments)
    return _run_here(flags, target, arguments)


def split_command(argv: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
    """The verb's own flags, the task or script, and what belongs to that, untouched."""
    position = 0
    while position < len(argv) and argv[position].startswith("-") and argv[position] != "--":
        flag, equals, _ = argv[position].partition("=")
        following = argv[position + 1] if position + 1 < len(argv) else "-"
        is_switch = OWN_FLAGS.get(flag.removeprefix("--"), (str,))[0] is bool or flag in ("-h", "--help")
        takes_next = following.lower() in SWITCH_WORDS if is_switch else not following.startswith("-")
        position += 2 if takes_next and not equals else 1
    own = list(argv[:position])
    rest = list(argv[position + 1 :] if argv[position : position + 1] == ["--"] else argv[position:])
    return own, rest[0] if rest else None, rest[1:]


def _wrong_flags(flags: Flags) -> Iterator[str]:
    yield from flags.layer.problems
    given = flags.own
    wheres = [name for name in WHERES if given.get(name)]
    if len(wheres) > 1:
        yield (
            " and ".join(f"--{name}" for name in wheres) + " exclude each other: each says where the job runs"
        )
    for path in flags.layer.settings:
        yield f"--{path}: settings of a task stand behind its name"
    if "env-file" in wheres and "procs" in given:
        yield "--procs: NUMBER_OF_GPUS in the --env-file says how many ranks this node has"
    if "kubernetes" in wheres:
        yield from _wrong_for_kubernetes(given)
    else:
        yield from (f"--{name}: belongs to --kubernetes" for name in OF_KUBERNETES if name in given)
    has_hosts = "hosts" in wheres or "hostfile" in wheres
    if "port" in given and not has_hosts:
        yield "--port: belongs to --hosts and --hostfile"
    if has_hosts and not given.get("print"):
        yield (
            f"--{'hosts' if 'hosts' in wheres else 'hostfile'}: is for --print; add that, and run the printed line "
            "on each host"
        )


def _wrong_for_kubernetes(given: Mapping[str, Any]) -> Iterator[str]:
    if "image" not in given:
        yield "--image: is missing; a pod needs a container image, which holds the code"
    if given.get("print"):
        yield "--print: --kubernetes writes a manifest and starts nothing anyway"
    for name in (name for name in ("name", "namespace", "claim") if name in given):
        if wrong := wrong_name(f"--{name}", given[name]):
            yield wrong


def _wrong_target(flags: Flags, target: str | None) -> Iterator[str]:
    if target is None:
        if not flags.layer.problems:  # a flag that is not known may have taken the name for its value
            yield "no TASK or SCRIPT.py was given"
    elif is_script(target) and _starts_here(flags) and not Path(target).is_file():
        yield f"there is no file {target} (looked in {Path.cwd()})"


def _starts_here(flags: Flags) -> bool:
    return not flags.own.get("kubernetes") and not flags.own.get("print")


def is_script(target: str) -> bool:
    """`train.py` is a script; `digits` and `tasks.py:MyTask` are tasks."""
    return target.endswith(".py")


def _program(target: str, arguments: Sequence[str], *defaults: tuple[str, str | None]) -> Program:
    """What the ranks run; a task's settings are checked here, once, and not by each rank."""
    if is_script(target):
        return Program((target, *arguments))
    program = task_program(target, arguments, *defaults)
    own = {name: kind for name, (kind, *_) in train.OWN_FLAGS.items()}
    flags = read_flags(program.words[1:], own=own, max_words=1)
    if "procs" in flags.own:
        raise UsageError(
            "--procs stands behind the task's name", next_step=f"drumline launch --procs N {target}"
        )
    train.settle_before_torch(target, flags)
    return program


def _restarts(flags: Flags, target: str) -> int:
    given: int = flags.own.get("max-restarts", default_restarts(is_task=not is_script(target)))
    return given


def _run_here(flags: Flags, target: str, arguments: Sequence[str]) -> int:
    file = flags.own.get("env-file")
    settings = read_env_file(Path(file)) if file else None
    restarts = _restarts(flags, target)
    if settings is None:
        node, defaults = Node(num_procs=flags.own.get("procs"), max_restarts=restarts), []
    else:
        node = node_from_settings(settings, max_restarts=restarts)
        defaults = settings_defaults(settings, train.run_name(target))
    program = _program(target, arguments, *defaults)
    if flags.own.get("print"):
        _print_node(node, program, settings)
        return ExitCode.SUCCESS
    if topology_from(os.environ) is not None:
        raise UsageError(
            "drumline launch starts ranks itself, but a launcher has started this process as one",
            next_step="run it without torchrun or srun",
        )
    if settings is not None:
        os.environ.update(settings.variables)
        if node.num_nodes > 1:
            print(f"drumline: node {node.node_rank} of {node.num_nodes} goes to {node.endpoint}", flush=True)

    from drumline.launch.local import run_node

    load_agent()
    return run_node(node, program)


def _print_node(node: Node, program: Program, settings: NodeSettings | None) -> None:
    if settings is not None and node.num_nodes > 1:
        print(f"# node {node.node_rank} of {node.num_nodes}; torchrun alone numbers nodes by their addresses")
    if settings is not None and settings.other_names:
        print(f"# with these in the environment: {', '.join(settings.other_names)}")
    if node.num_procs is None:
        from drumline.launch.local import default_procs

        node = Node(num_procs=default_procs(), max_restarts=node.max_restarts)
    print(shlex.join(torchrun_command(node, program)))


def _print_hosts(flags: Flags, target: str, arguments: Sequence[str]) -> int:
    listed, file = flags.own.get("hosts"), flags.own.get("hostfile")
    hosts = hosts_from_flag(listed) if listed is not None else hosts_from_file(Path(str(file)))
    program = _program(target, arguments)
    nodes = nodes_of_hosts(
        hosts,
        num_procs=flags.own.get("procs"),
        port=flags.own.get("port", DEFAULT_PORT),
        max_restarts=_restarts(flags, target),
    )
    for host, node in zip(hosts, nodes, strict=True):
        print(f"# {host.name}")
        print(shlex.join(torchrun_command(node, program)))
    return ExitCode.SUCCESS


def _write_manifest(flags: Flags, target: str, arguments: Sequence[str]) -> int:
    given = flags.own
    name = given.get("name") or default_name(target)
    if wrong := wrong_name(f"no --name, and the job would be named after {target}", name):
        raise UsageError(wrong, next_step="give it a --name")
    claim, procs = given.get("claim"), given.get("procs", 1)
    run_folder = ("--run", f"/runs/{name}" if claim else None)
    manifest = Manifest(
        name=name,
        image=given["image"],
        program=_program(target, arguments, run_folder),
        namespace=given.get("namespace"),
        num_nodes=given.get("nodes", 1),
        num_procs=procs,
        num_gpus=given.get("gpus", procs),
        claim=claim,
        max_restarts=_restarts(flags, target),
    )
    text = manifest_text(manifest, given.get("api", "v2"))
    if out := given.get("out"):
        try:
            Path(out).write_text(text)
        except OSError as error:
            raise UsageError(f"{out} cannot be written: {error.strerror}", next_step="check --out") from error
        print(f"drumline: wrote {out}; apply it with: kubectl apply -f {shlex.quote(out)}", file=sys.stderr)
    else:
        print(text, end="")
    return ExitCode.SUCCESS


def default_name(target: str) -> str:
    """`examples/own_loop.py` becomes `own-loop`, `tasks.py:MyTask` becomes `mytask`."""
    base = Path(target).stem if is_script(target) else train.run_name(target)
    return re.sub(r"[^a-z0-9]+", "-", base.lower()).strip("-")


def _help() -> str:
    from drumline.config.help import render_entry

    width = shutil.get_terminal_size().columns
    entries = [
        render_entry(f"--{name}", takes, doc, width=width) for name, (_, takes, doc) in OWN_FLAGS.items()
    ]
    return "\n".join([USAGE, *entries, "", EXIT_CODES])
