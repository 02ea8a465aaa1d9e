"""Import of sessions of other programs.

`old` holds the shared values, and each layout has a module. `places` finds the sources of a place:
`folder` reads files, `database` a SQLite file, `strands` a tree. `conversion` converts messages to
the chat format.
"""
