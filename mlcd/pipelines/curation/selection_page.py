"""A page with pictures of what a selection leaves out: one HTML file that loads nothing else."""

import base64
from collections.abc import Iterable, Iterator
from html import escape
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.cores import available_cores
from mlcd.images.entries import Entries
from mlcd.images.prefetch import thumbnails_all
from mlcd.images.source import Source
from mlcd.pipelines.curation.decisions import DUPLICATE, REASONS, Decisions

PAGE: Final = "report.html"
_IMAGES_PER_REASON: Final = 24
_MAX_GROUPS: Final = 40  # only the largest groups are shown
_MAX_IMAGES_PER_GROUP: Final = 12
_SIDE: Final = 128  # pixels of a thumbnail
_HEAD: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>What is left out</title>
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem;
color-scheme:light dark}
table{border-collapse:collapse}td,th{padding:.1rem .8rem .1rem 0;text-align:left}
.row{display:flex;flex-wrap:wrap;gap:.5rem;margin:.5rem 0 1.2rem}
figure{margin:0;width:8.5rem;font-size:.75rem;overflow-wrap:anywhere}
img{max-width:8rem;max-height:8rem;display:block}
.kept img{outline:3px solid #2a9d4a}
</style></head><body>
"""


def selection_page(decisions: Decisions, source: Source, entries: Entries) -> str:
    """Returns the page, with up to 24 pictures for each reason and the largest groups.

    entries: the image that each decision is about.
    """
    examples = {
        reason: _pick_evenly(np.flatnonzero(decisions.reasons == reason))
        for reason in REASONS
        if reason != DUPLICATE
    }
    groups = _largest_groups(decisions.groups)
    shown = np.unique(np.concatenate([*examples.values(), *groups, np.empty(0, np.int64)]))
    pictures = dict(zip(shown.tolist(), _pictures(source, entries.select(shown)), strict=True))

    def figure_row(rows: Iterable[int]) -> str:
        figures = "".join(
            f'<figure class="{"kept" if decisions.keep[row] else ""}">{pictures[row]}</figure>'
            for row in rows
        )
        return f'<div class="row">{figures}</div>'

    parts = [_HEAD, _counts(decisions)]
    for reason, rows in examples.items():
        if len(rows):
            parts += [f"<h2>{reason}</h2>", figure_row(rows.tolist())]
    if groups:
        parts.append("<h2>groups of near duplicates</h2><p>What is kept has a green frame.</p>")
        parts += [figure_row(group.tolist()) for group in groups]
    return "\n".join([*parts, "</body></html>\n"])


def _counts(decisions: Decisions) -> str:
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{num:,}</td></tr>"
        for name, num in decisions.facts().items()
        if num
    )
    return f"<h1>What is left out</h1><table>{rows}</table>"


def _pick_evenly(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns at most _IMAGES_PER_REASON evenly spaced rows."""
    if len(rows) <= _IMAGES_PER_REASON:
        return rows
    return rows[np.linspace(0, len(rows) - 1, _IMAGES_PER_REASON).astype(np.int64)]


def _largest_groups(groups: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Returns the first members of the largest groups, the largest first."""
    sizes = np.bincount(groups[groups >= 0])
    largest = np.argsort(-sizes, kind="stable")[:_MAX_GROUPS]
    return [np.flatnonzero(groups == group)[:_MAX_IMAGES_PER_GROUP] for group in largest]


def _pictures(source: Source, entries: Entries) -> Iterator[str]:
    thumbnails = thumbnails_all(source, entries, side=_SIDE, num_threads=available_cores())
    for entry, thumbnail in thumbnails:
        name = escape(entry.key)
        if thumbnail is None:
            yield f"<em>not readable</em><figcaption>{name}</figcaption>"
            continue
        data = base64.b64encode(thumbnail.data).decode()
        image = f'<img src="data:image/webp;base64,{data}" alt="">'
        yield f"{image}<figcaption>{name}</figcaption>"
