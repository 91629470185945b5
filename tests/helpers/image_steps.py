"""The steps of a Dockerfile, run by hand: each stage is a folder, and no container is needed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

_ABSOLUTE = re.compile(r"(?<![\w.])/(?=(?:opt|src)\b)")  # folders of an image
_BASH = shutil.which("bash") or "bash"  # also where a step has another PATH
_SECONDS = 1500.0


@dataclass
class Stage:
    """A stage: its name, its folder, its variables, and the current folder in it."""

    name: str
    image: str
    root: Path
    work: Path
    variables: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def inside(self, text: str) -> str:
        """Return a text with the image's folders inside of the stage's own."""
        return _ABSOLUTE.sub(f"{self.root}/", text)


def instructions(text: str) -> list[tuple[str, str]]:
    """Return (instruction, arguments) of each line of a Dockerfile."""
    joined = text.replace("\\\n", " ")
    lines = [line.strip() for line in joined.splitlines()]
    return [
        (name, rest.strip())
        for name, _, rest in (line.partition(" ") for line in lines if line and line[0] != "#")
    ]


def build(text: str, context: Path, folder: Path, before_pip: str) -> list[Stage]:
    """Run every step; ``before_pip`` runs in each environment before packages are installed.

    Steps of an image's users and system packages are skipped: they would change this machine.
    """
    stages: list[Stage] = []
    for name, rest in instructions(text):
        if name == "FROM":
            image, _, stage = re.fullmatch(r"(\S+)( AS (\w+))?", rest).groups()  # type: ignore[union-attr]
            root = folder / (stage or "last")
            root.mkdir()
            stages.append(Stage(stage or "last", image, root, root))
            continue
        _step(stages, name, rest, context, before_pip)
    return stages


def _step(stages: list[Stage], name: str, rest: str, context: Path, before_pip: str) -> None:
    stage = stages[-1]
    if name == "WORKDIR":
        stage.work = Path(stage.inside(rest))
        stage.work.mkdir(parents=True, exist_ok=True)
    elif name == "COPY":
        _copy(stages, rest.split(), context)
    elif name == "ENV":
        variable, _, value = rest.partition("=")
        before = {"PATH": os.environ["PATH"], **stage.variables}
        value = re.sub(r"\$(\w+)", lambda found: before.get(found[1], ""), value)
        stage.variables[variable] = stage.inside(value)
    elif name == "RUN":
        if re.match(r"(useradd|apt-get)\b", rest):
            stage.skipped.append(rest)
            return
        if " install " in rest and "/pip " in rest:
            shell(stage, f"{rest.split(' install ')[0]} install {before_pip}")
        shell(stage, rest)
    elif name in ("ENTRYPOINT", "CMD"):
        words = json.loads(rest)
        setattr(stage, "entrypoint" if name == "ENTRYPOINT" else "command", words)
    else:
        assert name in ("USER", "EXPOSE"), f"{name} is not known here"


def _copy(stages: list[Stage], words: list[str], context: Path) -> None:
    stage = stages[-1]
    if words[0].startswith("--from="):
        source = next(one for one in stages if one.name == words[0].partition("=")[2])
        target = Path(stage.inside(words[2]))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source.inside(words[1]), target)
        return
    assert words == [".", "."]
    subprocess.run(["git", "clone", "--quiet", str(context), str(stage.work)], check=True)


def shell(stage: Stage, command: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a step of a stage; a failure shows its last words."""
    done = run_in(stage, command, **more)
    assert done.returncode == 0, f"{command}: {(done.stdout + done.stderr)[-3000:]}"
    return done


def run_in(stage: Stage, command: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a stage, with the variables of its image alone."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    kept["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    return subprocess.run(
        [_BASH, "-euc", stage.inside(command)],
        cwd=stage.work,
        env={**kept, "OMP_NUM_THREADS": "1", **stage.variables, **more},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
