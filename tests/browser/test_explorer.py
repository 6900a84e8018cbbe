"""Walks through the explorer in a real browser, on a real server."""

import csv
import os
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mlcd.service.keys.file import create_key
from mlcd.types import ISSUES
from tests.browser.conftest import COLLECTION, GERMAN, JAPANESE, ORIGINAL, fill
from tests.conftest import run_mlcd
from tests.integration.running import Server, serving, until

pytestmark = pytest.mark.browser


COPIES = (GERMAN, JAPANESE, ORIGINAL)
SIZES = ((390, 844), (1280, 800))
AXE_RUN = "axe.run().then(r => r.violations.map(v => [v.id, v.nodes.map(n => n.html).slice(0, 3)]))"
VIEWS = {
    "clusters": "#/clusters",
    "a cluster": "#/clusters/0",
    "search": "#/search",
    "an item": f"#/search?like={quote(ORIGINAL)}",
    "a picture": f"#/clusters?picture={quote(ORIGINAL)}",
    "map": "#/map",
    "a selection": "#/map?lasso=-2,-2,2,-2,2,2,-2,2",
    "duplicates": "#/duplicates?similarity=0.9",
    "jobs": "#/jobs",
    "usage": "#/usage",
    "nothing": "#/nowhere",
}


@pytest.fixture(scope="module")
def shared_server(photographs, centers, tmp_path_factory):
    """A server for the walks that change nothing."""
    state = tmp_path_factory.mktemp("state")
    with serving("hog", centers=centers, state_dir=state, jobs__roots=state) as server:
        fill(server.url, photographs)
        yield server


@pytest.fixture
def walk(page):
    """Opens an address of a server; in the end nothing was wrong, and nothing came from elsewhere."""
    servers = []

    def open_page(server, address=""):
        servers.append(server.url)
        page.open("about:blank")
        page.open(f"{server.url}/{address}")

    yield open_page
    assert page.problems == []
    assert [
        url for url in page.urls if not url.startswith((f"{servers[-1]}/", f"blob:{servers[-1]}/"))
    ] == []


def stem(item_id):
    return Path(item_id).stem


def drawn(page):
    """Waits until the map has drawn all that there is."""
    page.until("+document.querySelector('.chart')?.dataset.drawn > 0")
    return int(page.value("document.querySelector('.chart').dataset.drawn"))


def loaded(page):
    page.until("document.querySelector('main h1') && !document.querySelector('.loading')")


def pictures_seen(page, selector):
    """Waits until every picture that is in sight has come."""
    page.until(
        f"(all => all.length && all.every(e => e.complete && e.naturalWidth))"
        f"([...document.querySelectorAll('{selector} img')]"
        f".filter(e => e.getBoundingClientRect().top < innerHeight))"
    )


def test_search_by_picture_then_cluster_then_member_then_more_like_this(
    walk, page, shared_server, photographs
):
    walk(shared_server, "#/search")
    page.choose("input[type=file]", photographs / ORIGINAL)
    page.shows(stem(ORIGINAL), within=".tiles")
    pictures_seen(page, ".tiles")
    assert page.count(".strip .card") > 0
    address = page.value("location.href")

    page.click(".strip a")
    page.until("location.hash.startsWith('#/clusters/')")
    page.until("document.activeElement.tagName == 'H1'")
    page.until("document.querySelectorAll('.tiles .tile').length > 0")
    member = page.value("document.querySelector('.tiles .tile a').title")

    page.click(".tiles .tile a")
    page.shows(member, within="dialog .metadata")
    page.click("dialog a", "Search similar")
    page.shows(member, within=".query h2")
    page.until("document.querySelectorAll('.tiles .tile').length > 3")
    page.click(".actions a")
    page.until(f"!document.querySelector('.query h2')?.innerText.includes({member!r})")

    for _ in range(4):
        here = page.value("location.href")
        page.value("history.back()")
        page.until(f"location.href != {here!r}")
    page.shows(stem(ORIGINAL), within=".tiles")
    assert page.value("location.href") == address
    page.open("about:blank")
    page.open(address)  # a deep link: the query is in it, though not the picture
    page.shows(stem(ORIGINAL), within=".tiles")
    page.shows("no longer in this page")


def test_a_picture_opens_large_with_the_ones_beside_it_and_closes_where_it_was_opened(
    walk, page, shared_server
):
    walk(shared_server, "#/clusters")
    page.click(".wall a")
    page.until("document.querySelectorAll('.tiles .tile').length > 2")
    members = page.value("[...document.querySelectorAll('.tiles .tile a')].map(e => e.title)")
    view = page.value("location.href")
    page.click(".tiles .tile a")
    pictures_seen(page, "dialog")
    page.shows(members[0], within="dialog .metadata")
    page.shows(f"1 of {len(members)}", within="dialog")
    page.shows("similarity", within="dialog .counts")  # its labels
    page.until("document.querySelectorAll('dialog .neighbors img').length == 12")
    page.press("ArrowRight", 39)
    page.shows(members[1], within="dialog .metadata")
    page.click("dialog button", "Next picture")
    page.shows(members[2], within="dialog .metadata")
    page.press("ArrowLeft", 37)
    page.shows(members[1], within="dialog .metadata")
    address = page.value("location.href")
    page.press("Escape", 27)
    page.until("!document.querySelector('dialog')")
    page.until(f"location.href == {view!r}")
    assert page.value("document.activeElement.title") == members[0]

    page.open("about:blank")
    page.open(address)  # it has an address of its own, and its list is there again
    page.shows(f"2 of {len(members)}", within="dialog")
    neighbor = page.until("document.querySelector('dialog .neighbors a')?.title")
    page.click("dialog .neighbors a")
    page.shows(neighbor, within="dialog .metadata")
    page.value("history.back()")
    page.shows(members[1], within="dialog .metadata")
    page.click("dialog button", "Close")
    page.until(f"location.href == {view!r} && !document.querySelector('dialog')")
    page.open("about:blank")
    page.open(address)
    page.click("dialog .neighbors a")
    page.shows(neighbor, within="dialog .metadata")
    page.press("Escape", 27)
    page.until(f"location.href == {view!r} && !document.querySelector('dialog')")


def test_a_slash_leads_to_the_search_from_every_view(walk, page, shared_server):
    for address in ("#/clusters", "#/map", "#/search"):
        walk(shared_server, address)
        loaded(page)
        page.press("/", 191, "/")
        page.until("location.hash.startsWith('#/search')")
        page.until("document.activeElement.matches('.ask input')")


def test_an_explored_place_shows_pictures_large_and_folds_weak_matches(
    walk, page, photographs, starter, tmp_path
):
    with serving(starter, state_dir=tmp_path, explore__place=photographs) as server:
        walk(server)
        page.until("document.querySelectorAll('.arriving .tile').length > 3")
        page.click(".arriving .tile a")
        page.until("document.querySelectorAll('dialog figure img').length == 2")
        pictures_seen(page, "dialog figure")
        small, large = page.value(
            "[...document.querySelectorAll('dialog figure img')].map(e => e.naturalWidth)"
        )
        assert large > small
        page.press("Escape", 27)
        page.until("document.querySelectorAll('.wall .card').length > 1")

        page.click("nav a", "Search")
        page.shows("--model hub:")
        page.type(".ask [name=text]", "qwertyuiop")
        page.press("Enter", 13, "\r")
        page.shows("weak matches", within=".weak summary")
        assert not page.value("document.querySelector('.weak').open")
        weak, strong = page.count(".weak .tile"), page.count("ul[aria-label=Results] .tile")
        assert (weak + strong, strong < 6) == (60, True)
        page.value("document.querySelector('.ask [name=text]').value = ''")
        page.type(".ask [name=text]", "a photo of an airplane")
        page.press("Enter", 13, "\r")
        best = "document.querySelector('ul[aria-label=Results] .tile a')"
        page.until(f"{best}?.title.startsWith('airplanes/')")


def test_less_like_this_and_filters_change_what_is_found(walk, page, shared_server):
    walk(shared_server, f"#/search?like={quote(ORIGINAL)}")
    page.shows(stem(GERMAN), within=".tiles")
    similar = "[...document.querySelectorAll('.tiles .number')].map(e => e.textContent).join()"
    before = page.until(similar)
    page.click(".actions button", "less")
    page.until(f"{similar} && {similar} != {before!r}")
    page.click(".chip button")
    page.until(f"{similar} == {before!r}")

    page.value("document.querySelector('.filters select').value = 'kind'")
    page.type(".filters input[name=value]", "東京")
    page.click(".filters form button")
    page.until("document.querySelectorAll('.tiles .tile').length == 1")
    page.shows(stem(JAPANESE), within=".tiles")
    assert page.value("decodeURIComponent(location.hash)").count("東京") == 1


def test_pictures_dropped_on_an_empty_page_are_found_by_words(walk, page, axe, tmp_path):
    colors = tmp_path / "colors"
    (colors / "日 本").mkdir(parents=True)
    for color in ("red", "blue", "日 本/green", "日 本/yellow"):
        Image.new("RGB", (40, 30), Path(color).name).save(colors / f"{color}.png")
    (colors / "broken.jpg").write_bytes(b"no picture")
    model = "fake:latency_ms=0,text=true"
    with serving(model, engine="fake", state_dir=tmp_path / "state") as server:
        walk(server)
        page.shows("This server has no clusters")
        page.shows("mlcd explore")
        page.value(axe)
        assert page.value(AXE_RUN) == []
        (tmp_path / "empty").mkdir()
        page.drop(tmp_path / "empty")
        page.shows("holds no files")
        page.drop(colors)
        page.until("location.hash.startsWith('#/map')")
        assert drawn(page) == 4
        page.click("nav a", "Search")
        page.shows("1 file not added")
        assert "colors/broken.jpg" in page.value("document.querySelector('.added').textContent")
        page.drop(colors / "red.png")  # one alone is searched for
        page.until("document.querySelector('.tiles .tile a')?.title == 'colors/red.png'")
        for color in ("blue", "red"):
            page.value("(document.querySelector('.ask [name=text]') ?? {}).value = ''")
            page.type(".ask [name=text]", f"a {color} thing")
            page.press("Enter", 13, "\r")
            page.until(f"document.querySelector('.tiles .tile a')?.title == 'colors/{color}.png'")
            page.shows(f"a {color} thing", within=".words")
        page.value("history.back()")
        page.until("document.querySelector('.tiles .tile a')?.title == 'colors/blue.png'")
        assert page.count(".tiles .tile") == 4


def test_a_server_that_keeps_no_collections_offers_no_place_for_pictures(walk, page):
    with serving("fake:latency_ms=0", engine="fake") as server:
        walk(server)
        page.shows("mlcd explore")
        assert page.count(".drop-zone") == 0


def test_the_map_is_lassoed_and_what_is_selected_is_saved_and_searched(
    walk, page, shared_server, photographs, tmp_path
):
    page.downloads_into(tmp_path)
    walk(shared_server, "#/map")
    num = drawn(page)
    left, top, width, height = page.value(
        "(b => [b.x, b.y, b.width, b.height])(document.querySelector('.chart').getBoundingClientRect())"
    )
    page.click(".lasso-tools button", "Lasso")
    around = [(0.02, 0.12), (0.98, 0.12), (0.98, 0.98), (0.5, 0.99), (0.02, 0.98)]
    page.drag(*((left + x * width, top + y * height) for x, y in around))
    page.shows("Selected")
    page.until("document.querySelectorAll('.selected .tile').length > 0")
    shown = page.value("document.querySelector('.selected [role=status]').innerText")
    selected = int(shown.split()[0])
    assert 0 < selected <= num
    counts = "[...document.querySelectorAll('.counts .number')].map(e => +e.innerText).reduce((a, b) => a + b)"
    assert page.value(counts) <= selected

    page.click(".selected button", "Save CSV")
    page.click(".selected button", "Save Parquet")
    saved = [tmp_path / f"{COLLECTION}-selected.{suffix}" for suffix in ("csv", "parquet")]
    until(lambda: all(path.exists() for path in saved), 30)
    with saved[0].open(encoding="utf-8", newline="") as file:
        ids = [row["id"] for row in csv.DictReader(file)]
    assert len(ids) == selected
    assert pq.read_table(saved[1])["id"].to_pylist() == ids

    page.click(".selected a", "Search among these")
    page.shows("selected on the map")
    page.choose("input[type=file]", photographs / ORIGINAL)
    page.shows(f"of {selected} items")
    page.shows("selected on the map")
    for _ in range(2):
        page.value("history.back()")
    page.shows("Save CSV")


def test_the_map_goes_by_keys_and_shows_what_is_below_the_pointer(walk, page, shared_server):
    walk(shared_server, "#/map")
    drawn(page)
    page.value("document.querySelector('.chart').focus()")
    page.press("+", 187, "+")
    page.press("ArrowLeft", 37)
    page.until("location.hash.includes('at=')")
    page.press("0", 48, "0")
    page.click(".legend button")
    page.until("location.hash.includes('only=')")
    left, top, width, height = page.value(
        "(b => [b.x, b.y, b.width, b.height])(document.querySelector('.chart').getBoundingClientRect())"
    )
    with httpx.Client(base_url=shared_server.url) as client:
        layout = client.get(f"/v1/collections/{COLLECTION}/layout").content
    x, y = np.frombuffer(layout, "<f4")[:2].tolist()
    scale = 0.94 * min(width, height) / 2
    page.mouse("mouseMoved", (left + width / 2 + x * scale, top + height / 2 - y * scale))
    page.until("document.querySelector('.hover img')?.naturalWidth > 0")


def test_the_map_names_what_lies_where_and_draws_few_points_as_pictures(walk, page, shared_server):
    walk(shared_server, "#/map")
    drawn(page)
    visible = "[...document.querySelectorAll('.map-names bdi')].filter(e => e.style.visibility == 'visible')"
    page.until(f"{visible}.length > 2")
    names = page.value(f"{visible}.map(e => e.textContent)")
    listed = page.value("[...document.querySelectorAll('.legend bdi')].map(e => e.textContent)")
    assert set(names) <= set(listed)
    page.until("document.querySelectorAll('.map-pictures img').length > 5")
    pictures_seen(page, ".map-pictures")
    x, y = page.value(
        "(b => [b.x + b.width / 2, b.y + b.height / 2])"
        "([...document.querySelectorAll('.map-pictures span')].at(-1).getBoundingClientRect())"
    )
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        page.mouse(kind, (x, y))
    pictures_seen(page, "dialog figure")
    shown = "new URL(document.querySelector('dialog figure img').src).pathname"
    last = "new URL([...document.querySelectorAll('.map-pictures img')].at(-1).src).pathname"
    assert page.value(shown) == page.value(last)


def test_of_duplicates_one_is_kept_and_the_others_are_gone_for_good(walk, page, explored):
    walk(explored, "#/duplicates?similarity=0.97")
    page.shows(stem(GERMAN))
    groups = page.count(".group")
    page.click(".tools button", "Keep the first of each")
    marked = page.count(".tile.marked")
    assert marked >= 2
    page.click(".verdict button", "Delete…")
    page.until("document.querySelector('dialog[open]')")
    page.press("Escape", 27)
    page.until("!document.querySelector('dialog')")
    assert page.count(".group") == groups  # nothing was done
    page.click(".verdict button", "Delete…")
    page.click("dialog button.danger")
    page.shows("No two pictures are that similar")
    with httpx.Client(base_url=explored.url) as client:
        asked = [f"/v1/collections/{COLLECTION}/items/{quote(copy, safe='')}" for copy in COPIES]
        assert [client.get(path).status_code for path in asked].count(404) == len(COPIES) - 1
        pictures = [client.get(f"{path}/thumbnail").status_code for path in asked]
        assert pictures.count(404) == len(COPIES) - 1
    walk(explored, "#/duplicates?similarity=0.97")
    page.shows("No two pictures are that similar")


def test_a_job_is_submitted_followed_to_its_end_and_refused_outside_the_roots(
    walk, page, explored, photographs, centers
):
    shutil.copytree(photographs, explored.roots / "photographs")
    walk(explored, "#/jobs")
    page.shows("No jobs yet")
    page.type("input[name=input]", "/etc")
    page.type("input[name=output]", str(explored.roots / "labels"))
    page.click(".submit button")
    page.until("document.querySelector('.submit .wrong').innerText")
    page.problems.clear()  # the browser's own line about the refusal

    page.value("document.querySelector('input[name=input]').value = ''")
    page.type("input[name=input]", str(explored.roots / "photographs"))
    page.click(".submit button")
    page.shows("queued", within=".state")
    done = run_mlcd(
        *("worker", "--model", "hog", "--centers", centers, "--state", explored.state, "--drain"),
        env={**os.environ, "MLCD_JOBS__ROOTS": str(explored.roots)},
    )
    assert done.returncode == 0, done.stderr
    page.shows("succeeded", within=".state")  # by itself
    page.shows("100\N{NO-BREAK SPACE}%")
    page.click(".trail a")
    page.shows("succeeded", within=".jobs")


def test_an_archive_of_this_computer_is_uploaded_labeled_and_downloaded(
    walk, page, explored, photographs, centers, tmp_path
):
    archive = Path(shutil.make_archive(str(tmp_path / "my pictures"), "zip", photographs))
    walk(explored, "#/jobs")
    page.choose(".submit input[type=file]", archive)
    page.shows("my pictures.zip", within=".submit .chip")
    page.until("document.querySelectorAll('.submit input[name=results]').length === 5")
    assert page.count(".submit input[name=input]") == 0
    page.click(".submit input[value=csv]")
    page.click(".submit button", "Submit")
    page.shows("queued", within=".state")
    done = run_mlcd(
        *("worker", "--model", "hog", "--centers", centers, "--state", explored.state, "--drain"),
        env={**os.environ, "MLCD_JOBS__ROOTS": str(explored.roots)},
    )
    assert done.returncode == 0, done.stderr
    page.shows("Results")
    page.downloads_into(tmp_path)
    page.click("section[aria-labelledby=results] button", "csv")
    until((tmp_path / "my pictures.csv").exists, 30)
    with (tmp_path / "my pictures.csv").open(encoding="utf-8", newline="") as file:
        keys = {row["key"] for row in csv.DictReader(file)}
    assert len(keys) == sum(path.is_file() for path in photographs.rglob("*"))

    (tmp_path / "text.zip").write_text("no pictures")
    walk(explored, "#/jobs")
    page.choose(".submit input[type=file]", tmp_path / "text.zip")
    page.click(".submit button", "Submit")
    page.shows("neither an image nor an archive")
    page.problems.clear()  # the browser's own line about the refusal


def test_an_archive_of_this_computer_is_a_collection_on_the_wall(
    walk, page, explored, photographs, centers, tmp_path
):
    archive = Path(shutil.make_archive(str(tmp_path / "mine"), "zip", photographs))
    walk(explored, "#/jobs")
    page.until("document.querySelector('.submit select')")
    page.value(
        "{const kind = document.querySelector('.submit select'); kind.value = 'index';"
        " kind.dispatchEvent(new Event('change', {bubbles: true}))}"
    )
    page.choose(".submit input[type=file]", archive)
    page.shows("mine.zip", within=".submit .chip")
    page.until("document.querySelector('.submit input[name=output]').placeholder === 'pictures'")
    page.type(".submit input[name=output]", "mine")
    page.click(".submit button", "Submit")
    page.shows("queued", within=".state")
    done = run_mlcd(
        *("worker", "--model", "hog", "--centers", centers, "--state", explored.state, "--drain"),
        env={**os.environ, "MLCD_JOBS__ROOTS": str(explored.roots)},
    )
    assert done.returncode == 0, done.stderr
    page.click("button", "Show the pictures")
    page.until("location.hash === '#/clusters?collection=mine'")
    page.until("document.querySelectorAll('main img').length > 5")


def test_a_curation_is_submitted_with_what_the_form_says(walk, page, explored, photographs):
    embeddings = explored.roots / "embeddings"
    assert run_mlcd("embed", photographs, embeddings, "--model", "hog").returncode == 0
    walk(explored, "#/jobs")
    page.until("document.querySelector('.submit select')")
    page.value(
        "{const kind = document.querySelector('.submit select'); kind.value = 'curate';"
        " kind.dispatchEvent(new Event('change', {bubbles: true}))}"
    )
    page.until("document.querySelector('input[name=duplicates]')")
    page.type("input[name=input]", str(embeddings))
    page.type("input[name=output]", str(explored.roots / "selection"))
    page.type("input[name=duplicates]", "0.97")
    page.click("input[name=issues]")
    page.click(".submit button")
    page.shows("queued", within=".state")
    with httpx.Client(base_url=explored.url) as client:
        job = client.get("/v1/jobs").json()["jobs"][0]
    assert job["kind"] == "curate"
    assert (job["duplicates"], job["keep"], job["report"]) == (0.97, "first", False)
    assert job["issues"] == list(ISSUES)


def test_a_wrong_key_is_told_and_a_right_one_opens_pictures_too(
    walk, page, photographs, centers, tmp_path
):
    keys = tmp_path / "keys.json"
    token = create_key(keys, "test", scopes=["search", "embed", "write"], now=datetime.now(UTC))[1]
    with serving(
        "hog", centers=centers, state_dir=tmp_path / "state", auth__keys_file=keys
    ) as server:
        fill(server.url, photographs, **{"X-API-Key": token})
        walk(server, "#/clusters")
        page.shows("Enter an API key")
        page.type(".key input", f"{token[:-1]}{'0' if token[-1] != '0' else '1'}")
        page.click(".key button")
        page.until("document.querySelector('.key .wrong').innerText")
        page.value("document.querySelector('.key input').value = ''")
        page.problems.clear()  # the browser's own lines about refusals
        page.type(".key input", token)
        page.click(".key button")
        page.until("document.querySelectorAll('.wall .card').length == 8")
        pictures_seen(page, ".wall")
        assert page.value("document.querySelector('.wall img').src").startswith("blob:")
        assert token not in page.value(
            "location.href + document.cookie + JSON.stringify(localStorage)"
        )
        page.open("about:blank")
        page.open(f"{server.url}/#/clusters")
        page.shows("Enter an API key")  # it was nowhere but in the page's memory
        page.problems.clear()


def test_the_usage_of_a_key_is_shown_by_day_and_an_admin_chooses_a_key(
    walk, page, photographs, centers, tmp_path
):
    keys = tmp_path / "keys.json"
    now = datetime.now(UTC)
    (key, token), (_, other), (_, admin) = (
        create_key(keys, "test", scopes=scopes, now=now)
        for scopes in (["search", "embed"], ["search", "embed"], ["admin"])
    )
    picture = (photographs / ORIGINAL).read_bytes()
    with serving(
        "hog", centers=centers, state_dir=tmp_path / "state", auth__keys_file=keys
    ) as server:
        for sender, num in ((token, 2), (other, 3)):
            files = [("files", picture)] * num
            headers = {"X-API-Key": sender}
            answer = httpx.post(f"{server.url}/v1/images/embed", files=files, headers=headers)
            assert answer.status_code == 200

        def enter(key):
            walk(server, "#/usage")
            page.shows("Enter an API key")
            page.type(".key input", key)
            page.click(".key button")
            page.until("document.querySelector('.usage tbody tr')")
            page.problems.clear()  # the browser's own lines about refusals

        def images():
            return page.value("document.querySelector('.usage tbody td:nth-of-type(2)').innerText")

        enter(token)
        assert page.count(".usage tbody tr") == 1
        assert now.date().isoformat() in page.value("document.querySelector('.usage').innerText")
        assert images() == "2"
        assert page.count(".usage .bar") == 1
        assert page.count(".tools select") == 0
        enter(admin)
        assert images() == "5"
        page.value(
            f"(s => (s.value = '{key.id}', s.dispatchEvent(new Event('change'))))"
            "(document.querySelector('.tools select'))"
        )
        page.until("document.querySelector('.usage tbody td:nth-of-type(2)').innerText == '2'")


def test_a_server_that_goes_and_comes_back_is_noticed_both_times(walk, page, centers, tmp_path):
    server = Server("hog", centers=centers, state_dir=tmp_path).wait_ready()
    try:
        walk(server, "#/clusters")
        page.until("document.querySelectorAll('.wall .card').length == 8")
        server.stop()
        page.click("nav a", "Search")
        page.click("nav a", "Clusters")
        page.shows("does not answer", within=".banner")
        page.shows("loads by itself when the server is back")
        server.start_again()
        page.until("!document.querySelector('.banner')")
        page.until("document.querySelectorAll('.wall .card').length == 8")
        page.problems.clear()  # the browser's own lines about the server that was gone
    finally:
        server.stop()


def test_a_name_filter_and_an_order_are_in_the_address_and_go_by_keyboard(
    walk, page, shared_server
):
    walk(shared_server, "#/clusters?sort=name")
    names = "[...document.querySelectorAll('.wall h2')].map(e => e.innerText)"
    page.until("document.querySelectorAll('.wall .card').length == 8")
    assert page.value(names) == sorted(page.value(names), key=str.casefold)
    page.type("input[type=search]", "no cluster has this name")
    page.shows("No cluster is like that")
    page.value("document.querySelector('.empty a').focus()")
    page.press("Enter", 13, "\r")
    page.until("document.querySelectorAll('.wall .card').length == 8")
    page.value("document.querySelector('.skip').focus()")
    page.press("Enter", 13, "\r")
    assert page.value("document.activeElement.tagName") == "H1"
    page.type("input[type=search]", "ALTERNATE-5")
    page.until("document.querySelectorAll('.wall .card').length == 1")
    page.value("document.querySelector('.wall a').focus()")
    page.press("Enter", 13, "\r")
    page.until("document.querySelectorAll('.tiles .tile').length > 0")
    assert page.value("document.title").endswith("· mlcd")
    for shown in (
        "Why this name",
        "90\N{NO-BREAK SPACE}%",
        "unlike cluster 6: stripes",
        "An 絵 of it",
    ):
        page.shows(shown, within=".side")


def test_a_cluster_is_renamed_in_the_page_and_the_name_is_taken_back(walk, page, shared_server):
    walk(shared_server, "#/clusters/1")
    page.until("document.querySelector('.rename button')")
    name = page.value("document.querySelector('main h1').innerText")
    page.click(".rename button")
    page.value("document.querySelector('.rename input').value = ''")
    page.type(".rename input", "sea <b>side</b>")
    page.press("Escape", 27)
    page.until("!document.querySelector('.rename input')")
    assert page.value("document.querySelector('main h1').innerText") == name
    page.click(".rename button")
    page.value("document.querySelector('.rename input').value = ''")
    page.type(".rename input", "sea <b>side</b>")
    page.press("Enter", 13, "\r")
    page.until("document.querySelector('main h1').innerText == 'sea <b>side</b>'")
    listed = httpx.get(f"{shared_server.url}/v1/centers/1").json()
    assert listed["name"] == "sea <b>side</b>"
    page.click(".rename button", "Undo")
    page.until(f"document.querySelector('main h1').innerText == {name!r}")


def test_axe_finds_nothing_wrong_on_any_view_in_light_and_dark(walk, page, shared_server, axe):
    for size in SIZES:
        page.resize(*size)
        for name, address in VIEWS.items():
            walk(shared_server, address)
            loaded(page)
            page.value(axe)
            for shade in ("light", "dark"):
                page.shade(shade)
                assert page.value(AXE_RUN) == [], (name, shade, size)
            page.shade("light")
            assert page.problems == [], name
    page.resize(1280, 860)
    # It would have found some.
    page.value(
        "document.body.insertAdjacentHTML('beforeend', '<img src=assets/none><button></button>')"
    )
    planted = page.value(AXE_RUN)
    assert {"button-name", "image-alt"} <= {name for name, _ in planted}
    page.problems.clear()


def test_every_view_fits_a_window_and_a_phone_shows_pictures_before_filters(
    walk, page, shared_server
):
    try:
        for size in reversed(SIZES):
            page.resize(*size)
            for name, address in VIEWS.items():
                walk(shared_server, address)
                loaded(page)
                time.sleep(0.1)
                assert page.value("document.documentElement.scrollWidth <= innerWidth"), name
                header = "document.querySelector('.top').getBoundingClientRect().right"
                assert page.value(f"{header} == document.documentElement.clientWidth"), name
        walk(shared_server, "#/clusters")
        pictures_seen(page, ".wall")
        first = "document.querySelector('.wall .card').getBoundingClientRect().top"
        above = page.value(first)
        assert above < 200
        page.click(".fold-button")
        page.type("input[type=search]", "alternate-5")
        page.until("document.querySelectorAll('.wall .card').length == 1")
        assert page.value(first) > above
    finally:
        page.resize(1280, 860)
