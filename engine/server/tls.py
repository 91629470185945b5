"""TLS of the server: the context of a certificate, and its reload when the files change."""

from __future__ import annotations

import hashlib
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from kiln.engine.errors import ConfigError

REFRESH_SECONDS = 10.0  # between two looks at the files
_CERTIFICATE, _KEY = b"-----BEGIN CERTIFICATE-----", b"PRIVATE KEY-----"  # of PEM

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """The files of a certificate, and what is asked of clients.

    ``keyfile`` None: ``certfile`` holds the key too. ``cert_reqs`` as in Python's ssl: 0 asks for
    no certificate of a client, 1 checks one that is sent, 2 requires one; ``ca_certs`` are those of
    its authorities. ``ciphers``: OpenSSL's names, for TLS 1.2.
    """

    certfile: Path
    keyfile: Path | None = None
    ca_certs: Path | None = None
    cert_reqs: int = 0
    ciphers: str | None = None

    def context(self) -> ssl.SSLContext:
        """Return the context of the files as they are now. Raises ConfigError by a flag's name."""
        self._check()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        context.verify_mode = ssl.VerifyMode(self.cert_reqs)
        if self.ciphers is not None:
            try:
                context.set_ciphers(self.ciphers)
            except ssl.SSLError as error:
                raise ConfigError(
                    f"--ssl-ciphers {self.ciphers[:80]!r}: OpenSSL knows none of them"
                ) from error
        self.load_into(context)
        return context

    def load_into(self, context: ssl.SSLContext) -> None:
        """Let new connections of a context use the files as they are now. Raises ConfigError."""
        key_flag, key = ("--ssl-certfile", self.certfile)
        if self.keyfile is not None:
            key_flag, key = "--ssl-keyfile", self.keyfile

        def password() -> str:
            raise ConfigError(
                f"{key_flag} {key}: the key is encrypted: write it without a passphrase, as "
                "openssl pkey does, into a file that only the server can read"
            )

        try:
            context.load_cert_chain(self.certfile, self.keyfile, password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                problem = f"is not the key of the certificate in {self.certfile}"
            else:
                problem = f"OpenSSL cannot use it with {self.certfile}: {error.reason}"
            raise ConfigError(f"{key_flag} {key}: {problem}") from error
        if self.ca_certs is not None:
            try:
                context.load_verify_locations(self.ca_certs)
            except ssl.SSLError as error:
                raise ConfigError(
                    f"--ssl-ca-certs {self.ca_certs}: OpenSSL cannot use it: {error.reason}"
                ) from error

    def digest(self) -> bytes:
        """Return a digest of all files; one that is missing counts as empty."""
        digest = hashlib.sha256()
        for path in (self.certfile, self.keyfile, self.ca_certs):
            try:
                content = b"" if path is None else path.read_bytes()
            except OSError:
                content = b""
            digest.update(hashlib.sha256(content).digest())
        return digest.digest()

    def _check(self) -> None:
        """Look for what each file must hold, and at what is asked of clients."""
        key_flag = "--ssl-certfile" if self.keyfile is None else "--ssl-keyfile"
        for flag, path, mark, what in (
            ("--ssl-certfile", self.certfile, _CERTIFICATE, "a certificate"),
            (key_flag, self.keyfile or self.certfile, _KEY, "a private key"),
            ("--ssl-ca-certs", self.ca_certs, _CERTIFICATE, "a certificate"),
        ):
            if path is not None and mark not in _content(flag, path):
                hint = "; --ssl-keyfile names the file of the key" if mark == _KEY else ""
                raise ConfigError(f"{flag} {path}: holds {what} in PEM form nowhere{hint}")
        if self.cert_reqs not in (0, 1, 2):
            raise ConfigError(f"--ssl-cert-reqs {self.cert_reqs}: must be 0, 1 or 2")
        if self.cert_reqs and self.ca_certs is None:
            raise ConfigError(
                f"--ssl-cert-reqs {self.cert_reqs}: needs --ssl-ca-certs, to check clients by"
            )
        if self.ca_certs is not None and not self.cert_reqs:
            raise ConfigError(
                f"--ssl-ca-certs {self.ca_certs}: checks no client without --ssl-cert-reqs: 2 "
                "requires a certificate of each, 1 checks those that are sent"
            )


def _content(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from error


class Refresher:
    """Loads the files into a context again when ``look`` finds that their contents changed.

    Files that do not fit each other are logged, and the context keeps what it has.
    """

    def __init__(self, settings: TlsSettings, context: ssl.SSLContext) -> None:
        self._settings = settings
        self._context = context
        self._seen = settings.digest()

    def look(self) -> None:
        """Look at the files once."""
        digest = self._settings.digest()
        if digest == self._seen:
            return
        self._seen = digest
        try:
            self._settings.context()  # so that the context in use never gets half of a pair
            self._settings.load_into(self._context)
        except ConfigError as error:
            logger.error("the changed certificate is not used: %s", error)
        else:
            logger.info("new connections use the changed %s", self._settings.certfile)
