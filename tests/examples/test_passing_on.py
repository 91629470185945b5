"""What the front of examples/ray_serve does to headers, metrics and flags, which needs no Ray."""

from __future__ import annotations

import pytest
import serve
from kiln_call import passed_on
from kiln_metrics import join_metrics


def test_a_proxy_passes_on_all_headers_but_those_of_its_connection():
    headers = ((b"Connection", b"close"), (b"X-A", b"1"), (b"X-A", b"2"), (b"Host", b"h"))
    assert passed_on(headers, b"host") == ((b"X-A", b"1"), (b"X-A", b"2"))


def test_metrics_of_replicas_are_joined_by_metric_with_a_label():
    page = (
        '# HELP n Number.\n# TYPE n gauge\nn 1.0\n# HELP h x\n# TYPE h histogram\nh_sum{a="{"} 2\n'
    )
    assert join_metrics({"r": page, "s": page.replace("1.0", "5.0")}) == (
        '# HELP n Number.\n# TYPE n gauge\nn{replica="r"} 1.0\nn{replica="s"} 5.0\n'
        '# HELP h x\n# TYPE h histogram\nh_sum{replica="r",a="{"} 2\nh_sum{replica="s",a="{"} 2\n'
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replicas", "0"], "--replicas 0"),
        (["--max-replicas", "1"], "--max-replicas 1"),
        (["--ssl-certfile", "file"], "--ssl-certfile file"),
        (["--port", "0"], "--port 0"),
        (["--spill-above", "-1"], "--spill-above -1"),
        (["--lora-root", "folder"], "--lora-root folder"),
        (["--lora-modules", "name"], "want NAME=PATH"),
        (["--host", "0.0.0.0"], "--allow-unauthenticated"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_ray_starts(capsys, flags, message):
    assert serve.main(flags) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--no-such-flag"], ["--lora-mod", "a=b"], ["a", "b"]])
def test_flags_that_kiln_does_not_know_are_refused(capsys, flags):
    with pytest.raises(SystemExit) as ended:
        serve.main(flags)
    assert ended.value.code == 2
    assert "kiln serve: error" in capsys.readouterr().err


def test_flags_are_divided_between_the_command_and_the_replicas():
    own, passed, kiln = serve.parse(["model", "--port", "9", "--seed", "3", "--cpus", "0.5"])
    assert (own.port, own.cpus) == (9, 0.5)
    assert passed == ["model", "--seed", "3"]
    assert (kiln.model, kiln.seed) == ("model", 3)
