"""The fenced blocks of README.md and docs/, with the comments that tell the tests about them.

A comment stands directly before the fence and is not shown:

    <!-- output -->          what the block before it prints; … stands for anything
    <!-- not run: REASON --> cannot run in a test: it is checked without being run
    <!-- deep -->            runs in `make test-deep` alone, because it takes long
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(
    r"(?:^<!-- (?P<note>[^>]*?) -->\n)?"
    r"^(?P<fence>```+)(?P<language>\w*)\n(?P<text>.*?)^(?P=fence)$",
    re.DOTALL | re.MULTILINE,
)
PORT = "127.0.0.1:8000"  # of the server that pages speak of


@dataclass(frozen=True)
class Block:
    """A fenced block. ``server``: the command that serves what it talks to, of an earlier block."""

    page: str
    line: int
    language: str
    text: str
    note: str
    server: str = ""
    output: str | None = None  # what the page says that it prints
    output_language: str = ""

    @property
    def name(self) -> str:
        """Where it is, such as serving.md:12."""
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether a test can run it."""
        return self.language in ("bash", "python") and not self.note.startswith("not run")

    @property
    def starts_server(self) -> bool:
        """Whether it is the command of a server, which later blocks of the page talk to."""
        return self.language == "bash" and bool(_SERVES.match(commands(self.text)[0]))

    @property
    def is_client(self) -> bool:
        """Whether it talks to a server."""
        return PORT in self.text and not self.starts_server


_SERVES = re.compile(r"(?:[A-Z_]+=\S+ )*(?:kiln serve|make serve)\b")


def commands(text: str) -> list[str]:
    """Return the commands of a shell script, each in one line, without comments."""
    joined = text.replace("\\\n", " ")
    found: list[str] = []
    for line in joined.splitlines():
        if found and found[-1].count("'") % 2:  # inside of a quoted text
            found[-1] += "\n" + line
        elif line.strip() and not line.lstrip().startswith("#"):
            found.append(line)
    return found or [""]


def words(command: str) -> list[str]:
    """Split a command into words, without comments."""
    return shlex.split(command, comments=True)


def kiln_commands(block: Block) -> list[list[str]]:
    """Return the arguments of each `kiln` in a block of shell commands."""
    found = []
    for command in commands(block.text):
        lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        parts: list[list[str]] = [[]]
        for word in lexer:
            if set(word) <= set("();<>|&"):
                parts.append([])
            else:
                parts[-1].append(word)
        for part in parts:
            starts = _start(part)
            if starts < len(part) and part[starts].rpartition("/")[2] == "kiln":
                found.append(part[starts + 1 :])
    return found


def _start(part: list[str]) -> int:
    """Return the place of the program: behind variables, and behind torchrun's flags."""
    if "--no-python" in part:
        return part.index("--no-python") + 1
    return next((n for n, word in enumerate(part) if not re.match("[A-Z_]+=", word)), len(part))


def blocks(path: Path) -> list[Block]:
    """Return the blocks of a page, in their order."""
    return list(_joined(_found(path)))


def all_blocks() -> list[Block]:
    """Return the blocks of all pages."""
    return [block for path in PAGES for block in blocks(path)]


def _found(path: Path) -> Iterator[Block]:
    text, server = path.read_text(encoding="utf-8"), ""
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("fence")) + 1
        note = match["note"] or ""
        block = Block(path.name, line, match["language"], match["text"], note, server)
        if block.starts_server and block.runs:
            server = commands(block.text)[0]
        yield block


def _joined(found: Iterator[Block]) -> Iterator[Block]:
    """Put each output to the block before it."""
    last = None
    for block in found:
        if block.note == "output":
            assert last is not None, f"{block.name}: the output of nothing"
            yield replace(last, output=block.text, output_language=block.language)
            last = None
            continue
        if last is not None:
            yield last
        last = block
    if last is not None:
        yield last
