"""A parameter's name, type and position are declared once: templates, specs and functions agree."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from kiln.jit_kernels.declare import parameters
from kiln.jit_kernels.declare.parameters import (
    declare,
    derived,
    in_outs,
    inputs,
    operator_only,
    optional,
    outputs,
    scratch,
    values,
)
from kiln.jit_kernels.registry import all_specs
from kiln.jit_kernels.torch_ops import call

ROOT = Path(__file__).resolve().parents[2]
SPECS = [pytest.param(spec, id=spec.name) for spec in all_specs().values()]
C_TYPES = {"int64_t": "int64", "int": "int32", "int32_t": "int32", "uint32_t": "int32"}
MAKERS = {"inputs", "outputs", "in_outs", "scratch", "optional", "values", "derived"} | {
    "operator_only"
}
MOST = 4  # more consecutive parameter names than this are a list of parameters


def signature(source: str, entry: str) -> list[tuple[str, str]]:
    """The (name, C type) of each parameter of an entry of a template."""
    text = re.sub(r"//[^\n]*", "", source)
    listed = re.search(rf'extern "C"[^;{{]*?\b{entry}\s*\(([^)]*)\)\s*\{{', text)
    assert listed, f'no extern "C" … {entry}(…) {{'
    found = []
    for part in listed[1].split(","):
        kind, name = re.fullmatch(r"\s*(.*?)\s*\b(\w+)\s*", part, re.S).groups()
        plain = kind.replace("const ", "").strip()
        found.append((name, "pointer" if "*" in kind else C_TYPES.get(plain, plain)))
    return found


@pytest.mark.parametrize("spec", SPECS)
def test_a_template_takes_what_its_spec_lists(spec):
    source = (ROOT / "kernel_sources" / spec.source).read_text()
    names = [one.name for one in spec.parameters.passed]
    assert signature(source, spec.entry) == list(zip(names, spec.c_types, strict=True))


@cache
def trees() -> dict[Path, ast.AST]:
    """Every file of the kernels in Python, parsed."""
    return {path: ast.parse(path.read_text()) for path in (ROOT / "jit_kernels").rglob("*.py")}


def listings(tree: ast.AST, names: set[str]) -> list[ast.AST]:
    """The places that list more than MOST of some names by position instead of by keyword.

    Kernels of Triton have signatures of their own, as have their launches, f[grid](…).
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not any(map(_is_jit, node.decorator_list)):
            row = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
            row += [one.arg for one in node.args.kwonlyargs]
        elif isinstance(node, ast.Call) and not isinstance(node.func, ast.Subscript):
            row = [_name(one) for one in node.args]
        elif isinstance(node, ast.Tuple | ast.List):
            row = [_name(one) for one in node.elts]
        elif isinstance(node, ast.ClassDef):
            row = [_name(one.target) for one in node.body if isinstance(one, ast.AnnAssign)]
        else:
            continue
        if _longest(row, names) > MOST:
            found.append(node)
    return found


def _is_jit(decorator: ast.expr) -> bool:
    if isinstance(decorator, ast.Call):
        decorator = decorator.func
    return isinstance(decorator, ast.Attribute) and decorator.attr == "jit"


def _name(node: ast.AST) -> str:
    """The last name of x, a.x, "x" and *x."""
    if isinstance(node, ast.Starred):
        return _name(node.value)
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return getattr(node, "attr", getattr(node, "id", ""))


def _longest(row: list[str], names: set[str]) -> int:
    longest = length = 0
    for name in row:
        length = length + 1 if name in names else 0
        longest = max(longest, length)
    return longest


def _is_declared(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _name(node.func) in MAKERS


@pytest.mark.quick(4)
@pytest.mark.parametrize("spec", SPECS)
def test_an_operators_parameters_are_listed_in_its_spec_and_public_function_alone(spec):
    """And in the template. All other code takes the arguments as one object, as in a.name."""
    elsewhere = []
    for path, tree in sorted(trees().items()):
        public = path.name == "functions.py" or path.parent.name == "ops"
        for node in listings(tree, set(spec.parameters.names)):
            function = isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
            if not _is_declared(node) and not (public and function):
                elsewhere.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not elsewhere, f"{spec.name}: take the arguments as `a`, or pass them by name"


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("def f(out, x, weight, eps, offset): pass", 1),
        ("def f(out, x, weight, eps, other): pass", 0),
        ("def f(out, *, x, weight, eps, offset): pass", 1),
        ("f(a.out, a.x, a.weight, eps, offset)", 1),
        ("f(out=out, x=x, weight=weight, eps=eps, offset=offset)", 0),
        ("y = 'out', 'x', 'weight', 'eps', 'offset'", 1),
        ("class C:\n out: int\n x: int\n weight: int\n eps: int\n offset: int", 1),
        ("@triton.jit\ndef f(out, x, weight, eps, offset): pass", 0),
        ("@triton.jit(debug=True)\ndef f(out, x, weight, eps, offset): pass", 0),
        ("f[grid](out, x, weight, eps, offset)", 0),
    ],
)
def test_what_counts_as_a_list_of_parameters(code, count):
    assert len(listings(ast.parse(code), {"out", "x", "weight", "eps", "offset"})) == count


EVERY_ROLE = declare(
    outputs("out"),
    in_outs("pool"),
    inputs("x"),
    optional("sinks"),
    scratch("partials"),
    derived("int64", "rows"),
    values("int32", "window"),
    values("bool", "causal"),
    operator_only("float", "scale"),
    derived("float", "scale_log2"),
)


def test_schema_c_types_and_names_follow_from_the_list():
    assert EVERY_ROLE.schema == (
        "(Tensor(a!) out, Tensor(b!) pool, Tensor x, Tensor? sinks, Tensor(c!) partials, "
        "int window, bool causal, float scale) -> ()"
    )
    assert EVERY_ROLE.c_types == (*["pointer"] * 5, "int64", "int32", "int32", "float")
    assert EVERY_ROLE.Arguments._fields == EVERY_ROLE.names
    assert EVERY_ROLE.outputs == ("out",)
    assert EVERY_ROLE.results == ("out", "pool")
    assert EVERY_ROLE.mutated == ("out", "pool", "partials")


def test_the_kernel_gets_its_values_in_the_order_of_the_list():
    out, pool, x, partials = (torch.empty(1) for _ in range(4))
    a = EVERY_ROLE.Arguments(out, pool, x, None, partials, 7, True, 0.5)
    got = EVERY_ROLE.kernel_values(a, {"scale_log2": 0.25, "rows": 3})
    assert got == (out, pool, x, None, partials, 3, 7, True, 0.25)


def test_a_kernel_of_one_parameter_gets_one():
    one = declare(in_outs("x"))
    assert one.kernel_values(one.Arguments("tensor"), {}) == ("tensor",)


@pytest.mark.parametrize(
    "group", [inputs("x"), derived("int64", "x"), inputs("not a name"), inputs("class")]
)
def test_a_name_is_listed_once_and_is_an_identifier(group):
    with pytest.raises(ValueError, match=r"x|name|class"):
        declare(outputs("out"), inputs("x"), group)


def test_a_call_takes_every_argument_by_name_and_no_other():
    spec = all_specs()["silu_and_mul"]
    out, x = torch.empty(2, 3), torch.randn(2, 6)
    call(spec, x=x, out=out)
    assert torch.equal(out, torch.nn.functional.silu(x[:, :3]) * x[:, 3:])
    with pytest.raises(TypeError, match=r"missing: \['out'\]"):
        call(spec, x=x)
    with pytest.raises(TypeError, match=r"missing: \['out'\]; unknown: \['y'\]"):
        call(spec, x=x, y=out)


def test_a_model_may_need_several_values_of_one_parameter():
    spec = all_specs()["rms_norm"]

    def chosen(needs):
        return [variant["scalar_t"] for variant in spec.variants(needs)]

    assert chosen({"scalar_t": "float"}) == ["float"]
    assert chosen({"scalar_t": ("kiln::bf16", "float")}) == ["float", "kiln::bf16"]
    assert chosen({"scalar_t": frozenset({"double"})}) == []


def test_every_maker_is_known_to_this_test():
    makers = {
        name
        for name, function in vars(parameters).items()
        if callable(function) and getattr(function, "__annotations__", {}).get("return")
        == "list[Parameter]" and not name.startswith("_")
    }  # fmt: skip
    assert makers == MAKERS
