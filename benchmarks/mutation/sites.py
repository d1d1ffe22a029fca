"""Every single change of a source file that may be a bug: the operators, and the sites where they apply."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import attrs

PACKAGES: Final = ("protocol", "routing", "methods", "serving")
"""Packages of pdflow whose sites are considered."""
LEFT_OUT: Final = ("protocol/invariants/", "protocol/diagrams.py", "methods/params/", "methods/show.py")
"""What judges a run, draws a page of the documents, or translates other systems' settings: no run depends on it."""
UNTOUCHED: Final = ("fork", "fingerprint", "armed", "__repr__", "__str__")
"""Functions that only the checker or a log calls."""
REARMS: Final = ("schedule", "arm", "rearm", "push", "wake", "due")
"""Words in the names of functions that set a timer."""


@attrs.frozen
class Bug:
    """One change of one file."""

    file: str
    """Relative to the folder pdflow."""
    start: int
    """In bytes of the file, as `end`."""
    end: int
    text: str
    operator: str
    function: str
    lines: tuple[int, int]
    """The first and last line of what is changed."""

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


COMPARED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COUNTED: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


def sites(path: Path, file: str) -> Iterator[Bug]:
    """Yield every change of one file that is considered. Positions of nodes are in bytes of UTF-8, as Bug's."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def bug(first: ast.expr | ast.stmt, last: ast.expr | ast.stmt, operator: str, text: str, function: str) -> Bug:
        assert last.end_lineno is not None
        assert last.end_col_offset is not None
        start = starts[first.lineno - 1] + first.col_offset
        end = starts[last.end_lineno - 1] + last.end_col_offset
        return Bug(file, start, end, text, operator, function, (first.lineno, last.end_lineno))

    for name, body in functions(ast.parse(source)):
        for node in visited(body):
            if isinstance(node, ast.expr | ast.stmt):
                for operator, text in changes(node):
                    yield bug(node, node, operator, text, name)
            for test in conditions(node):
                yield bug(test, test, "condition negated", f"(not ({ast.unparse(test)}))", name)
            for first, second in neighbours(node):
                indent = " " * first.col_offset
                later = ast.unparse(second).replace("\n", "\n" + indent)
                earlier = ast.unparse(first).replace("\n", "\n" + indent)
                yield bug(first, second, "order of statements", f"{later}\n{indent}{earlier}", name)


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the outermost functions and methods, with their names."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{each.name}", each) for each in node.body if isinstance(each, ast.FunctionDef))


def visited(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that say what is done: no annotations, decorators, assertions or notes, nor what only the checker
    calls."""
    if isinstance(node, ast.FunctionDef) and node.name in UNTOUCHED:
        return
    if isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr):
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Note", "cast"):
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "defaults"):
            continue
        for child in value if isinstance(value, list) else (value,):
            if isinstance(child, ast.AST):
                yield from visited(child)


def conditions(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what this node decides by."""
    if isinstance(node, ast.If | ast.IfExp):
        yield node.test


def neighbours(node: ast.AST) -> Iterator[tuple[ast.stmt, ast.stmt]]:
    """Yield pairs of statements in a row, each of which changes something."""
    for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
        if isinstance(body, list):
            for first, second in pairwise(body):
                if _acts(first) and _acts(second):
                    yield first, second


def _acts(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign | ast.AugAssign | ast.Delete) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    )


def changes(node: ast.expr | ast.stmt) -> Iterator[tuple[str, str]]:
    """Yield (operator, the node's new text) for every way in which this node alone may be wrong."""
    match node:
        case ast.Compare(left, [op], [right]):
            other = ast.Compare(left, [COMPARED[type(op)]()], [right])
            yield "comparison", f"({ast.unparse(other)})"
        case ast.BoolOp(op, values):
            swapped: ast.boolop = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "and/or", f"({ast.unparse(ast.BoolOp(swapped, values))})"
        case ast.UnaryOp(ast.Not(), operand):
            yield "not dropped", f"({ast.unparse(operand)})"
        case ast.BinOp(left, op, right) if type(op) in COUNTED:
            yield "operator", f"({ast.unparse(ast.BinOp(left, COUNTED[type(op)](), right))})"
        case ast.Constant(bool() as value):
            yield "constant", str(not value)
        case ast.Constant(int() as number):
            yield "off by one", str(number + 1)
        case ast.Call(function, [first, second, *rest], keywords):
            yield "arguments swapped", ast.unparse(ast.Call(function, [second, first, *rest], keywords))
        case ast.Attribute(_, "rank" | "p_rank" | "d_rank" as name, ast.Load()):
            yield "wrong rank", "(0)"
        case ast.Name("rank" | "p_rank" | "d_rank", ast.Load()):
            yield "wrong rank", "(0)"
        case ast.Attribute(_, "incarnation", ast.Load()):
            yield "wrong incarnation", "(0)"
        case ast.Expr(ast.Call(function)):
            name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
            sets_timer = not set(REARMS).isdisjoint(name.lower().split("_"))
            yield ("forgotten re-arm" if sets_timer else "statement dropped"), "pass"
        case ast.Delete() | ast.Continue() | ast.Break() | ast.AugAssign():
            yield "statement dropped", "pass"
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield "statement dropped", "pass"
