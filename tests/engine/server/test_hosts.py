"""Names in Host, the Origin of simple requests, and a path that a proxy puts in front."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from one_life import OneLife

from kiln.engine.cli.hosts import read_hosts, read_root_path
from kiln.engine.errors import ConfigError
from kiln.engine.process.adapter_calls import AdapterCalls
from kiln.engine.process.wire import ModelInfo
from kiln.engine.server.app import create_app
from kiln.engine.server.middleware import OPEN_PATHS
from kiln.engine.server.serving import ServerSettings


class StandIn:
    is_ready = is_alive = True
    model_info = ModelInfo(64, 400, "float32", "cpu")
    resets = 0

    def __init__(self):
        self.adapters = AdapterCalls(lambda message: None)

    def stats(self):
        return {}

    def reset_prefix_cache(self):
        self.resets += 1


def app_of(client=None, **settings):
    return create_app(OneLife(client or StandIn()), None, ServerSettings(("tiny",), **settings))


def call(app, method="GET", path="/version", **options):
    async def send():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.request(method, path, **options)

    return asyncio.run(send())


LOOPBACK = read_hosts(None, "127.0.0.1", has_key=False)


@pytest.mark.parametrize(
    ("host", "fine"),
    [
        ("localhost", True),
        ("LocalHost.:8000", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("192.168.1.7", True),  # a name was looked up by nobody
        ("evil.example", False),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("evil.example#localhost", False),
        ("127.0.0.1.evil.example", False),
        ("localhost:80:80", False),
        ("[::1", False),
        ("", False),
    ],
)
def test_on_this_machine_without_a_key_only_its_own_names_are_served(host, fine):
    answer = call(app_of(allowed_hosts=LOOPBACK), headers={"Host": host})
    assert answer.status_code == (200 if fine else 421)
    if not fine:
        error = answer.json()["error"]
        assert error["code"] == "unknown_host"
        assert "--allowed-hosts" in error["message"]


@pytest.mark.parametrize("path", ["/", "/v1/models", "/metrics", "/v1/messages", "/health"])
def test_every_path_is_guarded(path):
    app = app_of(allowed_hosts=LOOPBACK)
    assert call(app, path=path, headers={"Host": "evil.example"}).status_code == 421


def test_names_can_be_added():
    hosts = read_hosts(["api.example.org", "*.Internal"], "127.0.0.1", has_key=False)
    app = app_of(allowed_hosts=hosts)
    for host, status in (
        ("api.example.org", 200),
        ("a.b.internal:80", 200),
        ("internal", 421),
        ("example.org", 421),
        ("localhost", 200),
    ):
        assert call(app, headers={"Host": host}).status_code == status


def test_a_server_with_a_key_or_for_other_machines_serves_all_names_unless_told():
    assert read_hosts(None, "127.0.0.1", has_key=True) is None
    assert read_hosts(None, "0.0.0.0", has_key=False) is None
    assert read_hosts(["*"], "localhost", has_key=False) is None
    assert read_hosts(["a"], "0.0.0.0", has_key=True) == ("localhost", "0.0.0.0", "a")
    assert call(app_of(), headers={"Host": "evil.example"}).status_code == 200


@pytest.mark.parametrize("name", ["http://a", "a:80", "a/b", "", "*a", "a.*", "ä.example", "a b"])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(ConfigError, match="--allowed-hosts"):
        read_hosts([name], "127.0.0.1", has_key=False)


@pytest.mark.parametrize(
    ("origin", "allowed", "status"),
    [
        (None, (), 200),
        ("http://localhost", (), 200),
        ("https://evil.example", (), 403),
        ("null", (), 403),
        ("https://page.example", ("https://page.example",), 200),
        ("https://page.example", ("*",), 200),
    ],
)
def test_a_page_of_another_site_cannot_act_by_a_request_without_a_body(origin, allowed, status):
    client = StandIn()
    app = app_of(client, allowed_hosts=LOOPBACK, allowed_origins=allowed)
    headers = {} if origin is None else {"Origin": origin}
    answer = call(app, "POST", "/reset_prefix_cache", headers=headers)
    assert answer.status_code == status
    assert client.resets == (status == 200)
    if status == 403:
        assert answer.json()["error"]["code"] == "origin_not_allowed"


def test_a_page_of_another_site_cannot_send_a_body_that_is_read():
    """Other types are refused by name, and for JSON a browser asks first, which is not allowed."""
    app, origin = app_of(allowed_hosts=LOOPBACK), {"Origin": "https://evil.example"}
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        headers = {**origin, "Content-Type": kind}
        answer = call(app, "POST", "/v1/completions", headers=headers, content="{}")
        assert answer.status_code == 415
    asked = {**origin, "Access-Control-Request-Method": "POST"}
    answer = call(app, "OPTIONS", "/v1/completions", headers=asked)
    assert "access-control-allow-origin" not in answer.headers


# The root path


@pytest.mark.parametrize("prefix", ["", "/kiln/v2"])
def test_a_proxy_may_take_the_root_path_off_or_leave_it(prefix):
    app = app_of(root_path="/kiln/v2", api_key="secret")
    key = {"Authorization": "Bearer secret"}
    for path in (*OPEN_PATHS, "/v1/models", "/openapi.json"):
        assert call(app, path=prefix + path, headers=key).status_code == 200, path
    assert call(app, path=prefix + "/health").status_code == 200
    assert call(app, path=prefix + "/v1/models").status_code == 401
    assert call(app, "POST", prefix + "/v1/completions", json={}, headers=key).status_code == 400
    assert call(app, path=prefix + "/kiln/v1", headers=key).status_code == 404


def test_the_root_itself_leads_to_the_page_below_it():
    answer = call(app_of(root_path="/kiln"), path="/kiln?theme=dark")
    assert (answer.status_code, answer.headers["location"]) == (307, "/kiln/?theme=dark")
    assert call(app_of(root_path="/kiln"), path="/kilns").status_code == 404


def test_clients_of_the_openapi_document_find_the_server_under_the_root():
    document = call(app_of(root_path="/kiln"), path="/kiln/openapi.json").json()
    assert document["servers"] == [{"url": "/kiln"}]
    assert "/v1/models" in document["paths"]
    assert "servers" not in call(app_of(), path="/openapi.json").json()


@pytest.mark.parametrize("root", ["kiln", "/a b", "/a//b", "/..", "/a/../b", "/a?b", "/ä", "//"])
def test_what_is_no_root_path_is_refused(root):
    if root == "//":
        assert read_root_path(root) == ""
        return
    with pytest.raises(ConfigError, match="--root-path"):
        read_root_path(root)


@pytest.mark.parametrize("root", ["/v1", "/health", "/v1/models/x", "/static", "/openapi.json"])
def test_a_root_path_that_is_the_beginning_of_an_own_path_is_refused(root):
    with pytest.raises(ConfigError, match=f"--root-path '{root}'.*own path"):
        app_of(root_path=read_root_path(root))
