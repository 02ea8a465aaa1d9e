"""Import of sessions of other programs.

`folder` reads files, `framework_tables` reads SQLite files through `sqlite_file`, and `strands`
reads folder trees. `framework_tables.find_sources` finds all sources in a folder. `claw_logs` is
for picoclaw and zeroclaw. `adk`, `langchain`, `nanobot` and `openai_agents` are for the program in
their name. All of them share the types in `legacy_session` and the conversion in `chat_format`.
`key_map` renames imported sessions.
"""
