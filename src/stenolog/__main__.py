"""`python -m stenolog` is the command `steno`."""

from stenolog.cli import main

if __name__ == "__main__":
    main(prog_name="steno")
