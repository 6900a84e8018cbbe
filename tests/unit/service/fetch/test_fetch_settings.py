"""Which hosts, networks and ports a server may be told to fetch from."""

from ipaddress import ip_network

import pytest

from mlcd.errors import ConfigInvalid
from mlcd.service.settings import read_settings


def read(monkeypatch, **given):
    for name, value in given.items():
        monkeypatch.setenv(f"MLCD_FETCH__{name.upper()}", value)
    return read_settings({"model": "hog"}).fetch


def test_lists_are_written_with_commas(monkeypatch):
    fetch = read(
        monkeypatch,
        allow="Example.com, *.CDN.example,[2606:4700:0::1]",
        networks="10.1.0.0/16,fd00::/8",
        ports="80, 8080",
    )
    assert fetch.allow == ("example.com", "*.cdn.example", "2606:4700::1")
    assert fetch.networks == (ip_network("10.1.0.0/16"), ip_network("fd00::/8"))
    assert fetch.ports == (80, 8080)


def test_nothing_is_fetched_by_default(monkeypatch):
    assert read(monkeypatch).allow == read(monkeypatch, allow="").allow == ()


WRONG_HOSTS = """
    https://example.com example.com:80 example.com/x user@example.com example.com. 0x7f.1 2130706433
    *.1.2.3.4 *x a.*.b [::1 good.example,http://x b\u00fccher.example
""".split()  # noqa: SIM905 - a table


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *[("allow", value, "MLCD_FETCH__ALLOW: a host must be") for value in (*WRONG_HOSTS, "a b")],
        ("networks", "10.0.0.1/8", "MLCD_FETCH__NETWORKS: networks are written 10.1.0.0/16"),
        ("networks", "inside", "MLCD_FETCH__NETWORKS"),
        ("ports", "0", "MLCD_FETCH__PORTS: ports are numbers from 1 to 65535"),
        ("ports", "80,65536", "MLCD_FETCH__PORTS"),
        ("ports", "http", "MLCD_FETCH__PORTS"),
        ("timeout_s", "0", "MLCD_FETCH__TIMEOUT_S"),
        ("max_redirects", "11", "MLCD_FETCH__MAX_REDIRECTS"),
        ("hosts", "x", "unknown setting MLCD_FETCH__HOSTS"),
    ],
)
def test_what_could_never_be_meant_is_refused_at_start(monkeypatch, name, value, message):
    with pytest.raises(ConfigInvalid) as caught:
        read(monkeypatch, **{name: value})
    assert message in str(caught.value)


def test_any_host_and_the_inside_do_not_go_together(monkeypatch):
    with pytest.raises(ConfigInvalid, match="public addresses only"):
        read(monkeypatch, allow="a.example,*", networks="10.0.0.0/8")
