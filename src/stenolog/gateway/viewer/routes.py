"""The pages of the viewer, by their paths."""

from starlette.routing import BaseRoute, Route

from stenolog.gateway.viewer.conversation import conversation, fragment
from stenolog.gateway.viewer.exporting import export
from stenolog.gateway.viewer.inspecting import context
from stenolog.gateway.viewer.listing import home
from stenolog.gateway.viewer.notebook import change_notes, notes
from stenolog.gateway.viewer.rendering import rendered
from stenolog.gateway.viewer.serving import static, told_as_page
from stenolog.gateway.viewer.turning import turns
from stenolog.gateway.viewer.warming import warm


def viewer_routes() -> list[BaseRoute]:
    """What a browser asks for. Sessions are only read here; what changes one goes through /v1/."""
    warm()
    pages = {
        "/": home,
        "/notes": notes,
        "/s/{key}": conversation,
        "/s/{key}/fragment": fragment,
        "/s/{key}/turns": turns,
        "/s/{key}/context": context,
        "/s/{key}/export.{form}": export,
    }
    return [
        Route("/static/{name}", static),
        Route("/notes", change_notes, methods=["POST"]),
        Route("/rendered", rendered, methods=["POST"]),
        *(Route(path, told_as_page(answer), name=path) for path, answer in pages.items()),
    ]
