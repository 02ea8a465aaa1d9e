"""Settings: reads config file, environment and flags, and returns one frozen value."""

from typing import TYPE_CHECKING

from stenolog.lazy_loading import lazy_exports

if TYPE_CHECKING:
    from stenolog.settings.model_selection import find_model as find_model
    from stenolog.settings.model_selection import open_model as open_model
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "stenolog.settings.model_selection": "find_model open_model",
        },
    )
