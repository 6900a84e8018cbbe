"""The jobs and the cluster for KubeRay, as far as they can be checked without a cluster.

Kubernetes' own kinds, and the pods inside of KubeRay's, are held against Kubernetes' schemas. No
package has those of KubeRay, so of its kinds the names of the fields that are used are held here.
"""

import re
import shlex
from pathlib import Path

import click
import kubernetes_validate
import pytest
import yaml

from mlcd.cli import cli
from mlcd.training.config import load_config

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy" / "ray"
KUBERNETES = kubernetes_validate.latest_version()
MANIFESTS = {
    f"{path.stem}-{manifest['kind']}": manifest
    for path in sorted(DEPLOY.glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
}
JOBS = {name: each for name, each in MANIFESTS.items() if each["kind"] == "RayJob"}
CLUSTERS = {
    name: each["spec"] if each["kind"] == "RayCluster" else each["spec"]["rayClusterSpec"]
    for name, each in MANIFESTS.items()
    if each["apiVersion"] == "ray.io/v1"
}
CLAIM = MANIFESTS["volume-PersistentVolumeClaim"]

# The fields of ray.io/v1 that KubeRay documents and these files use, with their types.
JOB_FIELDS = {
    "entrypoint": str,
    "backoffLimit": int,
    "shutdownAfterJobFinishes": bool,
    "ttlSecondsAfterFinished": int,
    "rayClusterSpec": dict,
}
CLUSTER_FIELDS = {
    "rayVersion": str,
    "enableInTreeAutoscaling": bool,
    "headGroupSpec": dict,
    "workerGroupSpecs": list,
}
HEAD_FIELDS = {"rayStartParams": dict, "template": dict}
WORKER_FIELDS = HEAD_FIELDS | {
    "groupName": str,
    "replicas": int,
    "minReplicas": int,
    "maxReplicas": int,
}


def groups(cluster):
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def parsed(job):
    """The options of a job's command, read by the command itself."""
    program, name, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert program == "mlcd"
    parent = click.Context(cli)
    command = cli.get_command(parent, name)
    assert command is not None
    return command.make_context(name, arguments, parent=parent).params


def check_fields(given, fields):
    assert set(given) <= set(fields), "no field of KubeRay's that we know of"
    for name, value in given.items():
        assert type(value) is fields[name], (name, value)


def test_they_are_two_jobs_a_cluster_and_a_volume():
    kinds = sorted(manifest["kind"] for manifest in MANIFESTS.values())
    assert kinds == ["PersistentVolumeClaim", "RayCluster", "RayJob", "RayJob"]


@pytest.mark.parametrize("name", JOBS)
def test_its_command_is_one_of_ours(name):
    assert parsed(JOBS[name])["on"] == "ray"


def test_the_training_is_one_that_begins():
    """Its recipe and overrides are valid, and its GPUs are those of the pods."""
    job = JOBS["rayjob-train-RayJob"]
    given = parsed(job)
    config = load_config(given["recipe"], given["overrides"])
    assert config.out.startswith("/shared/")
    assert config.data.images.startswith("/shared/")
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    a_pod = int(limits["nvidia.com/gpu"]) // given["gpus"]
    assert a_pod * given["cpus"] <= int(limits["cpu"])
    assert a_pod * group["maxReplicas"] == given["workers"]
    assert "/dev/shm" in [mount["mountPath"] for mount in container["volumeMounts"]]


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_manifest_is_valid(name):
    manifest = MANIFESTS[name]
    if not manifest["apiVersion"].startswith("ray.io/"):
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        return
    assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
    if manifest["kind"] == "RayJob":
        check_fields(manifest["spec"], JOB_FIELDS)
    check_fields(CLUSTERS[name], CLUSTER_FIELDS)
    for number, group in enumerate(groups(CLUSTERS[name])):
        check_fields(group, WORKER_FIELDS if number else HEAD_FIELDS)
        assert all(type(value) is str for value in group["rayStartParams"].values())
        if number:
            assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "any"}}
        kubernetes_validate.validate(pod | {"template": group["template"]}, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_pod_has_the_image_and_the_volume(name):
    for group in groups(CLUSTERS[name]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == "mlcd-ray"
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert set(mounts) == set(volumes)
        assert mounts["shared"] == "/shared"
        claim = volumes["shared"]["persistentVolumeClaim"]["claimName"]
        assert claim == CLAIM["metadata"]["name"]
    assert CLAIM["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize("name", CLUSTERS)
def test_one_version_of_ray(name):
    image = (DEPLOY / "Dockerfile").read_text()
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"rayproject/ray:{CLUSTERS[name]['rayVersion']}-" in image
    assert pinned is not None
    assert pinned[1] == CLUSTERS[name]["rayVersion"]
