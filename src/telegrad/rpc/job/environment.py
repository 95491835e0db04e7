"""Where this process runs, by its environment variables: under torchrun, Slurm, Kubernetes, MPI, or by hand.

Pure: variables and the host's name in, what they say out, with the variable that said it. Engines are looked for in
this order, and the first that knows the rank and the number of workers decides:

    torchrun, or anything that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as it does (PyTorchJob, telegrad run)
    Slurm         srun -n 4 python train.py
    Kubernetes    an Indexed Job, a JobSet
    MPI           mpirun -n 4 python train.py

Whatever a variable TELEGRAD_NAME, _RANK, _WORLD_SIZE, _ADDRESS, _HOST or _JOB says comes before that.
"""

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from telegrad.errors import RendezvousError

Variables = Mapping[str, str]

DEFAULT_PORT = 29500
_FIRST_PORT, _PORTS = 10000, 20000  # below the range that systems give to connections going out
_MANY_HOSTS = 100_000


class Fact(NamedTuple):
    """One thing that was found, and where."""

    what: str
    value: str
    source: str


class Found(NamedTuple):
    """What the environment says. Empty or None: nothing."""

    engine: str = ""
    name: str = ""
    rank: int = -1
    world_size: int | None = None
    address: str = ""  # for init_method
    host: str = ""
    job: str = ""  # what the engine calls this job
    facts: tuple[Fact, ...] = ()

    def __str__(self) -> str:
        said = ", ".join(f"{fact.what} {fact.value} ({fact.source})" for fact in self.facts)
        return f"{self.engine or 'no engine'}: {said or 'nothing is set'}"


class _Notes:
    """Collects what is found."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.facts: dict[str, Fact] = {}

    def note(self, what: str, value: object, source: str) -> None:
        self.facts[what] = Fact(what, str(value), source)

    def value(self, what: str) -> str:
        fact = self.facts.get(what)
        return "" if fact is None else fact.value


def detect(variables: Variables, hostname: str = "") -> Found:
    """What these variables say, on a machine of this (full) name. RendezvousError if they contradict themselves."""
    notes = next(filter(None, (look(variables, hostname) for look in _ENGINES)), None) or _Notes("")
    for what, variable in _OURS.items():
        if variables.get(variable):
            notes.note(what, variables[variable], variable)
    rank, world_size = notes.value("rank"), notes.value("world_size")
    if rank and "name" not in notes.facts:
        notes.note("name", f"worker{rank}", "the rank")
    return Found(
        notes.engine or ("TELEGRAD_*" if rank or notes.value("address") else ""),
        notes.value("name"),
        _number(notes, "rank") if rank else -1,
        _number(notes, "world_size") if world_size else None,
        notes.value("address"),
        notes.value("host"),
        notes.value("job"),
        tuple(notes.facts.values()),
    )


_OURS = {what: f"TELEGRAD_{what.upper()}" for what in ("name", "rank", "world_size", "address", "host", "job")}


def _number(notes: _Notes, what: str) -> int:
    fact = notes.facts[what]
    if not fact.value.isdecimal():
        raise RendezvousError(f"{fact.source}={fact.value!r} cannot be the {what}: it must be a number")
    return int(fact.value)


def _note_address(notes: _Notes, variables: Variables, host: str, source: str, port: int, port_source: str) -> None:
    """The address: MASTER_ADDR and MASTER_PORT where they are given, for each of them what was found otherwise."""
    if variables.get("MASTER_ADDR"):
        host, source = variables["MASTER_ADDR"], "MASTER_ADDR"
    if variables.get("MASTER_PORT", "").isdecimal():
        port, port_source = int(variables["MASTER_PORT"]), "MASTER_PORT"
    if host:
        shown = f"[{host}]" if ":" in host else host
        notes.note("address", f"tcp://{shown}:{port}", f"{source} and {port_source}")


# --- engines: each returns None if it is not the one ---


def _torchrun(variables: Variables, _: str) -> _Notes | None:
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        return None
    run = variables.get("TORCHELASTIC_RUN_ID", "")
    notes = _Notes("torchrun" if run else "RANK and WORLD_SIZE")
    notes.note("rank", variables["RANK"], "RANK")
    notes.note("world_size", variables["WORLD_SIZE"], "WORLD_SIZE")
    _note_address(notes, variables, "", "", DEFAULT_PORT, "torch's default port")
    if run:
        notes.note("job", f"torchrun {run}", "TORCHELASTIC_RUN_ID")
    return notes


def _slurm(variables: Variables, _: str) -> _Notes | None:
    # A batch script has SLURM_PROCID and SLURM_NTASKS, too, though it is one process: only a step has its own count.
    if "SLURM_PROCID" not in variables or "SLURM_STEP_NUM_TASKS" not in variables:
        return None
    notes = _Notes("Slurm")
    notes.note("rank", variables["SLURM_PROCID"], "SLURM_PROCID")
    notes.note("world_size", variables["SLURM_STEP_NUM_TASKS"], "SLURM_STEP_NUM_TASKS")
    job, step = variables.get("SLURM_JOB_ID", "0"), variables.get("SLURM_STEP_ID", "0")
    notes.note("job", f"slurm {job}.{step}", "SLURM_JOB_ID and SLURM_STEP_ID")
    variable = "SLURM_STEP_NODELIST" if variables.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    first = next(expand_hosts(variables.get(variable, "")), "")
    _note_address(notes, variables, first, f"the first of {variable}", port_for(f"{job}.{step}"), "the job's number")
    return notes


def _kubernetes(variables: Variables, hostname: str) -> _Notes | None:
    index = variables.get("JOB_COMPLETION_INDEX")
    if index is None or not index.isdecimal():
        return None
    if variables.get("JOBSET_NAME"):
        return _jobset(variables, int(index))
    notes = _Notes("Kubernetes Indexed Job")
    notes.note("rank", index, "JOB_COMPLETION_INDEX")
    _note_size(notes, variables)
    # Pods of an Indexed Job with a subdomain are called job-0.subdomain..., job-1.subdomain...
    pod, dot, domain = (hostname or variables.get("HOSTNAME", "")).partition(".")
    job = pod.removesuffix(f"-{index}")
    if job != pod:
        _note_address(
            notes, variables, f"{job}-0{dot}{domain}", "the name of this pod", DEFAULT_PORT, "torch's default port"
        )
        notes.note("job", f"kubernetes {job}{dot}{domain}", "the name of this pod")
    else:
        _note_address(notes, variables, "", "", DEFAULT_PORT, "torch's default port")
    return notes


def _jobset(variables: Variables, index: int) -> _Notes:
    """The manifest hands down the labels of the JobSet; see docs/where-to-run.md."""
    notes = _Notes("Kubernetes JobSet")
    jobs, pods = variables.get("JOB_INDEX", "0"), variables.get("PODS_PER_JOB", "1")
    if not jobs.isdecimal() or not pods.isdecimal():
        raise RendezvousError(f"JOB_INDEX={jobs!r} and PODS_PER_JOB={pods!r} must be numbers")
    notes.note("rank", int(jobs) * int(pods) + index, "JOB_INDEX, PODS_PER_JOB and JOB_COMPLETION_INDEX")
    _note_size(notes, variables)
    name, part = variables["JOBSET_NAME"], variables.get("REPLICATED_JOB_NAME", "workers")
    first = f"{name}-{part}-0-0.{name}"
    _note_address(notes, variables, first, "JOBSET_NAME and REPLICATED_JOB_NAME", DEFAULT_PORT, "torch's default port")
    notes.note("job", f"jobset {name}", "JOBSET_NAME")
    return notes


def _note_size(notes: _Notes, variables: Variables) -> None:
    """Kubernetes does not tell a pod how many there are: the manifest says it."""
    for variable in ("WORLD_SIZE", "TELEGRAD_WORLD_SIZE"):
        if variables.get(variable):
            notes.note("world_size", variables[variable], variable)
            return
    raise RendezvousError(
        f"{notes.engine}: the number of workers is not given. Put WORLD_SIZE, its completions, into the manifest"
    )


def _mpi(variables: Variables, _: str) -> _Notes | None:
    kinds = (each for each in _MPI if each[1] in variables and each[2] in variables)
    kind, rank, size, local = next(kinds, ("", "", "", ""))
    if not kind:
        return None
    notes = _Notes(kind)
    notes.note("rank", variables[rank], rank)
    notes.note("world_size", variables[size], size)
    job = next((variables[name] for name in _MPI_JOBS if variables.get(name)), "")
    if job:
        notes.note("job", f"mpi {job}", "the job's name")
    port = port_for(job) if job else DEFAULT_PORT
    here = variables.get(local) == variables[size]
    _note_address(
        notes,
        variables,
        "127.0.0.1" if here else "",
        f"{local}, which is all",
        port,
        "the job's name" if job else "torch's default port",
    )
    if "address" not in notes.facts:
        raise RendezvousError(
            f"{kind}: on several hosts, set MASTER_ADDR to the host of rank 0 (mpirun -x MASTER_ADDR=...)"
        )
    return notes


_MPI = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
)
_MPI_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_ID_JOB", "HYDI_CONTROL_FD")

_ENGINES: tuple[Callable[[Variables, str], _Notes | None], ...] = (_torchrun, _slurm, _kubernetes, _mpi)


# --- Slurm's way of writing many hosts in short ---


def port_for(job: str) -> int:
    """A port that all workers of a job find by themselves, and that another job most likely does not."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def expand_hosts(compact: str) -> Iterator[str]:
    """The hosts of a list in Slurm's form: `a,b[1-3,07]-x` is a, b1-x, b2-x, b3-x, b07-x."""
    for group in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", compact):
        yield from _expand(group.strip())


def _expand(group: str) -> Iterator[str]:
    before, bracket, rest = group.partition("[")
    if not bracket:
        yield group
        return
    choices, _, after = rest.partition("]")
    for choice in choices.split(","):
        low, _, high = choice.partition("-")
        if not low.isdecimal() or (high and not high.isdecimal()) or int(high or low) - int(low) > _MANY_HOSTS:
            raise RendezvousError(f"{group!r} is not a list of hosts")
        for number in range(int(low), int(high or low) + 1):
            for tail in _expand(after):
                yield f"{before}{number:0{len(low)}d}{tail}"
