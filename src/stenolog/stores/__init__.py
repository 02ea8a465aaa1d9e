"""Stores for sessions: the `Store` protocol, and one package or module per engine."""
