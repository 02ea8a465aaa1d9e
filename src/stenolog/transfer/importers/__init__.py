"""Import of sessions of other programs.

`folder` reads folders of session files, and `framework_tables` reads SQLite files through
`sqlite_file`. `framework_tables.find_sources` finds all sources in a folder. `claw_logs` is for
picoclaw and zeroclaw. `adk`, `langchain`, `nanobot`, `openai_agents` and `strands` are for the
program in their name. All of them share the types in `legacy_session` and the conversion in
`chat_format`. `key_map` renames imported sessions.
"""
