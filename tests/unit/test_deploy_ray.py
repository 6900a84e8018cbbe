"""The job for KubeRay, as far as it can be checked without a cluster."""

import re
import shlex
from pathlib import Path

import click
import yaml

from mlcd.cli import cli

ROOT = Path(__file__).resolve().parents[2]
JOB, CLAIM = yaml.safe_load_all((ROOT / "deploy" / "ray" / "rayjob.yaml").read_text())
CLUSTER = JOB["spec"]["rayClusterSpec"]


def test_its_command_is_one_of_ours():
    program, name, *arguments = shlex.split(JOB["spec"]["entrypoint"])
    assert program == "mlcd"
    parent = click.Context(cli)
    command = cli.get_command(parent, name)
    assert command is not None
    context = command.make_context(name, arguments, parent=parent)
    assert context.params["on"] == "ray"


def test_every_pod_has_the_image_and_the_volume():
    pods = [
        group["template"]["spec"]
        for group in (CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"])
    ]
    for pod in pods:
        (container,), (volume,) = pod["containers"], pod["volumes"]
        assert container["image"] == "mlcd-ray"
        assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/shared"}]
        assert volume["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    assert CLAIM["spec"]["accessModes"] == ["ReadWriteMany"]


def test_one_version_of_ray():
    image = (ROOT / "deploy" / "ray" / "Dockerfile").read_text()
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"rayproject/ray:{CLUSTER['rayVersion']}-" in image
    assert pinned is not None
    assert pinned[1] == CLUSTER["rayVersion"]
