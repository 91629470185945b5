"""HTTPS serves what HTTP does; a wrong file is named before the model loads."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import time

import agent_engine
import agent_model
import httpx
import pytest
from certificates import make_certificate
from metric_lines import value

from kiln.engine.cli.local_server import local_server
from kiln.engine.errors import ConfigError
from kiln.engine.server.tls import Refresher, TlsSettings


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"), "other")


def _trusting(*certificates):
    context = ssl.create_default_context()
    for one in certificates:
        context.load_verify_locations(one.cert)
    return context


def test_a_server_streams_keeps_connections_and_notices_who_leaves(made, other, tmp_path):
    folder = tmp_path / "tiny"
    agent_model.write_folder(folder)
    flags = [str(folder), "--device", "cpu", "--ssl-certfile", str(made.cert)]
    flags += ["--ssl-keyfile", str(made.key), "--ssl-ca-certs", str(other.cert)]
    flags += ["--ssl-cert-reqs", "2"]
    long = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    program = agent_engine.kiln_command(seconds=0.01)
    with local_server(flags, program=program) as (url, _):
        assert url.startswith("https://127.0.0.1:")
        trust = _trusting(made)
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{url}/health", verify=trust, timeout=60)
        trust.load_cert_chain(other.cert, other.key)
        with httpx.Client(base_url=url, verify=trust, timeout=60) as client:
            seen = set()
            for _ in range(2):
                body = {"prompt": "a", "max_tokens": 5, "stream": True}
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    stream = answer.extensions["network_stream"]
                    seen.add(stream.get_extra_info("client_addr"))
                    lines = [line for line in answer.iter_lines() if line]
                assert lines[-1] == "data: [DONE]"
                assert json.loads(lines[0].removeprefix("data: "))["choices"]
            assert len(seen) == 1
            with client.stream("POST", "/v1/completions", json=long) as answer:
                next(answer.iter_lines())
            deadline = time.monotonic() + 60
            while not value(client.get("/metrics").text, "kiln:requests_aborted_total"):
                assert time.monotonic() < deadline, "the server does not notice that a client left"
                time.sleep(0.02)


def _wrong(made, other, folder):
    """Settings that cannot work, and words of the error."""
    empty, missing = folder / "empty", folder / "missing"
    empty.write_text("")
    damaged = folder / "damaged.crt"
    damaged.write_text(made.cert.read_text().replace("M", "N", 9))
    locked = make_certificate(folder, "locked", "-passout", "pass:secret")
    yield TlsSettings(missing, made.key), ["--ssl-certfile", str(missing), "No such file"]
    yield TlsSettings(made.cert, missing), ["--ssl-keyfile", str(missing), "No such file"]
    yield TlsSettings(made.cert, folder), ["--ssl-keyfile", "directory"]
    yield TlsSettings(made.cert), ["--ssl-certfile", "private key", "--ssl-keyfile"]
    yield TlsSettings(empty, made.key), ["--ssl-certfile", "certificate"]
    yield TlsSettings(made.cert, other.key), ["--ssl-keyfile", "not the key", str(made.cert)]
    yield TlsSettings(damaged, made.key), [str(damaged), "OpenSSL"]
    yield TlsSettings(locked.cert, locked.key), ["--ssl-keyfile", "passphrase"]
    yield TlsSettings(made.cert, made.key, cert_reqs=3), ["--ssl-cert-reqs 3", "0, 1 or 2"]
    yield TlsSettings(made.cert, made.key, cert_reqs=2), ["--ssl-cert-reqs 2", "--ssl-ca-certs"]
    yield TlsSettings(made.cert, made.key, other.cert), ["--ssl-ca-certs", "--ssl-cert-reqs"]
    yield TlsSettings(made.cert, made.key, empty, 1), ["--ssl-ca-certs", "certificate"]
    yield TlsSettings(made.cert, made.key, ciphers="NOT-ONE"), ["--ssl-ciphers 'NOT-ONE'"]


def test_what_cannot_work_is_named(made, other, tmp_path):
    for settings, words in _wrong(made, other, tmp_path):
        with pytest.raises(ConfigError) as caught:
            settings.context()
        for word in words:
            assert word in str(caught.value), caught.value


def test_a_file_may_hold_both_and_ciphers_may_be_chosen(made, tmp_path):
    both = tmp_path / "both.pem"
    both.write_text(made.key.read_text() + made.cert.read_text())
    context = TlsSettings(both, ciphers="ECDHE-ECDSA-AES256-GCM-SHA384").context()
    names = {one["name"] for one in context.get_ciphers() if one["protocol"] == "TLSv1.2"}
    assert names == {"ECDHE-ECDSA-AES256-GCM-SHA384"}
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2


def test_new_connections_get_the_changed_certificate_once_its_key_fits(
    made, other, tmp_path, caplog
):
    cert, key = tmp_path / "server.crt", tmp_path / "server.key"
    shutil.copy(made.cert, cert)
    shutil.copy(made.key, key)
    settings = TlsSettings(cert, key)
    context = settings.context()
    refresher = Refresher(settings, context)

    async def names():
        """The name in the certificate of a new connection, after each step of a change."""

        async def close(reader, writer):
            writer.close()

        server = await asyncio.start_server(close, "127.0.0.1", 0, ssl=context)

        async def name():
            trust = _trusting(made, other)
            address = server.sockets[0].getsockname()
            _, writer = await asyncio.open_connection(*address, ssl=trust)
            ((((_, common),),),) = (writer.get_extra_info("peercert")["subject"],)
            writer.close()
            return common

        async with server:
            yield await name()
            shutil.copy(other.cert, cert)  # half of a change
            refresher.look()
            yield await name()
            shutil.copy(other.key, key)
            refresher.look()
            yield await name()
            refresher.look()

    async def run():
        return [name async for name in names()]

    caplog.set_level("INFO", logger="kiln")  # a test of logs may have set it higher
    assert asyncio.run(run()) == ["server", "server", "other"]
    levels = [record.levelname for record in caplog.records if "tls" in record.name]
    assert levels == ["ERROR", "INFO"]


def test_flags_of_tls_need_a_certificate(capsys):
    from kiln.engine.cli.main import main

    for flag in (["--ssl-keyfile", "k"], ["--ssl-cert-reqs", "1"], ["--enable-ssl-refresh"]):
        assert main(["serve", *flag]) != 0
        said = capsys.readouterr().err
        assert said.startswith(f"error: {flag[0]}: needs --ssl-certfile")
