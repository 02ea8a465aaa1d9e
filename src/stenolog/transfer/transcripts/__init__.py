"""Readers of transcripts that coding agents and chat programs keep on disk."""
