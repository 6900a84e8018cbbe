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
def doctor(as_json: bool, compile_: bool) -> None:
    """Show what this machine can run, and which engine a model would use and why."""
    from mlcd.doctor import examine, report

    if compile_:
        from mlcd.clustering.nearest import compile_loops

        compile_loops()
    facts = examine()
    click.echo(json.dumps(facts, indent=2) if as_json else report(facts))
