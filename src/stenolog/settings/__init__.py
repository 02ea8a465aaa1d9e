"""Settings: reads config file, environment and flags, and returns one frozen value."""

from typing import TYPE_CHECKING

from stenolog.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from stenolog.settings.model_selection import find_model, open_model
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "find_model": "stenolog.settings.model_selection",
            "open_model": "stenolog.settings.model_selection",
        },
    )

__all__ = [
    "find_model",
    "open_model",
]
