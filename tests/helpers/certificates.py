"""Certificates for tests, made by the command openssl; without it a test is skipped."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest


class Certificate(NamedTuple):
    """The PEM files of a certificate that signs itself, for localhost and 127.0.0.1."""

    cert: Path
    key: Path


def make_certificate(folder: Path, name: str = "server", *options: str) -> Certificate:
    """Make a certificate with a key of its own; it is its own authority."""
    if shutil.which("openssl") is None:
        pytest.skip("the command openssl is not installed")
    made = Certificate(folder / f"{name}.crt", folder / f"{name}.key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-days", "2", "-subj", f"/CN={name}", "-keyout", made.key, "-out", made.cert]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, *(options or ["-nodes"])], check=True, capture_output=True)
    return made
