"""Channels: messages from chat apps and webhooks in, answers out, each sent at most once."""
