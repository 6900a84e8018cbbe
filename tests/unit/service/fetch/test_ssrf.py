"""No form of a URL, no redirect and no answer of a name server makes the service connect to what is
not public.

Nothing of ours is replaced: the system's resolver and its connect are, so that nothing leaves this
machine.
"""

import asyncio
import socket

import pytest

from mlcd.service.fetch.fetcher import Fetcher
from mlcd.service.fetch.image_url import ImageUrl
from mlcd.service.settings import Fetch, Limits
from tests.image_host import ImageHost, ok, redirect
from tests.unit.service.engines import new_metrics

PUBLIC = "93.184.216.34"
NAMES = """
good.example PUBLIC | inside.example 10.0.0.5 | loopback.example 127.0.0.1 | six.example ::1
mixed.example PUBLIC 127.0.0.1 | mixed-six.example PUBLIC fd00:ec2::254 | zero.example 0.0.0.0
mapped.example ::ffff:127.0.0.1 | metadata.example 169.254.169.254 | nat64.example 64:ff9b::7f00:1
6to4.example 2002:7f00:1::1 | link.example fe80::1%2 | strange.example not-an-address
localhost 127.0.0.1 ::1 | ip6-localhost ::1 | metadata.google.internal 169.254.169.254
127.0.0.1.nip.example 127.0.0.1 | rebinding.example PUBLIC then 127.0.0.1
"""
NAMES = {
    name: addresses
    for name, *addresses in map(
        str.split, NAMES.strip().replace("PUBLIC", PUBLIC).replace("\n", "|").split("|")
    )
}
FORMS = """
        http://127.0.0.1/ http://127.0.0.1:80/ http://127.255.255.254/ http://127.1/ http://127.0.1/
    http://2130706433/     http://017700000001/ http://0177.0.0.1/ http://0177.0.0.01/
    http://0x7f000001/ http://0x7f.0.0.1/ http://0x7f.1/     http://0X7F.0x0.0x0.0x1/
    http://127.0.0.0x1/ http://00000177.0.0.1/ http://4294967296/ http://0/ http://0.0.0.0/
    http://0.0.0.0:443/ http://00.0.0.0/ http://[::]/ http://[::1]/ http://[0:0:0:0:0:0:0:1]/
    http://[0000::1]:80/     http://[::ffff:127.0.0.1]/ http://[::ffff:7f00:1]/
    http://[0:0:0:0:0:ffff:127.0.0.1]/ http://[::127.0.0.1]/     http://[::ffff:169.254.169.254]/
    http://[64:ff9b::7f00:1]/ http://[64:ff9b::127.0.0.1]/ http://[64:ff9b::a9fe:a9fe]/
    http://[64:ff9b:1::7f00:1]/ http://[2002:7f00:1::]/ http://[2002:a9fe:a9fe::1]/
    http://[2001:0:7f00:1::]/     http://[2001::f5ff:fffe]/ http://[fe80::1]/ http://[fe80::1%25lo]/
    http://[fe80::1%lo]/ http://[fec0::1]/     http://[fc00::1]/ http://[fd00:ec2::254]/
    http://[ff02::1]/ http://[::ffff:0:127.0.0.1]/ http://[2001:db8::1]/
    http://169.254.169.254/latest/meta-data/ http://169.254.170.2/v2/credentials http://2852039166/
    http://0xa9fea9fe/     http://0251.0376.0251.0376/ http://169.254.43518/ http://100.100.100.200/
    http://168.63.129.16/ http://192.0.0.192/     http://10.0.0.1/ http://172.16.0.1/
    http://192.168.0.1/ http://100.64.0.1/ http://198.18.0.1/ http://192.88.99.1/
    http://224.0.0.1/ http://240.0.0.1/ http://255.255.255.255/ http://localhost/ http://LOCALHOST/
    http://localhost./     http://localhost:6379/ http://ip6-localhost/
    http://metadata.google.internal/computeMetadata/v1/     http://metadata.google.internal./
    http://127.0.0.1./ http://127.0.0.1.nip.example/ http://inside.example/
    http://loopback.example/ http://six.example/ http://mixed.example/ http://mixed-six.example/
    http://mapped.example/     http://metadata.example/ http://nat64.example/ http://6to4.example/
    http://zero.example/ http://link.example/     http://strange.example/ http://absent.example/
    https://127.0.0.1/ https://localhost/ https://inside.example/     http://good.example@127.0.0.1/
    http://127.0.0.1@good.example/ http://good.example:80@127.0.0.1:80/
    http://good.example%40127.0.0.1/ http://good.example#@127.0.0.1/ http://good.example?@127.0.0.1/
    http://good.example\\@127.0.0.1/ http://127.0.0.1\\@good.example/
    http://good.example\\.127.0.0.1/     http:\\\\127.0.0.1/ http:/\\127.0.0.1/ http:127.0.0.1/
    http:///127.0.0.1/ http://good.example:127.0.0.1/     http://good.example:22/
    http://good.example:6379/ http://good.example:0/ http://good.example:65616/
    http://\uff11\uff12\uff17.0.0.1/ http://①②⑦.0.0.1/ http://127。0。0。1/ http://ⓛocalhost/
    http://locaⓛhost/     http://127%2e0%2e0%2e1/ http://%6c%6f%63%61%6c%68%6f%73%74/ http://xn--/
    http://good.example%00.evil.example/     ftp://127.0.0.1/ gopher://127.0.0.1:6379/_INFO
    file:///etc/passwd dict://127.0.0.1:11211/ unix:///run/docker.sock
    http+unix://%2Frun%2Fdocker.sock/ jar:http://127.0.0.1!/ data://127.0.0.1/ //127.0.0.1/
    ws://127.0.0.1/
""".split()  # noqa: SIM905 - a table
SPACED = ["http://good.example\t@127.0.0.1/", "http://127.0.0.1\n/", "http://127.0.\t0.1/"]
SPACED += ["http://good.example \r\nHost: x/", " http://127.0.0.1/", "http:// 127.0.0.1/"]
SPACED += ["http://127.0.0.1 /", "http://good.example\x00@127.0.0.1/"]
ALL = [*FORMS, *SPACED]
# To the public host itself, with something behind it that another parser might take for the host.
HARMLESS = {"http://good.example#@127.0.0.1/", "http://good.example?@127.0.0.1/"}


class Wire:
    """connected: every address and port that anything in this process connected to. asked: names
    that were resolved.
    """

    def __init__(self, monkeypatch, host):
        self.connected, self.asked, self._host = [], [], host
        self._connect, self._getaddrinfo = socket.socket.connect, socket.getaddrinfo
        monkeypatch.setattr(
            socket.socket,
            "connect",
            lambda connection, address: self.connect(connection, address),  # noqa: PLW0108
        )
        monkeypatch.setattr(socket, "getaddrinfo", self.resolve)

    def connect(self, connection, address):
        self.connected.append(address[:2])
        if address[0] != PUBLIC:
            raise ConnectionRefusedError
        return self._connect(connection, ("127.0.0.1", self._host.port))

    def resolve(self, host, port, *arguments, type=0, **_):  # noqa: A002 - its name
        self.asked.append(host)
        found = NAMES.get(host.lower())
        if found is None:  # what the system takes for a number is one here too
            return self._getaddrinfo(host, port, type=type, flags=socket.AI_NUMERICHOST)
        if "then" in found:
            found = (
                found[: found.index("then")]
                if self.asked.count(host) == 1
                else found[found.index("then") + 1 :]
            )
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in found]
        return [
            (family, type, 6, "", (address, port))
            for family, address in zip(families, found, strict=True)
        ]

    @property
    def forbidden(self):
        return [address for address in self.connected if address[0] != PUBLIC]


@pytest.fixture
def host():
    with ImageHost({"/": ok(b"an image")}) as host:
        yield host


@pytest.fixture
def wire(monkeypatch, host):
    return Wire(monkeypatch, host)


def fetch(*urls, **settings):
    async def run():
        async with Fetcher(
            Fetch(**({"allow": ["*"], "timeout_s": 5} | settings)), Limits(), new_metrics()
        ) as fetcher:
            given = fetcher.screen([ImageUrl(url) for url in urls])
            async with fetcher.fetch(
                given, deadline=asyncio.get_running_loop().time() + 20
            ) as found:
                return found

    return asyncio.run(run())


def test_there_are_at_least_sixty_forms():
    assert len(set(ALL)) == len(ALL) >= 100


def test_the_good_host_is_reached_so_that_the_rest_means_something(wire, host):
    assert fetch("http://good.example/") == [b"an image"]
    assert (wire.connected, wire.asked, host.paths) == ([(PUBLIC, 80)], ["good.example"], ["/"])
    assert host.asked[0][1]["host"] == "good.example"


def test_no_form_reaches_what_is_not_public(wire):
    found = dict(zip(ALL, fetch(*ALL), strict=True))
    assert wire.forbidden == []
    reached = {
        form for form, image in found.items() if getattr(image, "reason", None) != "url-refused"
    }
    assert reached == HARMLESS
    assert len(wire.connected) <= len(HARMLESS)


def test_no_redirect_reaches_what_is_not_public(wire, host):
    places = [form.replace("\r", "").replace("\n", "").encode().decode("latin-1") for form in ALL]
    host.answers = {f"/{number}": redirect(place) for number, place in enumerate(places)}
    found = fetch(
        *[f"http://good.example/{number}" for number in range(len(ALL))], max_connections=8
    )
    assert wire.forbidden == []
    assert {port for _, port in wire.connected} == {80}
    reasons = {form: getattr(image, "reason", None) for form, image in zip(ALL, found, strict=True)}
    unreadable = {form for form in ALL if "\0" in form}  # the whole answer is
    assert {
        form for form, reason in reasons.items() if reason != "url-refused"
    } == HARMLESS | unreadable


def test_a_chain_is_checked_at_every_hop(wire, host):
    host.answers = {
        "/": redirect("/b"),
        "/b": redirect("//good.example/c"),
        "/c": redirect("http://inside.example/d"),
    }
    (found,) = fetch("http://good.example/")
    assert (found.reason, host.paths, wire.forbidden) == ("url-refused", ["/", "/b", "/c"], [])
    assert wire.asked[-1] == "inside.example"


def test_a_name_is_resolved_once_and_its_address_is_the_one_that_is_connected_to(wire, host):
    assert fetch("http://rebinding.example/") == [b"an image"]
    assert (wire.asked, wire.connected) == (["rebinding.example"], [(PUBLIC, 80)])
    (found,) = fetch("http://rebinding.example/")  # its second answer
    assert (found.reason, wire.forbidden) == ("url-refused", [])


def test_a_redirect_to_a_name_that_rebinds_is_refused(wire, host):
    host.answers = {"/": redirect("http://rebinding.example:443/again")}
    (found,) = fetch("http://rebinding.example/")
    assert (found.reason, wire.connected, host.paths) == ("url-refused", [(PUBLIC, 80)], ["/"])


def test_a_host_that_is_not_on_the_list_is_not_even_resolved(wire):
    (found,) = fetch("http://inside.example/", allow=["good.example", "*.cdn.example"])
    assert (found.reason, wire.asked, wire.connected) == ("url-refused", [], [])


def test_a_redirect_leaves_the_list_as_little_as_a_url(wire, host):
    host.answers = {"/": redirect("http://rebinding.example/")}
    (found,) = fetch("http://good.example/", allow=["good.example"])
    assert (found.reason, wire.asked) == ("url-refused", ["good.example"])


def test_one_refusal_for_every_reason(wire, host):
    """Not on the list, no such name, inside, metadata, a redirect there: the client cannot tell
    them apart.
    """
    host.answers = {"/": redirect("http://inside.example/")}
    urls = ["http://absent.example/", "http://inside.example/", "http://metadata.example/"]
    urls += ["http://good.example/"]
    told = {
        str(found)
        for found in fetch(*urls, "http://[::1]/", "http://127.0.0.1/", "http://good.example:22/")
    }
    told |= {str(found) for found in fetch("http://inside.example/", allow=["good.example"])}
    (text,) = told
    assert not any(
        word in text for word in ("10.0", "169.254", "inside", "resolve", "private", "port")
    )


def test_the_environments_proxies_are_not_asked(wire, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:3128")
    assert fetch("http://good.example/") == [b"an image"]
    assert wire.connected == [(PUBLIC, 80)]


def test_a_named_network_is_for_the_hosts_on_the_list_only(wire):
    (found, other) = fetch(
        "http://inside.example/",
        "http://loopback.example/",
        allow=["inside.example"],
        networks=["10.0.0.0/8"],
    )
    assert wire.connected == [("10.0.0.5", 80)]
    assert (found.reason, other.reason) == ("fetch-failed", "url-refused")
