"""Channels: messages of a chat app in, answers out, each at most once."""
