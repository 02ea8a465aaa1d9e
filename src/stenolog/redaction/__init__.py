"""Redaction: finds secrets in text and JSON, and removes them."""

from stenolog.redaction.redact import RedactedText, redact

__all__ = ["RedactedText", "redact"]
