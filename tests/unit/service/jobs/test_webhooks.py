"""The store of webhooks: who gets an event, when it is sent again, and when it is given up."""

import time
from dataclasses import replace
from itertools import pairwise

import pytest

from mlcd.service.jobs import webhooks
from mlcd.service.jobs.files import FileStore
from mlcd.service.jobs.webhooks import WebhookEvent, WebhookStore
from mlcd.service.settings import Files
from mlcd.service.timings import DAY_S, WEBHOOK_KEEP_S, WEBHOOK_LEASE_S

URL = "https://a.example/"


@pytest.fixture
def clock(monkeypatch):
    """Its `now_s` is what the store takes for the time."""

    class Clock:
        now_s = time.time()

        def time(self):
            return self.now_s

    clock = Clock()
    monkeypatch.setattr(webhooks, "time", clock)
    return clock


@pytest.fixture
def stores(tmp_path):
    """Two stores on one folder, as two processes have them."""
    files = [FileStore(tmp_path / "files", Files()) for _ in range(2)]
    yield [WebhookStore(each) for each in files]
    for each in files:
        each.close()


def new_event(clock, name="a", kind="job.failed"):
    return WebhookEvent.of_end(kind, name, clock.now_s)


def claim(store):
    return store.claim(9, exclude=())


def test_an_event_goes_to_each_webhook_of_its_owner_that_wants_it_once(stores, clock):
    store, other = stores
    wanted = [store.create("ann", URL, "", kinds, None) for kinds in (None, ["job.failed"])]
    store.create("ann", URL, "", ["job.succeeded"], None)
    store.create("bob", URL, "", None, None)
    disabled = store.create("ann", URL, "", None, None)
    store.update(disabled.id, "ann", lambda webhook: replace(webhook, is_enabled=False))
    clock.now_s += 1
    event = new_event(clock)
    past = replace(event, id="evt_past", created_s=clock.now_s - 2)
    for each in stores:
        each.add_events([("ann", event), ("ann", past)])
    claims = claim(store)
    assert {(each.webhook.id, each.event) for each in claims} == {
        (webhook.id, event) for webhook in wanted
    }
    assert claim(other) == []
    for each in claims:
        assert store.settle(each, 204) == "delivered"
    store.add_events([("ann", event)])
    clock.now_s += DAY_S
    assert claim(store) == []


def test_one_event_of_a_webhook_is_sent_at_a_time_and_a_dead_process_leaves_it(stores, clock):
    store, other = stores
    webhook = store.create(None, URL, "", None, None)
    store.add_events([(None, new_event(clock, name)) for name in "ab"])
    (first,) = claim(store)
    assert store.claim(9, exclude=[webhook.id]) == []
    (second,) = claim(other)
    assert first.event != second.event
    clock.now_s += WEBHOOK_LEASE_S - 0.1
    assert claim(store) == []
    clock.now_s += 0.2
    (again,) = claim(other)
    assert again.attempts == 2
    other.settle(again, 200)
    assert store.settle(replace(again, attempts=1), 500) == "waiting"  # too late to count
    assert store.describe_deliveries(webhook.id)[0] == 1


def test_attempts_go_on_for_a_day(stores, clock):
    store, _ = stores
    webhook = store.create(None, URL, "", None, None)
    store.add_events([(None, new_event(clock))])
    started_s, pauses = clock.now_s, []
    while claims := claim(store):
        state = store.settle(claims[0], None)
        ((due_s,),) = store.files.database.rows("SELECT due_s FROM webhook_deliveries")
        if due_s is not None:
            pauses.append(due_s - clock.now_s)
            clock.now_s = due_s
    assert state == "given_up"
    assert 5 <= pauses[0] <= 5.5
    assert all(later > earlier for earlier, later in pairwise(pauses[:9]))
    assert 0.8 * DAY_S < clock.now_s - started_s < DAY_S
    num_waiting, last = store.describe_deliveries(webhook.id)
    assert (num_waiting, last.state, last.attempts) == (0, "given_up", len(pauses) + 1)
    clock.now_s += WEBHOOK_KEEP_S
    store.sweep()
    assert store.describe_deliveries(webhook.id) == (0, None)


def test_retry_after_is_honored_within_reason(stores, clock):
    store, _ = stores
    store.create(None, URL, "", None, None)
    store.add_events([(None, new_event(clock))])
    store.settle(claim(store)[0], 503, 100.0)
    clock.now_s += 99
    assert claim(store) == []
    clock.now_s += 2
    store.settle(claim(store)[0], 503, 1e12)
    clock.now_s += DAY_S
    assert claim(store)
