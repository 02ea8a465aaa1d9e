"""Whether the gateway lives and can be used, as who watches over it is told."""

from stenolog.gateway.openapi import version
from support import temporary_folders
from support.gateway.sessions_api import KEY, serving


def test_working_gateway_is_healthy_and_ready() -> None:
    with temporary_folders.folder() as folder, serving(folder) as api:
        assert api("GET", "/healthz") == {"status": "ok", "version": version()}
        assert api("GET", "/readyz") == {"status": "ok", "version": version()}
        assert api.client.head("/healthz").status_code == 200
        assert api("GET", "/healthz?anything=1")["status"] == "ok"


def test_rejected_write_of_a_client_does_not_affect_readiness() -> None:
    with temporary_folders.folder() as folder, serving(folder) as api:
        api("POST", "/messages", key=KEY, json={"content": "a", "id": "1"})
        api("POST", "/messages", key=KEY, json={"content": "b", "id": "1"}, status=409)
        assert api("GET", "/readyz")["status"] == "ok"


def test_gateway_on_a_fallback_store_is_not_ready() -> None:
    with temporary_folders.folder() as folder, serving(folder, store="legacy") as api:
        code, words = api.error("GET", "/readyz", status=503)
        assert code == "not_ready"
        assert "'main'" in words
        assert str(folder) not in words
        assert api("GET", "/healthz")["status"] == "ok"


def test_gateway_with_a_closed_store_is_not_ready() -> None:
    with temporary_folders.folder() as folder, serving(folder) as api:
        api.store.close()
        assert api.error("GET", "/readyz", status=503)[0]
        assert api("GET", "/healthz")["status"] == "ok"


def test_closing_gateway_is_healthy_but_not_ready() -> None:
    with temporary_folders.folder() as folder, serving(folder) as api:
        api.gateway.closing.set()
        assert "shutting down" in api.error("GET", "/readyz", status=503)[1]
        assert api("GET", "/healthz")["status"] == "ok"
