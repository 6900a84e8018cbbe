"""No route without a word on who may enter."""

import pytest
from fastapi import APIRouter

from mlcd.errors import ConfigInvalid
from mlcd.service.http.app import create_app
from mlcd.service.http.auth import EXEMPT, check_declared, needs
from mlcd.service.serve.cli import check_exposure
from mlcd.service.settings import Auth


def routes(path, **given):
    router = APIRouter()
    router.add_api_route(path, lambda: None, **given)
    return router.routes


def test_a_route_declares_its_scope_or_is_exempt():
    check_declared(routes("/v1/new", dependencies=[needs("jobs")]))
    check_declared(routes("/health/live"))
    with pytest.raises(ValueError, match="/v1/new"):
        check_declared(routes("/v1/new"))
    with pytest.raises(ValueError, match="/health/live"):
        check_declared(routes("/health/live", dependencies=[needs()]))


def test_an_application_with_an_undeclared_route_does_not_start(monkeypatch):
    from mlcd.service.http.routes import health

    monkeypatch.setattr(health, "router", APIRouter())
    health.router.add_api_route("/v1/forgotten", lambda: None)
    with pytest.raises(ValueError, match="/v1/forgotten"):
        create_app(None)


def test_what_is_exempt_is_there():
    """A name that no route has any more would be a door left open for the next one."""
    from fastapi.routing import iter_route_contexts

    assert {context.path for context in iter_route_contexts(create_app(None).routes)} >= EXEMPT


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1"])
def test_without_keys_this_machine_is_served(address):
    check_exposure(Auth(), address)


@pytest.mark.parametrize(
    "address", ["0.0.0.0", "::", "10.0.0.1", "192.168.1.4", "fe80::1%eth0", "8.8.8.8"]
)
def test_beyond_this_machine_keys_or_a_word_are_needed(address):
    with pytest.raises(ConfigInvalid, match="MLCD_AUTH__MODE=open"):
        check_exposure(Auth(), address)
    check_exposure(Auth(mode="open"), address)
    check_exposure(Auth(keys_file="keys.json"), address)
