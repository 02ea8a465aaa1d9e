"""Requests to a model: selects the messages to send, and summarizes older messages."""

from typing import TYPE_CHECKING

from stenolog.lazy_loading import lazy_exports

if TYPE_CHECKING:
    from stenolog.context.context import Context as Context
    from stenolog.context.request_messages import ProviderRequirements as ProviderRequirements
    from stenolog.context.window import Limits as Limits
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "stenolog.context.context": "Context",
            "stenolog.context.request_messages": "ProviderRequirements",
            "stenolog.context.window": "Limits",
        },
    )
