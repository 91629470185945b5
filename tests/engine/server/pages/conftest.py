"""A browser for the tests of the pages."""

from __future__ import annotations

import browser as chromium
import pytest

WIDTHS = (375, 1024, 1440)


@pytest.fixture(scope="session")
def browser():
    """One browser for all tests; each tab has storage of its own."""
    if chromium.find() is None:
        pytest.skip("needs Chromium")
    with chromium.Browser() as opened:
        yield opened


@pytest.fixture
def fits(request):
    """Assert that a page fits at every width: ``fits(tab, "name of its state")``.

    With ``--screenshots FOLDER`` it also saves a picture at each width, in light and dark.
    """
    folder = request.config.option.screenshots

    def check(tab, state):
        for theme in ("light", "dark") if folder else ("light",):
            for width in WIDTHS:
                tab.look(width, theme)
                assert tab.overflowing() == [], f"{state} at {width} px"
                if folder:
                    tab.screenshot(folder / f"{state}-{width}-{theme}.png")

    return check
