"""The errors of stores behind URLs: which are final, and what a user can do about each."""

from typing import Final

from fsspec import available_protocols

from mlcd.errors import ConfigInvalid, InvalidInput, MlcdError, NotFound, Unavailable

_SET_CREDENTIALS: Final = "set the store's credentials in the environment or in a profile"
_LACKS_CREDENTIALS: Final = frozenset(
    {"NoCredentialsError", "CredentialRetrievalError", "PartialCredentialsError", "ProfileNotFound"}
)
_TEMPORARY_STATUSES: Final = (408, 425, 429)  # 4xx statuses that a retry may resolve
_STATUS_ATTRIBUTES: Final = (
    "status",
    "status_code",
    "code",
)  # of the errors of aiohttp, Azure and Google


def is_final(error: Exception) -> bool:
    """Tells whether a retry cannot succeed."""
    if isinstance(error, MlcdError | FileNotFoundError | PermissionError):
        return True
    status = _status(error)
    is_refused = 400 <= status < 500 and status not in _TEMPORARY_STATUSES
    return is_refused or type(error).__name__ in _LACKS_CREDENTIALS


def translate_error(place: str, error: Exception) -> MlcdError:
    """Returns the error of a store as an MlcdError. place: the requested URL."""
    if isinstance(error, MlcdError):
        return error
    if isinstance(error, FileNotFoundError) or _status(error) == 404:
        return NotFound(f"{place} does not exist", remedy="check the bucket and the path")
    if isinstance(error, PermissionError) or _status(error) in (401, 403):
        return InvalidInput(f"access to {place} was denied", remedy=_SET_CREDENTIALS)
    if type(error).__name__ in _LACKS_CREDENTIALS:
        return InvalidInput(f"{place} requires credentials", remedy=_SET_CREDENTIALS)
    return Unavailable(
        f"{place} cannot be reached ({type(error).__name__})",
        remedy="see whether its store is up, and run the same command again",
    )


def cannot_open_error(url: str) -> MlcdError:
    """Returns the error for a URL that fsspec cannot open."""
    if url.partition("://")[0] in available_protocols():  # Azure's file system requires an account
        return InvalidInput(f"{url} requires credentials", remedy=_SET_CREDENTIALS)
    return ConfigInvalid(
        f"a location must be a path or a URL of a supported store, got {url}",
        remedy="give a path, or a URL as s3://…",
    )


def _status(error: Exception) -> int:
    """Returns the HTTP status in the error; 0 without one."""
    statuses = [getattr(error, name, None) for name in _STATUS_ATTRIBUTES]
    return next((status for status in statuses if isinstance(status, int)), 0)
