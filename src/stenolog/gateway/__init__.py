"""The HTTP gateway for agents: OpenAI-compatible chat, the sessions API, live streams, a viewer."""
