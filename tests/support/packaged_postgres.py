"""PostgreSQL of the Debian package (15 in Debian 12), with TLS and a certificate authority."""

from pathlib import Path
from typing import Final

from support import needs
from support.postgres_server import Installation

PACKAGED: Final = max(
    Path("/usr/lib/postgresql").glob("*/"),
    key=lambda folder: int(folder.name) if folder.name.isdigit() else 0,
    default=Path("/usr/lib/postgresql/15"),
)
"""Programs of Debian's package `postgresql`."""
HOST: Final = "127.0.0.1"
"""The only name in the server's certificate."""
ICU: Final = "locale_provider icu icu_locale 'de-DE' locale 'C'"
"""Options of a database that sorts text as German dictionaries do."""


def check_packaged() -> None:
    """Skip the test unless the package is installed."""
    if not (PACKAGED / "bin" / "postgres").exists():
        needs.lacking("not installed: Debian's package postgresql")


class Authority:
    """Signs certificates of servers."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self._folder = installation.new_folder("ca")
        self.certificate = self._folder / "ca.crt"
        self._openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-days", "2", "-subj", "/CN=test authority", "-keyout", f"{self._folder}/ca.key"),
            *("-out", str(self.certificate)),
        )

    def issue(self) -> dict[str, str]:
        """Return the settings of a server with a certificate for HOST."""
        key, request, signed, names = (
            self._folder / f"server.{kind}" for kind in ("key", "csr", "crt", "names")
        )
        self._openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-subj", "/CN=test server", "-keyout", str(key), "-out", str(request)),
        )
        names.write_text(f"subjectAltName=IP:{HOST}\n")
        if self._installation.account is not None:
            self._installation.account.owns(names)
        self._openssl(
            *("x509", "-req", "-in", str(request), "-CA", str(self.certificate)),
            *("-CAkey", f"{self._folder}/ca.key", "-CAcreateserial", "-days", "2"),
            *("-extfile", str(names), "-out", str(signed)),
        )
        return {"ssl": "on", "ssl_cert_file": str(signed), "ssl_key_file": str(key)}

    def verified(self, url: str) -> str:
        """Return the URL with a check that this authority signed the server's certificate."""
        return f"{url}?sslmode=verify-full&sslrootcert={self.certificate}"

    def _openssl(self, *arguments: str) -> None:
        self._installation.run("openssl", *arguments)
