"""The command `mlcd worker`."""

import os
import socket

import click

from mlcd.errors import ConfigInvalid
from mlcd.images.quiet import silence_decoders
from mlcd.service.host.allocator import return_large_blocks
from mlcd.service.host.open_files import allow_descriptors
from mlcd.service.host.signals import ignore_hangups
from mlcd.service.resources import WorkerResources, open_worker_resources
from mlcd.service.settings import read_settings
from mlcd.service.telemetry.logs import configure_logs
from mlcd.service.worker.loop import Worker
from mlcd.service.worker.task import TaskRunner
from mlcd.service.worker.upload_results import UploadResults

_MAX_NAME_CHARS = 128


@click.command()
@click.option(
    "--model", help="As for `mlcd serve`: jobs are done by the model that they were submitted to."
)
@click.option("--centers", help="Centers to label with; default: those shipped with the model.")
@click.option("--state", "state_dir", help="Directory of the queue, unless the queue is in Redis.")
@click.option("--name", help="The worker's name in the queue.  [default: HOST-PROCESS]")
@click.option("--drain", is_flag=True, help="Exit when no job of this model is left.")
@click.option(
    "--config", type=click.Path(), help="File of lines as `mlcd serve --print-config` writes them."
)
def worker(config: str | None, name: str | None, drain: bool, **options: object) -> None:
    """Do the jobs that servers with the same model and queue accept.

    Settings as for `mlcd serve`.
    """
    allow_descriptors()
    ignore_hangups()
    settings = read_settings(options, file=config)
    name = name or f"{socket.gethostname()}-{os.getpid()}"
    if not name.isprintable() or len(name) > _MAX_NAME_CHARS:
        raise ConfigInvalid(
            f"--name must have at most {_MAX_NAME_CHARS} characters, all printable, got {name!a}"
        )
    if not settings.jobs.roots:
        raise ConfigInvalid("jobs are off", remedy="set MLCD_JOBS__ROOTS as for the server")
    return_large_blocks()
    silence_decoders()
    configure_logs(settings.log)
    with open_worker_resources(settings, _announce) as resources:
        jobs = settings.jobs
        runner = TaskRunner(
            resources.equipment,
            resources.roots,
            UploadResults(resources.files),
            shard_images=jobs.shard_images,
        )
        click.echo(f"worker {name}: {_describe_model(resources)}")
        Worker(
            resources.queue,
            runner,
            resources.computing,
            name=name,
            lease_s=jobs.lease_s,
            stall_s=jobs.stall_s,
        ).run(drain=drain)


def _announce(line: str) -> None:
    click.echo(f"mlcd: {line}", err=True)


def _describe_model(resources: WorkerResources) -> str:
    encoder, centers = resources.equipment.encoder, resources.equipment.centers
    num_centers = 0 if centers is None else len(centers.centers.vectors)
    return f"{encoder.name} ({encoder.engine}, {num_centers} centers)"
