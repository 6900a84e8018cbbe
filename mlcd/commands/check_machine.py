"""`mlcd doctor`: shows the capabilities of this machine."""

import json

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def doctor(as_json: bool) -> None:
    """Show what this machine can run, and which engine a model would use and why."""
    from mlcd.doctor import examine, report

    facts = examine()
    click.echo(json.dumps(facts, indent=2) if as_json else report(facts))
