"""schemathesis finds nothing in the OpenAPI document for which the server is at fault."""

import agent_engine
import agent_model
import pytest

from kiln.engine.cli.local_server import local_server

NUM_CASES = 10_000
MOST_TOKENS = 40  # in one output, so that no case is slow for its length
pytestmark = [pytest.mark.deep, pytest.mark.timeout(3000)]


def test_no_case_is_a_5xx_or_takes_long(run_client, tmp_path):
    agent_model.write_folder(tmp_path / "agent")
    program = agent_engine.kiln_command(MOST_TOKENS)
    with local_server([str(tmp_path / "agent")], 120, program) as (url, server):
        said = run_client("schemathesis", str(NUM_CASES), url, str(server.pid))
        assert server.poll() is None
    assert not said["failures"], "\n".join(said["failures"])
    assert said["cases"] >= NUM_CASES
    assert len(said["of"]) > 10  # operations
