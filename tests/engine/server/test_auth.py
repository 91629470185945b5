"""With a key, every route wants it but the pages and those that probes need."""

import base64

import httpx
import pytest

from kiln.engine.server.pages import routes as pages

KEY = "s3cret-ключ"  # of the server ``guarded``
OPEN = ["/health", "/health/live", "/health/ready", "/ping", "/version", *pages.FILES]


def _header(value):
    return {b"Authorization": value if isinstance(value, bytes) else value.encode()}


def _routes(client):
    document = client.get("/openapi.json", headers=_header(f"Bearer {KEY}")).json()
    listed = [(m.upper(), path) for path, ms in document["paths"].items() for m in ms]
    shown = [("GET", path) for path in pages.FILES]
    return [*listed, *shown, ("GET", "/openapi.json"), ("GET", "/nothing")]


WRONG = {
    "none": None,
    "wrong": b"Bearer wrong",
    "empty": b"Bearer",
    "not ASCII": b"Bearer \xff\xfe\xc3\xa9",
    "another scheme": f"Token {KEY}".encode(),
    "part": f"Bearer {KEY[:-1]}".encode(),
    "longer": f"Bearer {KEY}x".encode(),
    "bad base64": b"Basic %%%",
    "wrong password": b"Basic " + base64.b64encode(b"me:wrong"),
}


@pytest.mark.parametrize("name", WRONG)
def test_without_the_key_only_probes_and_pages_are_answered(guarded, name):
    headers = {} if WRONG[name] is None else _header(WRONG[name])
    for method, path in _routes(guarded):
        answer = guarded.request(method, path, headers=headers)
        if path in OPEN:
            assert answer.status_code == 200
        else:
            assert answer.status_code == 401, (method, path)
            assert answer.json()["error"]["type"] == "authentication_error"
            # A browser would ask for a password itself if it were offered Basic.
            assert answer.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "path",
    [
        "//version",
        "/version/",
        "/Version",
        "/healthy",
        "/health/",
        "/health/live/x",
        "/metrics?/version",
    ],
)
def test_only_the_exact_paths_are_open(guarded, path):
    url = str(guarded.base_url).rstrip("/") + path
    assert httpx.get(url).status_code == 401


def test_the_key_opens_as_bearer_and_as_password(guarded):
    for value in (
        f"Bearer {KEY}".encode(),
        f"bearer  {KEY}".encode(),
        b"Basic " + base64.b64encode(f"anyone:{KEY}".encode()),
    ):
        assert guarded.get("/v1/models", headers=_header(value)).status_code == 200
    body = {"prompt": [5], "max_tokens": 1}
    answer = guarded.post("/v1/completions", json=body, headers=_header(f"Bearer {KEY}"))
    assert answer.status_code == 200
