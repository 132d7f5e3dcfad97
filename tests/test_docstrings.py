"""Everything public says what it is: modules, classes, functions, and methods, which may inherit their words."""

import ast
import importlib
import inspect
import pkgutil

import pytest

import counterfactuals
import env
import interp

MODULES = [
    module.name
    for package in (env, counterfactuals, interp)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]


def is_public(name):
    return not name.startswith("_")


@pytest.mark.parametrize("name", MODULES)
def test_everything_public_has_a_docstring(name):
    module = importlib.import_module(name)
    missing = [] if module.__doc__ else [name]
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or not is_public(node.name):
            continue
        if ast.get_docstring(node) is None:
            missing.append(f"{name}.{node.name}")
        if isinstance(node, ast.ClassDef):
            found = getattr(module, node.name)
            missing += [
                f"{name}.{node.name}.{method}"
                for method, value in vars(found).items()
                if is_public(method) and inspect.isroutine(inspect.unwrap(getattr(value, "fget", None) or value))
                and method in {inner.name for inner in node.body if hasattr(inner, "name")}
                and not inspect.getdoc(getattr(found, method))
            ]  # fmt: skip
    assert not missing
