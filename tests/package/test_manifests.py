"""The Kubernetes manifests in docs: what each pod would find in its environment makes one job of all of them.

No cluster runs them here. What the controllers promise (names of pods, labels, variables) is written out below.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from telegrad.rpc.job.environment import detect

MANIFESTS = Path(__file__).parents[2] / "docs" / "manifests"


def manifest(name: str, kind: str) -> Any:
    parts = list(yaml.safe_load_all((MANIFESTS / f"{name}.yaml").read_text()))
    assert all("apiVersion" in part and part["metadata"]["name"] for part in parts)
    return next(part for part in parts if part["kind"] == kind)


def variables_of(pod: Any, labels: dict[str, str]) -> dict[str, str]:
    """The environment of a pod's only container, as far as the manifest says it."""
    (container,) = pod["spec"]["containers"]
    found = {}
    for variable in container["env"]:
        path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        if path.startswith("metadata.labels"):
            found[variable["name"]] = labels[path.removeprefix("metadata.labels['").removesuffix("']")]
        elif path == "status.podIP":
            found[variable["name"]] = "10.0.0.7"
        elif "value" in variable:
            found[variable["name"]] = variable["value"]
        else:
            assert variable["valueFrom"]["secretKeyRef"]["key"] == "secret"
            found[variable["name"]] = "secret"
    return found


def indexed_job() -> Iterator[tuple[dict[str, str], str]]:
    job = manifest("indexed-job", "Job")
    service = manifest("indexed-job", "Service")["metadata"]["name"]
    assert job["spec"]["template"]["spec"]["subdomain"] == service
    for index in range(job["spec"]["completions"]):
        variables = variables_of(job["spec"]["template"], {}) | {"JOB_COMPLETION_INDEX": str(index)}
        yield variables, f"{job['metadata']['name']}-{index}.{service}.default.svc.cluster.local"


def jobset() -> Iterator[tuple[dict[str, str], str]]:
    found = manifest("jobset", "JobSet")
    name = found["metadata"]["name"]
    for group in found["spec"]["replicatedJobs"]:
        job = group["template"]["spec"]
        for job_index, index in itertools.product(range(group["replicas"]), range(job["completions"])):
            labels = {
                "jobset.sigs.k8s.io/jobset-name": name,
                "jobset.sigs.k8s.io/replicatedjob-name": group["name"],
                "jobset.sigs.k8s.io/job-index": str(job_index),
            }
            variables = variables_of(job["template"], labels) | {"JOB_COMPLETION_INDEX": str(index)}
            yield variables, f"{name}-{group['name']}-{job_index}-{index}.{name}"


def pytorchjob() -> Iterator[tuple[dict[str, str], str]]:
    job = manifest("pytorchjob", "PyTorchJob")
    specs = job["spec"]["pytorchReplicaSpecs"]
    names = [f"train-{kind.lower()}-{index}" for kind in specs for index in range(specs[kind]["replicas"])]
    for rank, name in enumerate(names):
        given = {"RANK": str(rank), "WORLD_SIZE": str(len(names)), "MASTER_ADDR": names[0], "MASTER_PORT": "23456"}
        yield variables_of(specs["Master" if rank == 0 else "Worker"]["template"], {}) | given, name


@pytest.mark.parametrize("pods", [indexed_job, jobset, pytorchjob])
def test_the_pods_of_a_manifest_are_one_job(pods: Any) -> None:
    found = [(detect(variables, hostname), hostname) for variables, hostname in pods()]
    assert len(found) == 4
    assert [place.rank for place, _ in found] == [0, 1, 2, 3]
    assert {place.world_size for place, _ in found} == {4}
    assert {place.host for place, _ in found} == {"10.0.0.7"}
    (address,) = {place.address for place, _ in found}
    assert address.startswith(f"tcp://{found[0][1]}:")  # the pod of rank 0
