"""`mlcd verify`: compares artifacts with their manifests."""

from pathlib import Path

import click

from mlcd.commands.common_options import reporter_option
from mlcd.locations import check_no_credentials, is_url
from mlcd.progress import Reporter


@click.command()
@click.argument("directory")
@click.option("--quiet", is_flag=True, help="Print a single line instead of one line per artifact.")
@reporter_option
def verify(directory: str, quiet: bool, reporter: Reporter) -> None:
    """Compare every byte of DIRECTORY's artifacts and of their inputs with the manifests.

    DIRECTORY may be the URL of an artifact, which is read without storing a copy.
    """
    from mlcd.pipelines.verify import verify as run
    from mlcd.pipelines.verify_at_url import verify_at_url

    is_local = not is_url(check_no_credentials(directory))
    findings = list(run(Path(directory)) if is_local else verify_at_url(directory))
    if quiet:
        num_checked = sum(finding.checked for finding in findings)
        skipped = f", {len(findings) - num_checked} skipped" if num_checked < len(findings) else ""
        line = f"{num_checked} artifacts and image sets match{skipped}: {directory}"
        reporter.result({"checked": num_checked, "skipped": len(findings) - num_checked}, line)
        return
    for finding in findings:
        mark = "ok     " if finding.checked else "skipped"
        facts = {
            "path": finding.path,
            "kind": finding.kind,
            "checked": finding.checked,
            "detail": finding.detail,
        }
        reporter.result(facts, f"{mark} {finding.kind:<11} {finding.path}: {finding.detail}")
