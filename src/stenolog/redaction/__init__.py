"""Redaction: finds secrets in text and JSON, and removes them."""

from stenolog.redaction.redact import redact

__all__ = ["redact"]
