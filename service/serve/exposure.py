"""Whether a server may listen where it would."""

import ipaddress

from mlcd.errors import ConfigInvalid
from service.settings import Auth


def check_exposure(auth: Auth, address: str) -> None:
    """address: numeric, that a socket is bound to. Raises ConfigInvalid for one that others reach without a key."""
    local = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    if auth.keys_file is None and auth.mode != "open" and not local:
        raise ConfigInvalid(
            f"on {address} the server would be reached from elsewhere, and it knows no keys",
            remedy="make one with `mlcd keys create` and set MLCD_AUTH__KEYS_FILE, or set MLCD_AUTH__MODE=open",
        )
