"""The accepted forms of a URL, of a host on the list and of an address."""

import re
from ipaddress import ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlcd.errors import ImageRejected
from mlcd.fetching.addresses import may_connect
from mlcd.fetching.hosts import allows, canonical_entry, canonical_host
from mlcd.fetching.urls import Url, parse_url


@pytest.mark.parametrize(
    ("text", "scheme", "authority", "port", "target"),
    [
        ("http://example.com", "http", "example.com", 80, "/"),
        (
            "HTTPS://Images.Example.COM/A/b.PNG?x=[1]&y=%20#top",
            "https",
            "images.example.com",
            443,
            "/A/b.PNG?x=[1]&y=%20",
        ),
        ("http://example.com:8080/x", "http", "example.com:8080", 8080, "/x"),
        ("http://example.com:080/x", "http", "example.com", 80, "/x"),
        ("https://example.com:80/x", "https", "example.com:80", 80, "/x"),
        ("http://example.com?x=1", "http", "example.com", 80, "/?x=1"),
        ("http://xn--bcher-kva.example/a", "http", "xn--bcher-kva.example", 80, "/a"),
        ("http://a_b.example/@x", "http", "a_b.example", 80, "/@x"),
        ("http://93.184.216.34/x", "http", "93.184.216.34", 80, "/x"),
        ("http://[2606:4700:0:0::1111]/x", "http", "[2606:4700::1111]", 80, "/x"),
        ("http://localhost/x", "http", "localhost", 80, "/x"),
    ],
)
def test_a_url_is_read_once_and_whole(text, scheme, authority, port, target):
    url = parse_url(text)
    assert (url.scheme, url.authority, url.port, url.target) == (scheme, authority, port, target)


WRONG = """
    http:// http:///x http:/example.com/x http:example.com //example.com/x ftp://example.com/x
    file:///etc/passwd gopher://example.com/x http://user@example.com/x http://@example.com/x
    http://user:pw@example.com/x http://good.example\\@127.0.0.1/x http:\\\\example.com\\x
    http://example.com\\x http://example.com/ä.png http://bücher.example/x http://①.example/x
    http://\uff11\uff12\uff17.0.0.1/x http://127。0。0。1/x http://%31%32%37.0.0.1/x
    http://example%2ecom/x http://example.com./x http://example..com/x http://.example.com/x
    http://-example.com/x http://example.com:/x http://example.com:0/x http://example.com:65536/x
    http://example.com:+80/x http://example.com:80:80/x http://2130706433/x http://0x7f000001/x
    http://0x7f.1/x http://127.1/x http://127.0.1/x http://0177.0.0.1/x http://127.0.0.01/x
    http://1.2.3.256/x http://example.1/x http://example.0x/x http://[::1/x http://::1/x
    http://[fe80::1%eth0]/x http://[fe80::1%25eth0]/x http://[1.2.3.4]/x http://[::g]/x
    http://[example.com]/x http://[::1]x/x
""".split()  # noqa: SIM905 - a table
WRONG += [
    f"http://{'a' * 64}.com/x",
    f"http://{'a.' * 127}com/x",
    "http://example.com/" + "x" * 8192,
]
WRONG += ["http://example.com /x", " http://example.com/x", "http://example.com/x\n"]
WRONG += [
    "http://exa\tmple.com/x",
    "http://example.com/x\r\nHost: inside",
    "http://example.com/a b",
]
WRONG += ["http://example.com\x00.evil/x", "http://example.com:8 0/x"]


@pytest.mark.parametrize("text", WRONG)
def test_anything_but_a_plain_url_is_refused_without_a_word_of_it(text):
    with pytest.raises(ImageRejected) as caught:
        parse_url(text)
    assert caught.value.reason == "url-refused"
    assert not {"passwd", "127", "inside", "evil"} & set(
        str(caught.value).replace("/", " ").split()
    )


@given(st.text() | st.from_regex(r"https?://[!-~]{0,30}", fullmatch=True))
def test_what_is_read_reads_the_same_again(text):
    try:
        url = parse_url(text)
    except ImageRejected:
        return
    again = parse_url(f"{url.scheme}://{url.authority}{url.target}")
    assert again == url
    assert re.fullmatch(r"[a-z0-9_.:-]+", url.host)
    assert re.fullmatch(r"/[!-~]*", url.target)


@pytest.mark.parametrize(
    ("location", "found"),
    [
        ("/b", "http://example.com/b"),
        ("b?c", "http://example.com/a/b?c"),
        ("../b", "http://example.com/b"),
        ("?c", "http://example.com/a/x?c"),
        ("//other.example/b", "http://other.example/b"),
        ("https://other.example:8443/b#c", "https://other.example:8443/b"),
    ],
)
def test_a_redirect_may_be_relative(location, found):
    assert Url("http", "example.com", 80, "/a/x").join(location) == parse_url(found)


@pytest.mark.parametrize(
    "location",
    [
        "ftp://x.example/",
        "file:///etc/passwd",
        "data:image/png;base64,AA",
        "http://a\tb/",
        "http://[",
        "//a@b/",
        "\\\\b\\c",
    ],
)
def test_a_redirect_is_as_plain_as_a_url(location):
    with pytest.raises(ImageRejected):
        Url("http", "example.com", 80, "/a/x").join(location)


def test_hosts_are_compared_in_one_way():
    assert canonical_host("Example.COM") == "example.com"
    assert canonical_host("[2606:4700:0::1111]") == "2606:4700::1111"
    assert [canonical_host(text) for text in ("", "[::1", "::1]", "a b", "0x7f", "a.b.", "*")] == [
        None
    ] * 7
    assert canonical_entry("*.CDN.example") == "*.cdn.example"
    assert [
        canonical_entry(text) for text in ("*.1.2.3.4", "*.[::1]", "*.", "*x.example", "a.*.b", "")
    ] == [None] * 6


@pytest.mark.parametrize(
    ("entries", "host", "allowed"),
    [
        (("example.com",), "example.com", True),
        (("example.com",), "a.example.com", False),
        (("example.com",), "notexample.com", False),
        (("example.com",), "example.com.evil.example", False),
        (("*.example.com",), "a.example.com", True),
        (("*.example.com",), "a.b.example.com", True),
        (("*.example.com",), "example.com", False),
        (("*.example.com",), "notexample.com", False),
        (("*",), "whatever.example", True),
        (("x.example", "1.2.3.4"), "1.2.3.4", True),
        ((), "example.com", False),
    ],
)
def test_the_list_means_what_it_says(entries, host, allowed):
    assert allows(entries, host) is allowed


PUBLIC = ["1.1.1.1", "8.8.8.8", "93.184.216.34", "172.15.0.1", "172.32.0.1", "100.63.0.1"]
PUBLIC += ["100.128.0.1", "223.255.255.1"]
PUBLIC += ["2606:4700::1111", "2a00:1450:4001::1", "64:ff9b::808:808"]
FORBIDDEN = """
        0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 100.64.0.1 100.100.100.200 127.0.0.1 127.255.255.254
    169.254.169.254     169.254.170.2 168.63.129.16 172.16.0.1 172.31.255.255 192.0.0.1 192.0.0.192
    192.0.2.1 192.88.99.1 192.168.0.1     198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1
    239.255.255.255 240.0.0.1 255.255.255.255     :: ::1 ::127.0.0.1 ::8.8.8.8 ::ffff:127.0.0.1
    ::ffff:10.0.0.1 ::ffff:8.8.8.8 ::ffff:0:127.0.0.1 64:ff9b::7f00:1     64:ff9b::a9fe:a9fe
    64:ff9b::a00:1 64:ff9b:1::1 100::1 2001::1 2001:0:7f00:1:: 2001:20::1 2001:db8::1 2002:7f00:1::1
    2002:808:808::1 3fff::1 4000::1 5f00::1 fc00::1 fd00:ec2::254 fd12::1 fe80::1 fe80::1%eth0
    fec0::1 ff02::1     localhost 127.1 2130706433
""".split()  # noqa: SIM905 - a table


def test_only_public_addresses_are_connected_to():
    assert [address for address in PUBLIC if not may_connect(address, ())] == []
    assert [address for address in FORBIDDEN if may_connect(address, ())] == []


def test_a_named_network_is_reached_but_never_metadata_and_what_is_no_host():
    inside = (
        ip_network("10.1.0.0/16"),
        ip_network("169.254.0.0/16"),
        ip_network("fc00::/7"),
        ip_network("0.0.0.0/0"),
    )
    named = ["10.1.2.3", "64:ff9b::a01:203", "fd12::1", "127.0.0.1"]
    assert [address for address in named if not may_connect(address, inside)] == []
    never = ["169.254.169.254", "64:ff9b::a9fe:a9fe", "fd00:ec2::254", "0.0.0.0", "224.0.0.1"]
    never += ["168.63.129.16", "::1"]
    assert [address for address in never if may_connect(address, inside)] == []
    assert not may_connect("10.2.0.1", inside[:1])
    assert not may_connect("::ffff:10.1.2.3", inside[:1])
