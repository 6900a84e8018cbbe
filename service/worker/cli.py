"""`mlcd worker`."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import click

from mlcd.errors import ConfigInvalid
from mlcd.images.quiet import silence_decoders
from service.host.allocator import return_large_blocks
from service.jobs.roots import Roots
from service.jobs.service import open_queue
from service.settings import Settings, read_settings
from service.telemetry.logs import configure_logs
from service.worker.engine import open_equipment
from service.worker.loop import Worker
from service.worker.task import TaskRunner

_LONGEST_NAME = 128


@click.command()
@click.option(
    "--model", help="As for `mlcd serve`: jobs are done by the model that they were submitted to."
)
@click.option("--centers", help="Centers to label with; default: those shipped with the model.")
@click.option(
    "--state", "state_dir", help="Directory that holds the queue, where it is not in Redis."
)
@click.option("--name", help="What the worker is called in the queue.  [default: HOST-PROCESS]")
@click.option("--drain", is_flag=True, help="End when no job of this model is left.")
@click.option(
    "--config", type=click.Path(), help="File of lines as `mlcd serve --print-config` writes them."
)
def worker(config: str | None, name: str | None, drain: bool, **options: object) -> None:
    """Do the jobs that servers with the same model and queue accept.

    Settings as for `mlcd serve`.
    """
    settings = read_settings(options, file=config)
    name = name or f"{socket.gethostname()}-{os.getpid()}"
    if not name.isprintable() or len(name) > _LONGEST_NAME:
        raise ConfigInvalid(
            f"--name has more than {_LONGEST_NAME} characters, or some that cannot be printed"
        )
    if not settings.jobs.roots:
        raise ConfigInvalid("jobs are off", remedy="set MLCD_JOBS__ROOTS as for the server")
    return_large_blocks()
    silence_decoders()
    configure_logs(settings.log)
    with ExitStack() as stack:
        _open_worker(stack, settings, name).run(drain=drain)


def _open_worker(stack: ExitStack, settings: Settings, name: str) -> Worker:
    roots = Roots(settings.jobs.roots)
    queue = open_queue(settings)
    stack.callback(queue.close)
    computing = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="compute"))
    opening = open_equipment(settings, lambda line: click.echo(f"mlcd: {line}", err=True))
    equipment = computing.submit(opening.__enter__).result()
    stack.callback(lambda: computing.submit(opening.__exit__, None, None, None).result())
    runner = TaskRunner(equipment, roots, shard_images=settings.jobs.shard_images)
    num_centers = 0 if equipment.centers is None else len(equipment.centers.centers.vectors)
    encoder = equipment.encoder
    click.echo(f"worker {name}: {encoder.name} ({encoder.engine}, {num_centers} centers)")
    jobs = settings.jobs
    return Worker(queue, runner, computing, name=name, lease_s=jobs.lease_s, stall_s=jobs.stall_s)
