"""Sessions for agent loops: the SessionStore facade, session keys, aliases and folders."""
