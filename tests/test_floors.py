"""The structure that design promises: imports go down, files are short, import is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ["cache", "jit_kernels", "engine"]  # ground first
TOP = ("engine.server", "engine.cli")
THIRD_PARTY = {"cache": set(), "jit_kernels": {"torch", "cuda", "cupy", "triton", "numpy"}}
# The GPU machine has none of these: only the worker, the client and the top floor may ask.
TOP_ONLY = {"fastapi", "uvicorn", "starlette", "pydantic", "zmq", "msgspec", "httpx", "rich"}
MAY_TALK = ("engine.process", *TOP)
# Inside floor 2, low to high; a module imports only from its own level and below.
LEVELS = [
    ("errors", "config"),
    ("config_forms",),
    ("requests",),
    ("grammar",),
    ("kv", "distributed"),
    ("layers", "attention"),
    ("models",),
    ("lora",),
    ("graphs", "compile"),
    ("runner", "text"),
    ("scheduler",),
    ("engine_stats",),
    ("core",),
    ("llm", "process"),
    ("bench",),
]
MAX_LINES, MAX_FUNCTION, MAX_MEDIAN = 350, 60, 100
MAX_ARROWS = 200  # between rooms


@cache
def modules() -> dict[str, ast.Module]:
    found = {}
    for floor in FLOORS:
        for path in sorted((ROOT / floor).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text(), filename=str(path))
    return found


@cache
def nodes_of(tree: ast.Module) -> list[ast.AST]:
    return list(ast.walk(tree))


def imports_of(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every imported name, lazy ones and those under TYPE_CHECKING included."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the full name, kiln.<floor>…"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def own_module(name: str) -> str | None:
    """The module of ours that an imported name belongs to."""
    if not name.startswith("kiln."):
        return None
    name = name.removeprefix("kiln.")
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name or None


def height(module: str) -> int:
    return len(FLOORS) if module.startswith(TOP) else FLOORS.index(module.split(".")[0])


def level(module: str) -> int | None:
    parts = module.split(".")
    if parts[0] != "engine" or len(parts) < 2:
        return None
    return next((i for i, names in enumerate(LEVELS, 1) if parts[1] in names), None)


def test_every_module_of_the_engine_has_a_level():
    inside = {m.split(".")[1] for m in modules() if m.startswith("engine.")}
    assert inside - {"server", "cli"} == {name for names in LEVELS for name in names}


def test_imports_go_down_only():
    bad = []
    for module, tree in modules().items():
        for name, line in imports_of(tree):
            target, head = own_module(name), name.split(".")[0]
            if head in [*FLOORS, "kernel_sources"]:
                bad.append(f"{module}:{line} imports {name}; say kiln.{name}")
            elif target and height(target) > height(module):
                bad.append(f"{module}:{line} imports {target}, a floor above")
            elif target and (level(target) or 0) > (level(module) or 0) and level(module):
                bad.append(f"{module}:{line} imports {target}, a level above")
    assert not bad, "\n".join(bad)


def test_third_party_packages_stay_on_their_floor():
    bad = []
    for module, tree in modules().items():
        allowed = THIRD_PARTY.get(module.split(".")[0])
        for name, line in imports_of(tree):
            head = name.split(".")[0]
            foreign = head != "kiln" and head not in sys.stdlib_module_names
            if foreign and allowed is not None and head not in allowed:
                bad.append(f"{module}:{line} imports {head}, not allowed on its floor")
            if head in TOP_ONLY and not module.startswith(MAY_TALK):
                bad.append(f"{module}:{line} imports {head}, which the GPU machine lacks")
    assert not bad, "\n".join(bad)


def import_graph() -> dict[str, set[str]]:
    return {
        module: {t for name, _ in imports_of(tree) if (t := own_module(name)) and t != module}
        for module, tree in modules().items()
    }


def assert_no_cycle(graph: dict[str, set[str]]) -> None:
    done: set[str] = set()

    def visit(node: str, trail: list[str]) -> None:
        assert node not in trail, " -> ".join([*trail[trail.index(node) :], node])
        if node not in done:
            for target in sorted(graph[node]):
                visit(target, [*trail, node])
            done.add(node)

    for node in graph:
        visit(node, [])


def test_there_are_no_import_cycles():
    assert_no_cycle(import_graph())


def test_rooms_import_each_other_in_no_circle_and_in_few_ways():
    """A room is a folder of a floor with all that is in it, or a file straight below a floor."""
    rooms: dict[str, set[str]] = {}
    for module, targets in import_graph().items():
        here, *others = (".".join(one.split(".")[:2]) for one in (module, *targets))
        rooms.setdefault(here, set()).update(other for other in others if other != here)
    assert_no_cycle(rooms)
    assert sum(map(len, rooms.values())) <= MAX_ARROWS


def test_only_one_file_reads_the_environment():
    readers = {
        module
        for module, tree in modules().items()
        for node in nodes_of(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
    }
    assert readers <= {"cache.env"}


def test_nothing_is_pickled_and_nothing_is_swallowed():
    bad = []
    for module, tree in modules().items():
        for node in nodes_of(tree):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                bad.append(f"{module}:{node.lineno} bare except")
            if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name):
                empty = len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
                if empty and node.type.id in ("Exception", "BaseException"):
                    bad.append(f"{module}:{node.lineno} swallows every exception")
        for name, line in imports_of(tree):
            if name.split(".")[0] in ("pickle", "dill", "cloudpickle", "marshal", "shelve"):
                bad.append(f"{module}:{line} imports {name}")
    assert not bad, "\n".join(bad)


def test_files_and_functions_are_readable_at_a_sitting():
    lengths, bad = [], []
    for module, tree in modules().items():
        path = ROOT / Path(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        count = len(path.read_text().splitlines())
        lengths.append(count)
        if count > MAX_LINES:
            bad.append(f"{module}: {count} lines")
        for node in nodes_of(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or 0) - node.lineno + 1
                if size > MAX_FUNCTION:
                    bad.append(f"{module}:{node.lineno} {node.name}: {size} lines")
    assert not bad, "\n".join(bad)
    assert sorted(lengths)[len(lengths) // 2] <= MAX_MEDIAN


def test_public_names_have_docstrings():
    bad = [
        f"{module}:{node.lineno} {node.name}"
        for module, tree in modules().items()
        for node in nodes_of(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and ast.get_docstring(node) is None
        and not _is_inner(tree, node)
    ]
    assert not bad, "\n".join(bad)


def _is_inner(tree: ast.Module, node: ast.AST) -> bool:
    """Whether a function stands inside another function: nobody outside can call it."""
    return any(
        node in ast.walk(outer) and node is not outer
        for outer in nodes_of(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
    )


IMPORT = """
import sys, pathlib, typing
calls, before = 0, set(sys.modules)

def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")

sys.setprofile(count)
import kiln
sys.setprofile(None)
print(calls, *set(sys.modules) - before - {"__future__"})
"""


def test_import_kiln_imports_nothing_else_and_does_little():
    command = [sys.executable, "-c", IMPORT]
    out = subprocess.check_output(command, env=_env(), text=True, timeout=60)
    calls, *modules = out.split()
    assert modules == ["kiln"]
    assert int(calls) < 2000  # the standard library's argparse takes six times as many


def _env() -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT / "tools" / "import_root"), "PATH": "/usr/bin:/bin"}
