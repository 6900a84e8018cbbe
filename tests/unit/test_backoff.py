import itertools

import pytest

from mlcd.backoff import Backoff


def pauses(backoff, num):
    return [backoff.next_s() for _ in range(num)]


def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_success():
    backoff = Backoff(0.5, 3.0)
    assert pauses(backoff, 5) == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert pauses(backoff, 2) == [0.5, 1.0]


def test_the_first_attempt_may_be_at_once():
    backoff = Backoff(0.5, 3.0, at_once=True)
    assert pauses(backoff, 5) == [0.0, 0.5, 1.0, 2.0, 3.0]
    backoff.reset()
    assert pauses(backoff, 2) == [0.0, 0.5]


def client_backoff():
    return Backoff(0.25, 8.0, jitter_s=2.0)


@pytest.mark.parametrize("attempt", range(12))
def test_never_before_what_the_server_states_and_not_much_later(attempt):
    for _ in range(200):
        backoff = client_backoff()
        pauses(backoff, attempt)
        assert 9 <= backoff.next_s(at_least=9.0) <= 11


def test_what_the_server_states_does_not_count_as_a_pause_of_ours():
    backoff = Backoff(0.25, 8.0)
    assert [backoff.next_s(at_least=9.0), backoff.next_s()] == [9.0, 0.5]


def test_waits_grow_up_to_a_bound_and_differ():
    runs = [pauses(client_backoff(), 12) for _ in range(300)]
    spans = [(min(waits), max(waits)) for waits in zip(*runs, strict=True)]
    lows = [low for low, _ in spans]
    assert all(1.5 * low < later for low, later in itertools.pairwise(lows[:6]))
    assert all(0.25 <= low < high <= 10 for low, high in spans)
    assert all(high > 1.15 * low for low, high in spans), (
        "without jitter all clients come back at once"
    )
    assert max(pauses(client_backoff(), 5000)) <= 10
