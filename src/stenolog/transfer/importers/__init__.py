"""Import of sessions of other programs.

`folder` reads folders of session files. `claw_logs` is for picoclaw and zeroclaw, and `chat_format`
for plain messages. All of them share the types in `legacy_session`.
"""
