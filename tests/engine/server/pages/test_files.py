"""The files of the pages."""

import hashlib
import re
from pathlib import Path

import kiln.engine.server.pages as package
from kiln.engine.server.pages import routes

FOLDER = Path(package.__file__).parent
VENDOR = FOLDER / "static" / "vendor"
_IMPORT = re.compile(r"""(?:import|from)\s*\(?\s*["'`](\./[^"'`]+)["'`]""")
_OWN_LINES, _LIMIT = 350, 300_000


def _reached(page):
    """Every file that a page may load."""
    found, left = set(), [page]
    while left:
        path = left.pop()
        if path in found:
            continue
        found.add(path)
        text = path.read_text(encoding="utf-8")
        names = re.findall(r'(?:src|href)="(static/[^"]+)"', text) if path == page else []
        names += [] if VENDOR in path.parents else _IMPORT.findall(text)
        for name in names:
            some = [path.parent / name] if "$" not in name else (VENDOR / "highlight").glob("*.js")
            left.extend(one.resolve() for one in some)
    return found


def test_the_chat_with_all_that_it_loads_is_at_most_300_kb():
    files = _reached(FOLDER.resolve() / "chat.html")
    assert len([path for path in files if VENDOR.resolve() in path.parents]) > 15
    assert sum(path.stat().st_size for path in files) <= _LIMIT


def test_libraries_are_the_published_files_and_have_their_licences():
    notice = (VENDOR / "NOTICE.txt").read_text(encoding="utf-8")
    named = dict(reversed(line) for line in re.findall(r"^([0-9a-f]{64})  (\S+)$", notice, re.M))
    there = {path.relative_to(VENDOR).as_posix(): path for path in VENDOR.rglob("*.js")}
    assert named.keys() == there.keys()
    for name, path in there.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == named[name], name
    for words in ("Vitaly Puzrin", "Ivan Sagalaev", "Permission is hereby granted"):
        assert words in notice


def test_own_scripts_have_one_idea_each_and_no_text_becomes_html():
    files = [*FOLDER.glob("*.html"), *(FOLDER / "static").rglob("*.*")]
    for path in (one for one in files if VENDOR not in one.parents):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= _OWN_LINES, path.name
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(", text), (
            path.name
        )
        assert not re.search(r"<script>|<style>|\sstyle=", text), (
            f"{path.name}: refused by the policy"
        )


def test_every_file_of_the_pages_is_served():
    served = set(routes.FILES.values())
    files = {path for path in FOLDER.rglob("*.*") if path.suffix in (".html", ".js", ".css")}
    assert files == served


def test_a_file_that_a_browser_has_is_not_sent_again(server):
    first = server.get("/static/chat.js")
    again = server.get("/static/chat.js", headers={"If-None-Match": first.headers["ETag"]})
    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")
    assert server.get("/", headers={"If-None-Match": first.headers["ETag"]}).status_code == 200
