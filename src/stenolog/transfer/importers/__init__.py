"""Import of sessions of other programs.

`legacy_session` holds the shared values, and each layout has a module. `folder` reads files,
`framework_tables` SQLite files, `strands` trees; `framework_tables.find_sources` finds all sources
of a folder. `chat_format` converts messages to the chat format.
"""
