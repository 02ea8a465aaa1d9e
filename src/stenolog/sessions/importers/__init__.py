"""Sessions that other programs kept: `old` the values, a module per layout, and where they stand.

`places` finds the shelves of a place: `folder` the files, `database` a SQLite file (its `tables`),
`strands_folder` a tree. `chat` is the shape that messages of another shape get.
"""
