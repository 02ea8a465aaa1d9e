"""Import of sessions of other programs.

`legacy_session` holds the types that all importers share, and the other modules have the name of
their program. picoclaw and zeroclaw share `claw_logs`. `folder` reads files, `framework_tables`
reads SQLite files, and `strands` reads folder trees. `framework_tables.find_sources` finds all
sources in a folder. `chat_format` converts messages to the chat format.
"""
