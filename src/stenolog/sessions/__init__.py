"""Sessions for agent loops, and their maintenance: import, export, copy, backup, repair."""
