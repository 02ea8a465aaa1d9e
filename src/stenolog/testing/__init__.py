"""Models that follow a script, for tests: in the process of the test, and as a server."""

from typing import TYPE_CHECKING

from stenolog.lazy_loading import lazy_exports

if TYPE_CHECKING:
    from stenolog.testing.model_server import ModelServer as ModelServer
    from stenolog.testing.model_server import ScriptedResponse as ScriptedResponse
    from stenolog.testing.scripted_model import ScriptedModel as ScriptedModel
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "stenolog.testing.model_server": "ModelServer ScriptedResponse",
            "stenolog.testing.scripted_model": "ScriptedModel",
        },
    )
