"""What environment variables say about where a process runs, engine by engine."""

import pytest

from telegrad.errors import RendezvousError
from telegrad.rpc.job.environment import DEFAULT_PORT, detect, expand_hosts, port_for

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29511"}
ELASTIC = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "1"}
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
}
INDEXED = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4"}
POD = "train-2.train.default.svc.cluster.local"
JOBSET = {
    "JOB_COMPLETION_INDEX": "1",
    "JOBSET_NAME": "train",
    "REPLICATED_JOB_NAME": "workers",
    "JOB_INDEX": "2",
    "PODS_PER_JOB": "2",
    "WORLD_SIZE": "6",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
SLURM_PORT = port_for("17.0")


@pytest.mark.parametrize(
    ("variables", "hostname", "engine", "name", "rank", "size", "address", "job"),
    [
        ({}, "h", "", "", -1, None, "", ""),
        (TORCHRUN, "h", "RANK and WORLD_SIZE", "worker3", 3, 4, "tcp://10.0.0.1:29511", ""),
        (ELASTIC, "h", "torchrun", "worker3", 3, 4, "tcp://10.0.0.1:29511", "torchrun abc"),
        (
            {**ELASTIC, "MASTER_ADDR": "fd00::1"},
            "h",
            "torchrun",
            "worker3",
            3,
            4,
            "tcp://[fd00::1]:29511",
            "torchrun abc",
        ),
        # PyTorchJob sets torch's own variables
        (
            {**TORCHRUN, "MASTER_ADDR": "t-master-0", "RANK": "0"},
            "t-master-0",
            "RANK and WORLD_SIZE",
            "worker0",
            0,
            4,
            "tcp://t-master-0:29511",
            "",
        ),
        # torchrun within a Slurm step: the innermost launcher decides
        ({**SLURM, **ELASTIC}, "h", "torchrun", "worker3", 3, 4, "tcp://10.0.0.1:29511", "torchrun abc"),
        (SLURM, "gpu08", "Slurm", "worker2", 2, 8, f"tcp://gpu07:{SLURM_PORT}", "slurm 17.0"),
        (
            {**SLURM, "MASTER_ADDR": "login", "MASTER_PORT": "5000"},
            "h",
            "Slurm",
            "worker2",
            2,
            8,
            "tcp://login:5000",
            "slurm 17.0",
        ),
        # a batch script is no worker
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "17"}, "h", "", "", -1, None, "", ""),
        (
            INDEXED,
            POD,
            "Kubernetes Indexed Job",
            "worker2",
            2,
            4,
            f"tcp://train-0.train.default.svc.cluster.local:{DEFAULT_PORT}",
            "kubernetes train.train.default.svc.cluster.local",
        ),
        (
            {**INDEXED, "MASTER_ADDR": "train-0.train"},
            "elsewhere",
            "Kubernetes Indexed Job",
            "worker2",
            2,
            4,
            f"tcp://train-0.train:{DEFAULT_PORT}",
            "",
        ),
        (
            JOBSET,
            "h",
            "Kubernetes JobSet",
            "worker5",
            5,
            6,
            f"tcp://train-workers-0-0.train:{DEFAULT_PORT}",
            "jobset train",
        ),
        (OPEN_MPI, "h", "Open MPI", "worker1", 1, 2, f"tcp://127.0.0.1:{DEFAULT_PORT}", ""),
        (
            {**OPEN_MPI, "PMIX_NAMESPACE": "x"},
            "h",
            "Open MPI",
            "worker1",
            1,
            2,
            f"tcp://127.0.0.1:{port_for('x')}",
            "mpi x",
        ),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "n0"},
            "h",
            "MPICH",
            "worker0",
            0,
            2,
            f"tcp://n0:{DEFAULT_PORT}",
            "",
        ),
        # what is said to Telegrad itself comes first, one by one
        (
            {**SLURM, "TELEGRAD_NAME": "ps", "TELEGRAD_ADDRESS": "file:///x"},
            "h",
            "Slurm",
            "ps",
            2,
            8,
            "file:///x",
            "slurm 17.0",
        ),
        (
            {"TELEGRAD_RANK": "1", "TELEGRAD_WORLD_SIZE": "2", "TELEGRAD_ADDRESS": "tcp://a:1", "TELEGRAD_JOB": "j"},
            "h",
            "TELEGRAD_*",
            "worker1",
            1,
            2,
            "tcp://a:1",
            "j",
        ),
    ],
)
def test_what_is_found(
    variables: dict[str, str],
    hostname: str,
    engine: str,
    name: str,
    rank: int,
    size: int | None,
    address: str,
    job: str,
) -> None:
    found = detect(variables, hostname)
    assert (found.engine, found.name, found.rank, found.world_size, found.address, found.job) == (
        engine,
        name,
        rank,
        size,
        address,
        job,
    )


def test_each_fact_says_where_it_is_from() -> None:
    assert str(detect({**SLURM, "TELEGRAD_HOST": "10.1.1.1"})) == (
        "Slurm: rank 2 (SLURM_PROCID), world_size 8 (SLURM_STEP_NUM_TASKS), "
        "job slurm 17.0 (SLURM_JOB_ID and SLURM_STEP_ID), "
        f"address tcp://gpu07:{SLURM_PORT} (the first of SLURM_STEP_NODELIST and the job's number), "
        "host 10.1.1.1 (TELEGRAD_HOST), name worker2 (the rank)"
    )


@pytest.mark.parametrize(
    ("variables", "what"),
    [
        ({**TORCHRUN, "RANK": "x"}, "RANK='x'"),
        ({"JOB_COMPLETION_INDEX": "0"}, "Put WORLD_SIZE"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "set MASTER_ADDR"),
        ({**SLURM, "SLURM_STEP_NODELIST": "a[x-y]"}, "not a list of hosts"),
        ({**JOBSET, "JOB_INDEX": "one"}, "must be numbers"),
    ],
)
def test_what_is_wrong_is_named(variables: dict[str, str], what: str) -> None:
    with pytest.raises(RendezvousError, match=what):
        detect(variables)


@pytest.mark.parametrize(
    ("compact", "hosts"),
    [
        ("", []),
        ("one", ["one"]),
        ("a,b", ["a", "b"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10],m", ["n08", "n09", "n10", "m"]),
        ("r[1-2]c[0-1]-x", ["r1c0-x", "r1c1-x", "r2c0-x", "r2c1-x"]),
        ("tux[1,3-4]", ["tux1", "tux3", "tux4"]),
    ],
)
def test_lists_of_hosts(compact: str, hosts: list[str]) -> None:
    assert list(expand_hosts(compact)) == hosts
