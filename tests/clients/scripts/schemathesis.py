"""schemathesis: CASES URL PID; sends what fits the server's OpenAPI document, and what does not.

PID is the server's process, whose processor time is read before and after each case. Prints how
many cases there were and what went wrong, as JSON.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable

CASES, URL, PID = int(sys.argv[1]), sys.argv[2], sys.argv[3]
MOST_SECONDS = 1.0
MOST_FAILURES = 5
PER_ROUND = 100  # of one operation, one of the two ways
TICKS = os.sysconf("SC_CLK_TCK")


class Run:
    """Counts the cases, and keeps those that failed."""

    def __init__(self):
        self.cases = {}
        self.failures = []
        self._session = requests.Session()

    @property
    def is_over(self):
        return sum(self.cases.values()) >= CASES or len(self.failures) >= MOST_FAILURES

    def send(self, case, label):
        self.cases[label] = self.cases.get(label, 0) + 1
        begun = self._processor_seconds()
        response = case.call(session=self._session, timeout=60)
        seconds = self._processor_seconds() - begun
        if response.status_code >= 500 or seconds > MOST_SECONDS:
            what = f"{response.status_code} after {seconds:.1f} s: {response.text[:300]}"
            self.failures.append(f"{what}\n    {case.as_curl_command()[:2000]}")

    def _processor_seconds(self):
        """Return the time that the server has had of a processor; source: proc_pid_stat(5)."""
        fields = Path(f"/proc/{PID}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS


def main():
    run = Run()
    schema = schemathesis.openapi.from_url(f"{URL}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    for number in range(1000):
        for operation in operations:
            # Without a body there is little to vary.
            if number and not operation.body:
                continue
            for mode in schemathesis.GenerationMode:
                if not run.is_over:
                    one_round(run, operation, mode, number)
    assert run.cases, operations
    return {"cases": sum(run.cases.values()), "of": run.cases, "failures": run.failures}


def one_round(run, operation, mode, number):
    """Send some cases of an operation; the number of the round draws them."""

    @seed(number)
    @settings(
        max_examples=PER_ROUND,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(mode))
    def send(case):
        if not run.is_over:
            run.send(case, operation.label)

    with contextlib.suppress(Unsatisfiable):  # nothing can be wrong where nothing is sent
        send()


print(json.dumps(main()))
