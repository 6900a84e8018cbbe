import pytest

from mlcd.errors import Overloaded
from service.inference.admission import Capacity
from tests.unit.service.engines import new_metrics


def new_capacity(most, always=0):
    return Capacity("bytes", most, always=always, metrics=new_metrics())


def test_it_is_bounded_and_given_back():
    capacity = new_capacity(10)
    for _ in range(3):
        capacity.reserve(10, owner=None)
        with pytest.raises(Overloaded, match="the server is at its limit of bytes"):
            capacity.reserve(1, owner=None)
        capacity.release(10, owner=None)
    with pytest.raises(ZeroDivisionError), capacity.hold(10, owner=None):
        _ = 1 / 0
    capacity.reserve(10, owner=None)


def test_an_owner_leaves_as_much_free_as_it_holds():
    capacity = new_capacity(120, always=10)
    for greedy, most in (("a", 60), ("b", 30), ("c", 15)):  # half of what the ones before left
        capacity.reserve(most, owner=greedy)
        with pytest.raises(Overloaded, match="this client"):
            capacity.reserve(1, owner=greedy)
    capacity.reserve(5, owner="newcomer")
    capacity.release(60, owner="a")
    capacity.reserve(25, owner="c")


def test_what_one_owner_may_always_hold_fits_however_little_there_is():
    capacity = new_capacity(12, always=10)
    capacity.reserve(10, owner="a")
    with pytest.raises(Overloaded):
        capacity.reserve(1, owner="a")
    capacity.release(10, owner="a")


def test_what_is_only_looked_at_is_not_held():
    capacity = new_capacity(10)
    for _ in range(3):
        capacity.check(10, owner=None)
    with pytest.raises(Overloaded):
        capacity.check(11, owner=None)
