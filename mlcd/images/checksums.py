"""Verifies the whole-file checksums that object stores keep."""

import base64
import hashlib
import re
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

_MD5: Final = re.compile(r'"?([0-9a-f]{32})"?')  # multipart uploads have other ETags
_KMS_ENCRYPTION: Final = ("aws:kms", "aws:kms:dsse")  # then the ETag is not an MD5 of the bytes


class Checksum:
    """The checksum of a file while it is read. expected: the store's digest."""

    def __init__(self, name: str, expected: bytes) -> None:
        self.name, self._expected = name, expected
        self._crc32, self._md5 = 0, hashlib.md5(usedforsecurity=False)
        self.update: Callable[[bytes], None] = (
            self._md5.update if name == "MD5" else self._update_crc32
        )

    def matches(self) -> bool:
        """Returns whether the digest of the bytes so far equals the store's."""
        digest = self._md5.digest() if self.name == "MD5" else self._crc32.to_bytes(4, "big")
        return digest == self._expected

    def _update_crc32(self, data: bytes) -> None:
        self._crc32 = zlib.crc32(data, self._crc32)


def read_checksum(filesystem: Any, path: str) -> Checksum | None:
    """Returns the store's checksum of a whole file; None if it lacks a checksum of a supported
    kind.
    """
    facts: dict[str, Any] = {}
    with suppress(Exception):  # without a checksum the file can still be read
        facts = _s3_facts(filesystem, path) if _is_s3(filesystem) else filesystem.info(path)
    crc32 = str(facts.get("ChecksumCRC32", "-"))
    if "-" not in crc32 and facts.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT":
        return Checksum("CRC32", base64.b64decode(crc32))
    if "md5Hash" in facts:  # Google's
        return Checksum("MD5", base64.b64decode(facts["md5Hash"]))
    etag = _MD5.fullmatch(str(facts.get("ETag", ""))) if _is_s3(filesystem) else None
    is_of_bytes = (
        facts.get("ServerSideEncryption") not in _KMS_ENCRYPTION
        and "SSECustomerAlgorithm" not in facts
    )
    return Checksum("MD5", bytes.fromhex(etag[1])) if etag is not None and is_of_bytes else None


def _is_s3(filesystem: Any) -> bool:
    return hasattr(filesystem, "call_s3")


def _s3_facts(filesystem: Any, path: str) -> dict[str, Any]:
    bucket, _, key = path.partition("/")
    facts: dict[str, Any] = filesystem.call_s3(
        "head_object", Bucket=bucket, Key=key, ChecksumMode="ENABLED"
    )
    return facts
