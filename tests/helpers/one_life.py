"""An engine for ``create_app`` that is never restarted: one client, real or a stand-in."""


class OneLife:
    """What the server sees of a Supervisor."""

    is_restarting = False
    num_restarts = 0

    def __init__(self, client):
        self.client = client

    @property
    def is_alive(self):
        return self.is_restarting or self.client.is_alive

    def stats(self):
        return {**self.client.stats(), "engine_restarts": self.num_restarts}
