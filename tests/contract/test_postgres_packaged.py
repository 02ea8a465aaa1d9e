"""Runs the store contract on Debian's PostgreSQL, over TLS, in a database with an ICU collation."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

import stenolog
from stenolog import PostgresStore, StoreUnavailable
from stenolog.catalog import open_catalog
from stenolog.stores.base import Store
from support import needs
from support.contract import StoreContract
from support.packaged_postgres import ICU, PACKAGED, Authority, check_packaged
from support.postgres_server import Databases, Installation, Server

pytestmark = pytest.mark.slow

KEYS = (
    *("a", "A", "b", "B", "z", "Z", "ä", "Ä", "é", "ß", "ss", "_", "~", "-", "a-b", "ab", "a b"),
    *("telegram:1", "telegram:10", "telegram:2", "Telegram:1", "日本", "\U0001f642", "\x7f", "a\0"),
)
"""Keys whose dictionary order differs from their byte order."""


@pytest.fixture(scope="module")
def installation() -> Iterator[Installation]:
    check_packaged()
    needs.tool("openssl")
    with Installation(PACKAGED) as found:
        yield found


@pytest.fixture(scope="module")
def authority(installation: Installation) -> Authority:
    return Authority(installation)


@pytest.fixture(scope="module")
def server(installation: Installation, authority: Authority) -> Server:
    return installation.server(**authority.issue()).start()


@pytest.fixture(scope="module")
def database(server: Server, authority: Authority) -> Iterator[str]:
    databases = Databases(server.url(), options=ICU)
    url = authority.verified(databases.new())
    with stenolog.open_store(url):
        yield url
    databases.close()


class TestPackagedPostgres(StoreContract):
    @pytest.fixture(autouse=True)
    def _database(self, database: str) -> None:
        self._url = database

    def make_store(self, path: Path) -> Store:  # noqa: ARG002 - it is in no folder
        return stenolog.open_store(self._url, namespace=uuid4().hex)


def test_server_has_tls_and_the_icu_locale(installation: Installation, database: str) -> None:
    with psycopg.connect(database) as connection:
        [(version, encrypted, provider, sorts)] = connection.execute(
            "SELECT current_setting('server_version_num')::int / 10000, ssl, datlocprovider, "
            "'ä' < 'b' FROM pg_stat_ssl, pg_database "
            "WHERE pid = pg_backend_pid() AND datname = current_database()"
        )
    assert (version, encrypted, provider, sorts) == (installation.version, True, "i", True)


def test_p6_keys_are_listed_and_paged_in_the_same_order_on_every_engine(
    database: str, tmp_path: Path
) -> None:
    name = uuid4().hex
    with ExitStack() as stack:
        stores = [
            stack.enter_context(stenolog.open_store(where, namespace=name))
            for where in (database, str(tmp_path / "files"), f"sqlite:{tmp_path / 'a.db'}")
        ]
        for store in stores:
            for key in KEYS:
                store.add_message(key, "user", f"I am {key}")
        expected = sorted(KEYS, key=str.encode)
        for store in stores:
            assert store.list_sessions() == expected
            assert store.list_sessions(prefix="telegram:1") == ["telegram:1", "telegram:10"]
            assert store.list_sessions(prefix="a") == [key for key in expected if key[0] == "a"]
            paged: list[str] = []
            while page := store.list_sessions(limit=3, after=paged[-1] if paged else None):
                paged += page
            assert paged == expected
        found = []
        for store in stores:
            with open_catalog(store) as catalog:
                entries = sorted(entry.key for entry in catalog.list(limit=100).entries)
                hits = sorted(hit.key for hit in catalog.search("telegram").hits)
                found.append((entries, hits))
        assert found[1:] == found[:1] * 2


def test_namespaces_are_listed_in_the_same_order_on_every_engine(
    server: Server, authority: Authority, tmp_path: Path
) -> None:
    databases = Databases(server.url(), options=ICU)
    listed = []
    for where in (authority.verified(databases.new()), f"sqlite:{tmp_path / 'a.db'}"):
        for name in ("b", "B", "a-c", "ab", "A"):
            with stenolog.open_store(where, namespace=name) as store:
                store.add_message("a", "user", "x")
        with stenolog.open_store(where) as store:
            assert isinstance(store, stenolog.PostgresStore | stenolog.SQLiteStore)
            listed.append(store.namespaces())
    assert listed[0] == listed[1]
    databases.close()


def test_p11_server_certificate_of_another_authority_is_rejected(
    server: Server, installation: Installation
) -> None:
    url = Authority(installation).verified(server.url())
    with pytest.raises(StoreUnavailable, match="certificate") as refused:
        PostgresStore(url)
    assert "sslrootcert" in str(refused.value)
    assert server.password not in str(refused.value)


def test_p11_server_certificate_with_another_host_name_is_rejected(
    server: Server, authority: Authority
) -> None:
    url = authority.verified(server.url().replace("127.0.0.1", "localhost"))
    with pytest.raises(StoreUnavailable, match="certificate") as refused:
        PostgresStore(f"{url}&hostaddr=127.0.0.1")
    assert server.password not in str(refused.value)


def test_server_without_tls_is_rejected_if_tls_is_required(installation: Installation) -> None:
    server = installation.server().start()
    with pytest.raises(StoreUnavailable, match="SSL") as refused:
        PostgresStore(f"{server.url()}?sslmode=require")
    assert "sslmode" in str(refused.value)
    assert server.password not in str(refused.value)
    server.stop()
