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
from stenolog.redaction.patterns import SECRET_PATTERNS
assert all("search" in vars(secret.pattern) for secret in SECRET_PATTERNS)
for one in begun:
    one.cancel()
    one.function()
assert {"pygments.lexers.python", "pygments.lexers.sql"} <= set(sys.modules)
"""

_LIST_FIRST = """
import sys, threading
import stenolog.cli.agents, stenolog.cli.serve, stenolog.gateway.daemon
from stenolog.gateway.viewer.routes import viewer_routes
viewer_routes(list_first=True)
slow = {"markdown_it", "nh3", "pygments", "httpx2", "importlib.metadata", "urllib.request"}
assert not slow & set(sys.modules), slow & set(sys.modules)
[later] = [one for one in threading.enumerate() if one.name == "viewer-languages"]
later.cancel()
later.function()
assert {"markdown_it", "nh3", "pygments.lexers.sql"} <= set(sys.modules)
"""


def test_templates_and_code_colours_are_ready_before_the_first_page() -> None:
    subprocess.run([sys.executable, "-c", _FIRST], check=True, timeout=100)


def test_a_viewer_that_shows_a_list_first_loads_markdown_later() -> None:
    subprocess.run([sys.executable, "-c", _LIST_FIRST], check=True, timeout=100)
