from __future__ import annotations

import pytest

from drumline.base.errors import PreflightError, UsageError
from drumline.base.rank_environment import first_host, node_names, rank_variables, topology_from

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
}


def test_torchruns_variables_are_read() -> None:
    topology = topology_from(TORCHRUN)
    assert topology is not None
    assert (topology.rank, topology.world_size, topology.local_rank, topology.local_world_size) == (
        3,
        4,
        1,
        2,
    )
    assert (topology.master_addr, topology.master_port) == ("node-a", 29500)
    assert (topology.is_restart, topology.agent_hosts_store) == (True, True)
    first = topology_from(
        {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_RESTART_COUNT": "0"}
    )
    assert first is not None
    assert (first.is_restart, first.agent_hosts_store) == (False, False)


def test_without_a_launcher_there_is_no_topology() -> None:
    assert topology_from({"HOME": "/", "OMPI_COMM_WORLD_SIZE": "1"}) is None


def test_what_mpirun_started_does_not_take_itself_for_the_only_rank() -> None:
    with pytest.raises(
        PreflightError,
        match=r"several processes \(OMPI_COMM_WORLD_SIZE=4\), but none knows its rank",
    ):
        topology_from({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"})
    assert topology_from({**TORCHRUN, "OMPI_COMM_WORLD_SIZE": "4"}) is not None


def test_missing_variables_are_all_named() -> None:
    with pytest.raises(
        PreflightError,
        match=r"set RANK=3, WORLD_SIZE=4 but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT",
    ):
        topology_from({"RANK": "3", "WORLD_SIZE": "4"})


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(UsageError, match="MASTER_PORT is 'http', which is not a whole number"):
        topology_from({**TORCHRUN, "MASTER_PORT": "http"})


def test_a_rank_beyond_the_world_size_is_rejected() -> None:
    with pytest.raises(PreflightError, match="RANK is 4, but WORLD_SIZE is 4"):
        topology_from({**TORCHRUN, "RANK": "4"})


def test_srun_is_understood() -> None:
    topology = topology_from(SRUN)
    assert topology is not None
    assert (topology.rank, topology.world_size, topology.local_rank, topology.local_world_size) == (
        5,
        8,
        1,
        4,
    )
    assert topology.master_addr == "gpu007"
    assert not topology.agent_hosts_store


def test_torchrun_inside_srun_wins() -> None:
    topology = topology_from({**SRUN, **TORCHRUN})
    assert topology is not None
    assert topology.rank == 3


def test_a_batch_script_or_a_single_task_is_no_world() -> None:
    assert rank_variables({"SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}) == {}
    assert rank_variables({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}) == {}


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("node-a", "node-a"),
        ("node-a,node-b", "node-a"),
        ("gpu[007-009,12],login", "gpu007"),
        ("rack[1-2]-gpu,x", "rack1-gpu"),
    ],
)
def test_the_first_host_of_slurms_shorthand(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu[007-009,12],login", ["gpu007", "gpu008", "gpu009", "gpu12", "login"]),
        ("rack[1-2]n[1-2]", ["rack1n1", "rack1n2", "rack2n1", "rack2n2"]),
        ("a,b", ["a", "b"]),
        ("", []),
    ],
)
def test_slurms_names_of_hosts_are_spelled_out(text: str, names: list[str]) -> None:
    assert node_names(text) == names


def test_hosts_have_names_where_ranks_are_dealt_in_equal_blocks() -> None:
    topology = topology_from(SRUN)
    assert topology is not None
    assert topology.node_names == ("gpu007", "gpu008")
    for changes in ({"SLURM_STEP_TASKS_PER_NODE": "4,3"}, {"SLURM_DISTRIBUTION": "cyclic"}):
        topology = topology_from({**SRUN, **changes})
        assert topology is not None
        assert topology.node_names == ()
