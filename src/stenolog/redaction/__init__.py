"""Redaction: finds secrets in text and JSON, and removes them."""
