"""The agent loop: durable turns, tools, chat commands and shutdown."""
