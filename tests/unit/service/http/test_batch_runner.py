"""The work on batches with an application that answers at once: turns, retries, and the end of
time.
"""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mlcd.service.http import batch_runner
from mlcd.service.http.batch_runner import BatchRunner, order_fairly
from mlcd.service.jobs.batches import BatchStore
from mlcd.service.jobs.files import FileStore
from mlcd.service.settings import Files

ENDPOINT, LABELS = "/v1/embeddings", "/v1/labels"


class App:
    """An ASGI application that answers every request alike, after the refusals that it is given."""

    def __init__(self, *refusals):
        encoder = SimpleNamespace(fingerprint="f", name="m")
        settings = SimpleNamespace(files=Files())
        resources = SimpleNamespace(encoder=encoder, settings=settings, keys=None)
        self.state = SimpleNamespace(resources=resources)
        self.refusals, self.calls = list(refusals), 0

    async def __call__(self, scope, receive, send):
        self.calls += 1
        body = json.loads((await receive())["body"])
        status = self.refusals.pop() if self.refusals else 200
        headers = [(b"retry-after", b"0")] if status != 200 else []
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})


class LabelApp(App):
    """An application that answers with a result for each image."""

    async def __call__(self, scope, receive, send):
        self.calls += 1
        images = json.loads((await receive())["body"])["images"]
        answer = {"errors": [], "results": [{"index": n} for n in range(len(images))]}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


@pytest.fixture
def store(tmp_path):
    files = FileStore(tmp_path / "files", Files())
    yield BatchStore(files)
    files.close()


def new_batch(store, num, *, owner=None, window_s=60.0, fingerprint="f", endpoint=ENDPOINT):
    bodies = [
        {"images": [f"data:{number}"]} if endpoint == LABELS else {"n": number}
        for number in range(num)
    ]
    lines = [
        {"custom_id": f"{number}", "method": "POST", "url": endpoint, "body": body}
        for number, body in enumerate(bodies)
    ]
    with store.files.begin(owner) as draft:
        draft.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        file = draft.finish("in.jsonl", "batch")
    return store.create(
        owner,
        endpoint=endpoint,
        input_file_id=file.id,
        window="1h",
        window_s=window_s,
        metadata=None,
        fingerprint=fingerprint,
    )


async def run_until_ended(app, store, batch):
    running = asyncio.create_task(BatchRunner(app, store).run())
    async with asyncio.timeout(20):
        while not store.find(batch.id, batch.owner).has_ended:  # noqa: ASYNC110 - by another task
            await asyncio.sleep(0.02)
    running.cancel()
    return store.find(batch.id, batch.owner)


def read(store, file_id):
    return [json.loads(line) for line in store.files.path(file_id).read_text().splitlines()]


async def test_a_line_that_is_refused_for_load_is_sent_again(store):
    app = App(429, 503, 429)
    ended = await run_until_ended(app, store, new_batch(store, 5))
    assert (ended.state, ended.completed, ended.failed, app.calls) == ("completed", 5, 0, 8)
    answers = read(store, ended.output_file_id)
    assert [answer["response"]["body"] for answer in answers] == [{"n": n} for n in range(5)]


async def test_a_line_that_the_route_refuses_is_an_error_of_its_own(store):
    ended = await run_until_ended(App(400), store, new_batch(store, 3))
    assert (ended.state, ended.completed, ended.failed) == ("completed", 2, 1)
    (error,) = read(store, ended.error_file_id)
    assert error["response"]["status_code"] == 400


async def test_lines_that_are_refused_together_are_answered_alone(store):
    app = App(503, 413)
    ended = await run_until_ended(app, store, new_batch(store, 8, endpoint=LABELS))
    assert (ended.state, ended.completed, app.calls) == ("completed", 8, 10)
    answers = read(store, ended.output_file_id)
    assert [row["response"]["body"]["images"] for row in answers] == [
        [f"data:{n}"] for n in range(8)
    ]


@pytest.mark.parametrize(("rate", "num_calls"), [(None, 1), (100, 8)])
async def test_requests_of_a_key_with_a_rate_are_not_joined(store, rate, num_calls):
    app = LabelApp()
    app.state.resources.keys = SimpleNamespace(find=lambda _: SimpleNamespace(rate=rate))
    ended = await run_until_ended(app, store, new_batch(store, 8, endpoint=LABELS))
    assert (ended.state, ended.completed, app.calls) == ("completed", 8, num_calls)


async def test_long_bodies_are_not_joined(store, monkeypatch):
    monkeypatch.setattr(batch_runner, "MAX_JOINED_BYTES", 3 * len('{"images":["data:0"]}'))
    app = LabelApp()
    ended = await run_until_ended(app, store, new_batch(store, 8, endpoint=LABELS))
    assert (ended.state, ended.completed, app.calls) == ("completed", 8, 3)


@pytest.mark.parametrize("fingerprint", ["f", "of another model"])
async def test_a_batch_whose_time_is_over_says_so_of_every_line_left(store, fingerprint):
    app = App()
    batch = new_batch(store, 40, window_s=0.0, fingerprint=fingerprint)
    ended = await run_until_ended(app, store, batch)
    assert (ended.state, ended.failed, app.calls) == ("expired", 40, 0)
    errors = read(store, ended.error_file_id)
    assert [error["custom_id"] for error in errors] == [f"{n}" for n in range(40)]
    assert {error["error"]["code"] for error in errors} == {"batch_expired"}


class HeldApp(App):
    """An application that answers one request only once it is let go, and counts who waits."""

    def __init__(self, held):
        super().__init__()
        self.held = held
        self.go_on, self.num_begun, self.num_inside, self.most_inside = asyncio.Event(), 0, 0, 0

    async def __call__(self, scope, receive, send):
        self.num_begun += 1
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        is_held = self.num_begun == self.held + 1
        request = asyncio.create_task(super().__call__(scope, receive, send))
        await (self.go_on.wait() if is_held else asyncio.sleep(0.01))
        await request
        self.num_inside -= 1


async def test_a_slow_line_does_not_stop_the_next_window(store):
    limit = Files().batch_concurrency
    app = HeldApp(limit // 2)  # the first line of the second window
    running = asyncio.create_task(run_until_ended(app, store, new_batch(store, 3 * limit)))
    await asyncio.sleep(0.5)
    assert (app.calls, app.num_inside, app.most_inside) == (3 * limit // 2, 1, limit)
    app.go_on.set()
    ended = await running
    answers = read(store, ended.output_file_id)
    assert [answer["custom_id"] for answer in answers] == [f"{n}" for n in range(3 * limit)]
    assert app.most_inside <= limit


async def test_lines_in_work_are_answered_when_the_time_ends(store):
    app, limit = HeldApp(0), Files().batch_concurrency
    batch = new_batch(store, 2 * limit, window_s=1.0)
    running = asyncio.create_task(run_until_ended(app, store, batch))
    await asyncio.sleep(1.2)
    app.go_on.set()
    ended = await running
    assert (ended.state, ended.completed, ended.failed) == ("expired", limit, limit)
    lines = [*read(store, ended.output_file_id), *read(store, ended.error_file_id)]
    assert [line["custom_id"] for line in lines] == [f"{n}" for n in range(2 * limit)]


async def test_a_batch_waits_for_its_model(store):
    app = App()
    batch = new_batch(store, 2, fingerprint="later")
    running = asyncio.create_task(run_until_ended(app, store, batch))
    await asyncio.sleep(1.0)
    assert (running.done(), app.calls) == (False, 0)
    app.state.resources.encoder.fingerprint = "later"
    assert (await running).state == "completed"


def test_owners_take_turns_and_the_oldest_of_one_is_first(store):
    batches = [
        replace(new_batch(store, 1, owner=owner), id=f"{place}")
        for place, owner in enumerate(["a", "a", "a", "b", "c"])
    ]
    ordered = order_fairly(batches, Counter({"c": 1}))
    assert [batch.id for batch in ordered] == ["0", "3", "1", "4", "2"]
