"""Redaction: finds secrets in text and JSON, and removes them."""

from stenolog.redaction.redact import Redacted, redact

__all__ = ["Redacted", "redact"]
