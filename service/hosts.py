"""The list of hosts that images may be fetched from."""

from typing import Final

from service.fetch.urls import canonical_host

ANY_HOST: Final = "*"
_BELOW: Final = "*."


def canonical_entry(text: str) -> str | None:
    """An entry of the list as it is compared: `*`, `*.suffix` or a host; None where it is none of them."""
    if text == ANY_HOST:
        return text
    host = canonical_host(text.removeprefix(_BELOW))
    if host is None or not text.startswith(_BELOW):
        return host
    is_address = ":" in host or host.rpartition(".")[2].isdigit()
    return None if is_address else f"{_BELOW}{host}"


def allows(entries: tuple[str, ...], host: str) -> bool:
    """`*.suffix` means every name below it and not the suffix itself."""
    return any(
        entry in (ANY_HOST, host) or (entry.startswith(_BELOW) and host.endswith(entry[1:])) for entry in entries
    )
