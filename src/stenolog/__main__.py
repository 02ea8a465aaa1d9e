"""The command `steno`, also as `python -m stenolog`."""

import sys

from stenolog.errors import install_command


def main() -> None:
    """Run `steno`. If a package of the extra `app` is missing, exit with the command for pip."""
    try:
        from stenolog.cli import main as steno

        steno(prog_name="steno")
    except ModuleNotFoundError as error:
        package = (error.name or "stenolog").partition(".")[0]
        if package == "stenolog":
            raise
        sys.exit(f"steno needs the package {package}. Run: {install_command('app')}")


if __name__ == "__main__":
    main()
