"""Sessions that other programs kept: `old` the values, a module per layout, and where they stand.

`places` finds the shelves of a place: `folder` the files, `database` a SQLite file, `strands` a
tree. `conversion` brings messages of other formats into the chat format.
"""
