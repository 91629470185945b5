"""The certificate of the flags ``--ssl-…``."""

from __future__ import annotations

import argparse

from kiln.engine.errors import ConfigError
from kiln.engine.server.tls import TlsSettings


def read_tls(args: argparse.Namespace) -> TlsSettings | None:
    """Return what the flags say; None: the server speaks plain HTTP. Raises ConfigError."""
    if args.ssl_certfile is None:
        for name in ("keyfile", "ca_certs", "cert_reqs", "ciphers"):
            if getattr(args, f"ssl_{name}") is not None:
                raise ConfigError(f"--ssl-{name.replace('_', '-')}: needs --ssl-certfile")
        if args.enable_ssl_refresh:
            raise ConfigError("--enable-ssl-refresh: needs --ssl-certfile")
        return None
    settings = TlsSettings(
        args.ssl_certfile,
        args.ssl_keyfile,
        args.ssl_ca_certs,
        args.ssl_cert_reqs or 0,
        args.ssl_ciphers,
    )
    settings.context()  # so that a wrong file is told before the model loads
    return settings
