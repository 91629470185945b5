"""The address of a server is understood as people write it, or refused with an example."""

from __future__ import annotations

import pytest

from kiln.engine.cli.urls import server_url
from kiln.engine.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("localhost", "http://localhost"),
        ("8000", "http://localhost:8000"),
        (":8000", "http://localhost:8000"),
        ("host/v1", "http://host"),
        ("host:80/v1/", "http://host:80"),
        (" http://host:8000/ ", "http://host:8000"),
        ("http://host:8000/v1/chat/completions", "http://host:8000"),
        ("https://example.org/openai/v1", "https://example.org/openai"),
        ("https://example.org/some/prefix/", "https://example.org/some/prefix"),
        ("HTTP://host", "http://host"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("http://host:8000/#top", "http://host:8000"),
        ("my-v1-host/v1", "http://my-v1-host"),
        ("host/v10", "http://host/v10"),
    ],
)
def test_an_address_has_a_scheme_and_no_api_path(text, url):
    assert server_url(text) == url
    assert server_url(url) == url


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " ",
            "http://",
            "ftp://host",
            "unix:///run/kiln",
            "host:port",
            "host:99999",
            "a b:80",
        ),
        *("http://host/v1?key=x", "::1", "http://[::1", "/v1"),
    ],
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError) as raised:
        server_url(text)
    assert str(raised.value).startswith(f"--url {text!r}: ")
    assert "localhost:8000" in str(raised.value)
