"""The gateway: HTTP for agents. OpenAI-compatible chat, the sessions API, live streams."""
