"""Where sessions live: the protocol, and one room or file per engine."""
