"""Mutants of one module: each has a single changed expression or statement.

Left out are annotations, decorators, docstrings, texts of errors and values of named constants of a module: the tests refer to
these by name, because a value is measured and not derived.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One changed module. ``key`` names it independently of line numbers."""

    module: str
    key: str
    line: int
    tree: ast.Module


def mutants(module: str, source: str) -> list[Mutant]:
    """Return all mutants of a module, in the order of its text."""
    tree = ast.parse(source)
    found: list[Mutant] = []
    seen: Counter[str] = Counter()
    for place in list(_places(tree)):
        for change in _changes(place.node):
            before = _text(place.node)
            after_node = change(copy.deepcopy(place.node))
            name = f"{module}:{place.function}: {before} → {_text(after_node)}"
            seen[name] += 1
            key = name if seen[name] == 1 else f"{name} (no. {seen[name]})"
            found.append(Mutant(module, key, place.node.lineno, _replaced(tree, place.node, after_node)))
    return found


@dataclass(frozen=True)
class _Place:
    node: ast.expr | ast.stmt
    function: str


def _places(tree: ast.Module) -> Iterator[_Place]:
    left: list[tuple[ast.AST, str, bool]] = [(node, "", True) for node in reversed(tree.body)]
    while left:
        node, function, is_top = left.pop()
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom) or _is_docstring(node):
            continue
        if is_top and isinstance(node, ast.Assign | ast.AnnAssign) and _is_plain(node.value):
            continue  # a named constant
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
        if isinstance(node, ast.expr | ast.stmt):
            yield _Place(node, function)
        is_class = isinstance(node, ast.ClassDef)
        left += [(child, function, is_class) for child in reversed(list(_children(node)))]


def _children(node: ast.AST) -> Iterator[ast.AST]:
    hidden = {"annotation", "returns", "decorator_list", "bases", "type_params"}
    for name, value in ast.iter_fields(node):
        if name not in hidden:
            yield from (child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST))


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_plain(value: ast.expr | None) -> bool:
    """Whether a value is made of numbers and texts alone."""
    if value is None:
        return True
    allowed = ast.Constant | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop | ast.Tuple | ast.Dict | ast.expr_context
    is_pattern = isinstance(value, ast.Call)
    return is_pattern or all(isinstance(child, allowed) for child in ast.walk(value))


def _changes(node: ast.expr | ast.stmt) -> Iterator[Callable[[ast.AST], ast.AST]]:
    match node:
        case ast.Compare(ops=[only]) if type(only) in COMPARISONS:
            yield _setting("ops", [COMPARISONS[type(only)]()])
        case ast.Compare(ops=ops):
            for at, operation in enumerate(ops):
                if type(operation) in COMPARISONS:
                    yield _setting("ops", [*ops[:at], COMPARISONS[type(operation)](), *ops[at + 1 :]])
        case ast.BoolOp(op=operation):
            yield _setting("op", ast.Or() if isinstance(operation, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield lambda changed: changed.operand  # type: ignore[attr-defined]
        case ast.BinOp(op=operation) | ast.AugAssign(op=operation) if type(operation) in ARITHMETIC:
            yield _setting("op", ARITHMETIC[type(operation)]())
        case ast.Constant(value=bool() as value):
            yield _setting("value", not value)
        case ast.Constant(value=int() | float() as value):
            yield _setting("value", value + 1)
        case ast.Constant(value=str() as value):
            yield _setting("value", f"{value}~")
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            yield lambda changed: _renamed(changed)
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) if not isinstance(test, ast.Compare | ast.UnaryOp):
            yield _setting("test", ast.UnaryOp(ast.Not(), test))
        case ast.Expr(value=ast.Call()):
            yield lambda changed: ast.copy_location(ast.Pass(), changed)  # type: ignore[arg-type]
        case ast.Continue():
            yield lambda changed: ast.copy_location(ast.Break(), changed)  # type: ignore[arg-type]
        case ast.Break():
            yield lambda changed: ast.copy_location(ast.Continue(), changed)  # type: ignore[arg-type]


def _setting(name: str, value: object) -> Callable[[ast.AST], ast.AST]:
    def set_value(changed: ast.AST) -> ast.AST:
        setattr(changed, name, value)
        return changed

    return set_value


def _renamed(call: ast.AST) -> ast.AST:
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    call.func = ast.Name(CALLS[call.func.id], ast.Load())
    return call


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.If | ast.While):
        node = node.test
    return " ".join(ast.unparse(ast.fix_missing_locations(node)).split())[:110]


def _replaced(tree: ast.Module, old: ast.AST, new: ast.AST) -> ast.Module:
    """Return a copy of the tree with one node exchanged."""
    marked = [node is old for node in ast.walk(tree)]
    copied = copy.deepcopy(tree)
    target = next(node for node, is_old in zip(ast.walk(copied), marked, strict=True) if is_old)

    class Exchange(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return ast.copy_location(new, target) if node is target else self.generic_visit(node)  # type: ignore[type-var]

    return ast.fix_missing_locations(Exchange().visit(copied))
