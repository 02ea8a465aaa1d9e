"""The agent: turns that survive anything, tools, commands, and what is to be closed at the end."""
