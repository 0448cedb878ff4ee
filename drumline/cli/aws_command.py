"""`drumline aws plan | up | status | launch | jobs | attach | stop | down`: flags and wiring; the
work is in launch/aws/.

`launch` runs the doctor over all pairs of a cluster's nodes, then `drumline launch` on their private
addresses, which hands the job to the nodes. With `--attach` it stays: when AWS replaced a node that
was lost or taken back, the run is launched again on the nodes that are there then, and resumes from
its newest checkpoint on the shared volume. A node that AWS has not missed yet is reported to it.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from drumline.base.errors import DrumlineError, ExitCode, PreflightError, UsageError
from drumline.base.text import join_names, plural, print_message, show_lines
from drumline.cli import (
    attach_command,
    doctor_command,
    jobs_command,
    launch_command,
    stop_command,
)
from drumline.cli.cloud_file import SHARED
from drumline.cli.command_line import HELP_FLAG, misplaced, read_command, read_subverb, show_help
from drumline.cli.doctor_command import show_step
from drumline.cli.launch_flags import OWN_FLAGS as LAUNCH_FLAGS
from drumline.cli.launch_request import is_script
from drumline.config import FlagTable, FlagValues, read_flags, switch
from drumline.config.fields import flag_text
from drumline.launch.aws.account import Account
from drumline.launch.aws.cluster_access import check_session_manager
from drumline.launch.aws.cluster_creation import NoCapacityError, bring_up
from drumline.launch.aws.cluster_plan import make_plan
from drumline.launch.aws.cluster_settings import (
    CLUSTER,
    ENDS,
    REACH,
    WHERE,
    ClusterSettings,
    account_and_settings,
)
from drumline.launch.aws.own_wheels import build_wheel
from drumline.launch.aws.stack import (
    CloudNode,
    find_cluster,
    group_of,
    nodes_of,
    parameters_of,
    ssh_config,
    status_lines,
)
from drumline.launch.aws.teardown import kept_lines, made_by_others, take_down
from drumline.launch.hosts import Host
from drumline.launch.node_plan import task_program
from drumline.launch.ssh.client import SSH_FAILED, last_line, not_reached, ssh_words
from drumline.runs.run_folder import run_name

FOUND: Mapping[str, FlagTable] = {"where": {**WHERE, **HELP_FLAG}}
MADE: Mapping[str, FlagTable] = {
    **FOUND,
    "the cluster": CLUSTER,
    "how it is reached, and what exists already": REACH,
    "when it ends  Also when this machine is off.": ENDS,
}
DELETE: FlagTable = {
    "delete-data": switch("Delete the volume with its data too [it is kept]."),
    "any-owner": switch("Remove it also if another identity made it [it is refused]."),
}
OF_LAUNCH: FlagTable = {
    **WHERE,
    "identity": (str, "FILE", "The private key of the cluster's --key [ssh's own choice]."),
    "doctor": switch("Check all pairs of nodes first [on]; --no-doctor skips it."),
    "attach": switch(
        "Stay with the job, and launch it again on the nodes that AWS replaces "
        "[it is handed to the nodes, which need this machine no more]."
    ),
    **HELP_FLAG,
}
FOLLOW: FlagTable = {name: OF_LAUNCH[name] for name in (*WHERE, "identity", "help")}
GROUPS: Mapping[str, Mapping[str, FlagTable]] = {
    "plan": MADE,
    "up": MADE,
    "status": FOUND,
    "down": {**FOUND, "what is removed": DELETE},
}
LINES = {
    "plan": "drumline aws plan --type TYPE --nodes N ...   check quota, price and settings; nothing is touched",
    "up": "drumline aws up --type TYPE --nodes N ...     make the cluster: one CloudFormation stack",
    "status": "drumline aws status                           the clusters of the region, and what they cost so far",
    "launch": "drumline aws launch TASK|SCRIPT.py ...        check all pairs of nodes, then launch on them over ssh",
    "jobs": "drumline aws jobs                             the jobs on its nodes",
    "attach": "drumline aws attach JOB                       show the lines of a job; Ctrl-C detaches",
    "stop": "drumline aws stop JOB [--save]                end a job, with a checkpoint or without",
    "down": "drumline aws down                             remove it, and prove that nothing billable is left",
}
ABOUT = """\

Credentials come from boto3's own chain (aws configure, aws sso login); they are never shown.
`drumline aws up --help`, and so on, list the flags.
"""
EXIT_CODES = (
    "exit codes: 0 success, 2 wrong usage, 3 AWS refused something, 130 interrupted; "
    "launch, attach: those of drumline launch\n"
)

LAUNCH_USAGE = """\
usage: drumline aws launch [--name NAME] [flags of drumline launch] TASK|SCRIPT.py [arguments]

Runs doctor over all pairs of the cluster's nodes, copies this folder to the same path on each (--no-sync: it does not),
and hands the job to them (`drumline launch --detach`; --attach stays with it): one rank per GPU, rank 0 on the oldest
node. A task's run folder is /mnt/shared/runs/TASK, on the shared volume; a script finds /mnt/shared/runs in OUTPUT_DIR.
"""
PYTHON = "/opt/drumline/bin/python"
PREPARE = "/opt/drumline/prepare"
RUNS = PurePosixPath(SHARED, "runs")
# Of prepare.sh on a node.
NOT_INSTALLED = 65
NOTICE = "http://169.254.169.254/latest/meta-data/spot/instance-action"
# How long nodes may take to start and install, and a node that AWS takes back, or is asked to
# replace, to disappear.
READY_S = 1800.0
REPLACED_S = 180.0
POLL_S = 10.0
FOLLOWERS = {"jobs": jobs_command, "attach": attach_command, "stop": stop_command}
OF_CLUSTER = ("hosts", "hostfile", "spare", "ssh", "python")


def run(argv: Sequence[str]) -> int:
    """The verbs about a cluster; those about jobs on it take the flags of other verbs."""
    overview = "usage: " + "\n       ".join(LINES.values()) + "\n" + ABOUT
    verb, arguments = read_subverb("aws", argv, LINES, overview)
    if verb == "launch":
        return _launch(arguments)
    if verb in FOLLOWERS:
        return _follow(verb, arguments)

    flags = read_command(
        f"aws {verb}",
        arguments,
        GROUPS[verb],
        f"usage: {LINES[verb]}\n",
        ends_with=EXIT_CODES,
        max_positional=0,
    )
    account, settings = account_and_settings(flags.values, [], verb)
    if verb == "plan":
        lines = make_plan(account, settings).lines()
        show_lines([*lines, "nothing was touched; `drumline aws up` makes it"])
    elif verb == "status":
        show_lines(status_lines(account))
    elif verb == "up":
        _up(account, settings)
    else:
        _down(account, settings, flags.values)

    return ExitCode.SUCCESS


def _up(account: Account, settings: ClusterSettings) -> None:
    """Make the cluster. After Ctrl-C AWS continues, which is reported."""
    try:
        _bring_up_somewhere(account, settings)
    except KeyboardInterrupt:
        name = settings.name
        print_message(
            f"interrupted: AWS continues to make {name}, and it costs money",
            f"follow it: the same command; remove it: drumline aws down --name {name}",
        )
        raise

    show_step("")
    nodes = nodes_of(account, settings.name)
    show_lines(
        [
            f"{settings.name} is up: {plural(len(nodes), 'node')} at {', '.join(node.address for node in nodes)}",
            f"train:   drumline aws launch --name {settings.name} TASK|SCRIPT.py",
            f"the end: drumline aws down --name {settings.name}",
        ]
    )


def _bring_up_somewhere(account: Account, settings: ClusterSettings) -> None:
    """In the first zone of the plan that has capacity."""
    full_zones: list[str] = []
    while True:
        plan = make_plan(account, settings, full_zones)
        show_lines(plan.lines())
        try:
            return bring_up(account, plan, show_step)
        except NoCapacityError as error:
            if not plan.other_zones:
                raise
            print_message(error.what, f"next zone: {next(iter(plan.other_zones))}")
            full_zones.append(plan.parameters["Zone"])


def _down(account: Account, settings: ClusterSettings, flags: FlagValues) -> None:
    """Remove the cluster, unless somebody else made it."""
    delete_data = bool(flags.delete_data)
    other_owners = made_by_others(account, settings, delete_data=delete_data)
    if other_owners and not flags.any_owner:
        # The same region and profile: elsewhere the name is another cluster's.
        words = ["drumline", "aws", "down", *_place(settings), "--any-owner"]
        again = shlex.join([*words, "--delete-data"] if delete_data else words)
        raise UsageError(
            f"{'; '.join(other_owners)}; nothing was removed",
            next_step=f"ask whoever made it; to remove it all the same: {again}",
        )
    volumes = take_down(account, settings, show_step, delete_data=delete_data)
    show_step("")
    show_lines(kept_lines(account, settings, volumes))


def _place(settings: ClusterSettings) -> list[str]:
    """The flags by which another command finds the cluster."""
    place = {
        "--name": settings.name,
        "--region": settings.region,
        "--profile": settings.profile,
    }
    return [word for flag, value in place.items() if value for word in (flag, value)]


# Launching on the nodes


def _launch(argv: Sequence[str]) -> int:
    """Prepare and test the nodes, and launch on them."""
    table = {**LAUNCH_FLAGS, **OF_LAUNCH}
    flags = read_flags(
        argv, table, ends_at_name=True, no_settings=launch_command.SETTINGS_COME_LATER
    )
    show_help(flags, {"": OF_LAUNCH}, LAUNCH_USAGE)
    problems = list(flags.layer.problems)
    problems += misplaced(flags.values, OF_CLUSTER, "the cluster's nodes are the hosts")
    if not flags.positional:
        problems.append("no TASK or SCRIPT.py was given")

    with _cloud_job(flags.values, problems, "launch") as job:
        target, *arguments = flags.positional
        job.await_nodes()
        if flags.values.get("doctor", True):
            job.check_pairs()
        task_words = _with_volume(target, arguments, is_spot=job.is_spot)
        return job.run([*_launch_words(flags.values, target), target, *task_words])


@contextmanager
def _cloud_job(values: FlagValues, problems: list[str], verb: str) -> Iterator[_CloudJob]:
    """Of the cluster that the flags name. `problems`: those of the command line."""
    named = {name: value for name, value in values.items() if name in OF_LAUNCH}
    account, settings = account_and_settings(named, problems, verb)
    with tempfile.TemporaryDirectory(prefix="drumline-aws-") as folder:
        yield _CloudJob(account, settings, Path(folder), values.identity)


def _follow(verb: str, argv: Sequence[str]) -> int:
    """`drumline jobs`, `attach` or `stop`, with the cluster's nodes as the hosts."""
    table = {**FOLLOW, **(stop_command.OWN_FLAGS if verb == "stop" else {})}
    flags = read_command(f"aws {verb}", argv, {"": table}, f"usage: {LINES[verb]}\n")
    with _cloud_job(flags.values, [], verb) as job:
        job.find_nodes()
        save = ["--save"] if flags.values.save else []
        return int(FOLLOWERS[verb].run([*job.hosts(), *save, *flags.positional]))


def _launch_words(values: FlagValues, target: str) -> Iterator[str]:
    """The flags of `drumline launch`, and what is the default on a cluster."""
    if "sync" not in values:
        yield "--sync"
    if not any(values.get(name) for name in ("attach", "detach", "profile", "print")):
        yield "--detach"
    if is_script(target):
        yield f"--env=OUTPUT_DIR={RUNS}"
    for name, value in values.items():
        if name not in OF_LAUNCH:
            texts = value if isinstance(value, list) else [flag_text(value)]
            yield from (f"--{name}={text}" for text in texts)


def _with_volume(target: str, arguments: Sequence[str], *, is_spot: bool) -> list[str]:
    """A task's arguments, with the run folder on the volume and the spot notice where they are not
    given."""
    if is_script(target):
        return list(arguments)
    run = ("--run", str(RUNS / run_name(target)))
    notice = ("--watch.notice", NOTICE if is_spot else None)
    _, _, *task_words = task_program(target, arguments, run, notice).words
    return task_words


class _CloudJob:
    """A job on the nodes that the cluster has now."""

    def __init__(
        self, account: Account, settings: ClusterSettings, folder: Path, identity: str | None
    ) -> None:
        self._account = account
        self._settings = settings
        stack = find_cluster(account, settings)
        if stack is None or stack["StackStatus"] != "CREATE_COMPLETE":
            state = f"is in the state {stack['StackStatus']}" if stack else "does not exist"
            raise UsageError(
                f"the cluster {settings.name} {state} in {account.region}",
                next_step="drumline aws up makes it, drumline aws status lists all",
            )

        parameters = parameters_of(stack)
        self._by_ssm = parameters["SessionManager"] == "true"
        self._num_nodes = int(parameters["NodeCount"])
        self.is_spot = parameters["Market"] == "spot"
        if self._by_ssm:
            check_session_manager(f"the cluster {settings.name} was made with --ssm, which")

        key = ["--identity", identity] if identity else []
        self._follow = ["drumline", "aws", "{verb}", "{job}", *_place(settings), *key]
        self._config = folder / "ssh_config"
        self._ssh = ["ssh", "-F", str(self._config)]
        if identity:
            self._ssh += ["-i", identity]
        self._wheel = Path(os.devnull)
        self._prepare_words = ["sudo", PREPARE, str(Path.cwd())]
        if parameters.get("CopiesDrumline") == "true":
            wheel = build_wheel()
            self._wheel = folder / wheel.name
            self._wheel.write_bytes(wheel.content)
            self._prepare_words += [hashlib.sha256(wheel.content).hexdigest(), wheel.name]

        self._nodes: Sequence[CloudNode] = ()

    def check_pairs(self) -> None:
        """Raise if `drumline doctor` finds something on the nodes."""
        code = doctor_command.run([*self.hosts(), "--code", "/opt/drumline/bin", "--run", SHARED])
        if code:
            raise PreflightError(
                f"doctor found something to fix on the nodes (exit code {code}); its report is above",
                next_step="fix it, or launch all the same with --no-doctor",
            )

    def run(self, words: Sequence[str]) -> int:
        """Until it ends, and again on the new nodes when AWS has replaced some."""
        while True:
            try:
                code = launch_command.run([*self.hosts(), *words], self._follow)
            except DrumlineError as error:
                if not self._was_replaced(error.exit_code):
                    raise
            else:
                if not self._was_replaced(code):
                    return code
            self.await_nodes()
            words = [word for word in words if word != "--fresh"]  # it belongs to the first start

    def hosts(self) -> list[str]:
        """The flags by which other verbs reach the nodes."""
        hosts = ",".join(node.address for node in self._nodes)
        return [
            "--hosts",
            hosts,
            "--ssh",
            shlex.join(self._ssh),
            "--python",
            PYTHON,
        ]

    def _was_replaced(self, code: int) -> bool:
        """Whether a node is no longer there. After a spot notice it is, for two more minutes."""
        if code in (ExitCode.SUCCESS, ExitCode.USAGE, ExitCode.INTERRUPTED):
            return False
        has_notice = self.is_spot and code == ExitCode.PREEMPTED
        if has_notice:
            print_message(
                f"waiting for AWS to take the node back, at most {REPLACED_S / 60:.0f} minutes"
            )

        deadline = time.monotonic() + REPLACED_S

        while not (ended := self._ended()):
            if time.monotonic() >= deadline or not (has_notice or self._report_lost()):
                return False
            has_notice = True
            time.sleep(POLL_S)

        print_message(
            f"AWS took back {join_names(ended)}; waiting for its replacement, then the run resumes"
        )
        return True

    def _ended(self) -> list[str]:
        left = {node.id for node in nodes_of(self._account, self._settings.name)}
        return [node.address for node in self._nodes if node.id not in left]

    def _report_lost(self) -> bool:
        """Have AWS replace nodes that do not answer, which it notices late. If none answers, the
        fault may be here."""
        failed, _ = self._prepare()
        lost = [node for node, code in failed.items() if code == SSH_FAILED]
        if len(lost) == len(self._nodes):
            return False

        for node in lost:
            print_message(f"{node.address} ({node.id}) does not answer: asking AWS to replace it")
            self._account.call(
                "autoscaling",
                "set_instance_health",
                InstanceId=node.id,
                HealthStatus="Unhealthy",
                ShouldRespectGracePeriod=False,
            )

        return bool(lost)

    def find_nodes(self) -> None:
        """Those that the cluster has now, and how ssh reaches them."""
        self._nodes = nodes_of(self._account, self._settings.name)
        config = ssh_config(
            self._account,
            self._nodes,
            by_ssm=self._by_ssm,
            profile=self._settings.profile,
        )
        self._config.write_text(config, encoding="utf-8")

    def await_nodes(self) -> None:
        """Until all nodes of the cluster run, and each has this folder and everything installed."""
        deadline = time.monotonic() + READY_S
        while True:
            self.find_nodes()
            nodes = self._nodes
            waiting, reason = self._prepare()
            if len(nodes) == self._num_nodes and not waiting:
                show_step("")
                return
            run = f"{len(nodes)} of {plural(self._num_nodes, 'node')} run"
            stack = self._settings.stack
            is_short = len(nodes) < self._num_nodes
            if is_short and group_of(self._account, stack)["DesiredCapacity"] < self._num_nodes:
                why = "they ended when they were idle, or the time of the cluster is over"
                again = f"drumline aws up --name {self._settings.name} starts them again, if its time is not over"
                raise PreflightError(
                    f"{run}, and AWS starts no other: {why}",
                    next_step=f"{again}; the same command then resumes",
                )
            if time.monotonic() >= deadline:
                raise reason or PreflightError(
                    f"{run} after {READY_S / 60:.0f} minutes",
                    next_step="AWS may have no capacity: wait, or give another --zone or --type to a new cluster",
                )
            show_step(f"nodes: {len(nodes) - len(waiting)} of {self._num_nodes} are ready")
            time.sleep(POLL_S)

    def _prepare(self) -> tuple[dict[CloudNode, int], DrumlineError | None]:
        """Make this folder on each node, with drumline; those that are not ready, with their exit
        codes, and the last reason. Raises where drumline cannot be installed."""
        started = [(node, self._start_preparing(node)) for node in self._nodes]
        waiting: dict[CloudNode, int] = {}
        reason: DrumlineError | None = None

        for node, process in started:
            output = os.fsdecode(process.communicate()[1]).splitlines()
            if process.returncode == NOT_INSTALLED:
                raise PreflightError(
                    f"{node.address} ({node.id}): drumline could not be installed: {last_line(output)}",
                    next_step="run the same command again; if it stays, `drumline aws down`, then up",
                )
            if process.returncode:
                waiting[node] = process.returncode
                reason = not_reached(
                    Host(node.address), process.returncode, output, python=PREPARE, cwd="/"
                )

        return waiting, reason

    def _start_preparing(self, node: CloudNode) -> subprocess.Popen[bytes]:
        """Run prepare.sh there, with the wheel of this installation on its stdin."""
        host = Host(node.address)
        words = ssh_words(self._ssh, host, self._prepare_words, cwd=PurePosixPath("/"))
        with self._wheel.open("rb") as wheel:
            return subprocess.Popen(
                words, stdin=wheel, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
