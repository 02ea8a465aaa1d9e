"""Signatures of webhooks: who sent this, and when. Pure.

`t=SECONDS,v1=HEX`: HEX is HMAC-SHA256 of `SECONDS.` and the body, by a secret of both sides.
"""

import hashlib
import hmac
import re
from typing import Final

HEADER: Final = "X-Steno-Signature"
STALE: Final = 300
"""After so many seconds a signature is worth nothing; one from so far ahead neither."""
_FORM: Final = re.compile(r"t=([0-9]{1,12}),v1=([0-9a-f]{64})")


def signature(secret: str, body: bytes, *, at: int) -> str:
    """What stands in the header of a message that is sent at this time."""
    return f"t={at},v1={_digest(secret, at, body)}"


def is_signed(secret: str, body: bytes, header: str, *, now: float) -> bool:
    """Whether the header was made with this secret, for this body, lately."""
    found = _FORM.fullmatch(header)
    at, given = (int(found[1]), found[2]) if found else (0, "")
    # Compared in any case: how long it takes tells nothing.
    right = hmac.compare_digest(_digest(secret, at, body), given)
    return right and abs(now - at) <= STALE


def _digest(secret: str, at: int, body: bytes) -> str:
    return hmac.new(secret.encode(), f"{at}.".encode() + body, hashlib.sha256).hexdigest()
