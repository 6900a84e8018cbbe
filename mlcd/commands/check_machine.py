"""`mlcd doctor`: shows the capabilities of this machine."""

import json

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@click.option(
    "--compile",
    "compile_",
    is_flag=True,
    help="Compile the loops of `mlcd label` and `mlcd cluster` now, once per machine.",
)
@click.option(
    "--triton",
    metavar="HOST:PORT",
    envvar="MLCD_TRITON__URL",
    show_envvar=True,
    help="The gRPC of a Triton server to ask.",
)
def doctor(as_json: bool, compile_: bool, triton: str | None) -> None:
    """Show what this machine can run, which engine a model would use, and what is not used and why.

    It imports torch, where it is installed, and asks the GPU.
    """
    from mlcd.doctor import examine, report

    if compile_:
        from mlcd.clustering.nearest import compile_loops

        compile_loops()
    facts = examine(triton)
    click.echo(json.dumps(facts, indent=2) if as_json else report(facts))
