"""Import of sessions of other programs.

`folder` reads folders of session files. `layouts` reads the messages in a file. Both share the
types in `legacy_session`.
"""
