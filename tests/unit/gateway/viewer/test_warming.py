"""What the first page would wait for is there before anybody asks."""

import subprocess
import sys

_FIRST = """
import sys, threading
from stenolog.gateway.viewer import pages
from stenolog.gateway.viewer.routes import viewer_routes
viewer_routes()
begun = [one for one in threading.enumerate() if one.name == "viewer-languages"]
environment = pages._environment()
ready = {name for _, name in environment.cache.keys()}
assert ready >= {"conversation.html", "part.html", "home.html", "turns.html"}, ready
for one in begun:
    one.cancel()
    one.function()
assert {"pygments.lexers.python", "pygments.lexers.sql"} <= set(sys.modules)
"""


def test_templates_and_colours_are_ready_before_the_first_page() -> None:
    subprocess.run([sys.executable, "-c", _FIRST], check=True, timeout=100)
