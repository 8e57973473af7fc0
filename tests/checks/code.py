"""Checks of Python code: size, nesting, docstrings, fields, sleeping tests, clocks in cores."""

import ast
import re
from collections.abc import Iterator
from itertools import zip_longest

from tests.checks.repository import File

FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 600
REASONED_LINES_MAX = 900
REASON = re.compile(r"^# One module: .{20,}", re.MULTILINE)
NESTING_MAX = 4
FIELDS_UNEXPLAINED_MAX = 10

Function = ast.FunctionDef | ast.AsyncFunctionDef
NESTING = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
CLOCK_METHODS = {"now", "today", "utcnow"}
CLOCK_OWNERS = {"date", "datetime"}
IMPURE_MODULES = {"random", "time"}


def oversized(file: File) -> list[str]:
    """Functions and modules that are too long. A function counts from `def` to its last line.

    A module may have REASONED_LINES_MAX lines if a comment says why it is one: `# One module: ...`.
    """
    problems = [
        f"{file.path}:{function.lineno}: {function.name} has {length} lines"
        for function in _functions(file)
        if (length := _length(function)) > FUNCTION_LINES_MAX
    ]
    lines = file.text.count("\n")
    if lines > (REASONED_LINES_MAX if REASON.search(file.text) else MODULE_LINES_MAX):
        problems.append(f"{file.path}: the module has {lines} lines")
    return problems


def deeply_nested(file: File) -> list[str]:
    """Functions whose blocks nest deeper than NESTING_MAX; `elif` adds no level."""
    return [
        f"{file.path}:{function.lineno}: {function.name} nests {depth} blocks"
        for function in _functions(file)
        if (depth := _depth(function.body)) > NESTING_MAX
    ]


def without_docstring(file: File) -> list[str]:
    """Modules without a docstring; empty modules, which only mark a package, need none."""
    documented = not file.tree.body or ast.get_docstring(file.tree)
    return [] if documented else [f"{file.path}: no module docstring"]


def unexplained_fields(file: File) -> list[str]:
    """Private fields without a line of their own, in classes that have many private fields.

    The line is a comment above the field or beside it, or a string under it.
    """
    lines = file.text.splitlines()
    problems = []
    for found in file.nodes:
        if not isinstance(found, ast.ClassDef):
            continue
        fields = list(_private_fields(found))
        if len({name for name, _, _ in fields}) > FIELDS_UNEXPLAINED_MAX:
            problems += [
                f"{file.path}:{field.lineno}: nothing says what {found.name}.{name} is"
                for name, field, after in fields
                if not _is_explained(field, after, lines)
            ]
    return problems


def _private_fields(owner: ast.ClassDef) -> Iterator[tuple[str, ast.stmt, ast.stmt | None]]:
    """The private fields that a class declares or its `__init__` assigns first.

    Each with the statement that does so, and the next statement.
    """
    starts = [one for one in owner.body if isinstance(one, Function) and one.name == "__init__"]
    seen: set[str] = set()
    for body in (owner.body, *(start.body for start in starts)):
        for statement, after in zip_longest(body, body[1:]):
            for name in _assigned(statement):
                if name.startswith("_") and not name.startswith("__") and name not in seen:
                    seen.add(name)
                    yield name, statement, after


def _assigned(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement assigns: of `self` in a method, plain ones in the body of a class."""
    match statement:
        case ast.Assign(targets=targets):
            pass
        case ast.AnnAssign(target=target):
            targets = [target]
        case _:
            return
    for one in (node for target in targets for node in ast.walk(target)):
        match one:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                yield name
            case ast.Name(id=name) if name != "self":
                yield name


def _is_explained(field: ast.stmt, after: ast.stmt | None, lines: list[str]) -> bool:
    above = lines[field.lineno - 2].strip()
    beside = lines[(field.end_lineno or field.lineno) - 1].partition("  # ")[2]
    match after:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return above.startswith("# ") or bool(beside)


def sleeping(file: File) -> list[str]:
    """Sleeps in tests. Only helpers named `wait_...` may sleep, between two checks of a condition.

    `sleep(0)` is allowed: it lets other tasks run.
    """
    allowed = {
        id(node)
        for function in _functions(file)
        if function.name.startswith("wait_")
        for node in ast.walk(function)
    }
    return [
        f"{file.path}:{node.lineno}: a test sleeps"
        for node in file.nodes
        if isinstance(node, ast.Call)
        and _last_name(node.func) == "sleep"
        and not _is_zero(node.args)
        and id(node) not in allowed
    ]


def reading_clock_or_chance(file: File) -> list[str]:
    """Code that reads the time or random numbers instead of taking them as arguments."""
    return [
        f"{file.path}:{node.lineno}: {ast.unparse(node)}"
        for node in file.nodes
        if isinstance(node, ast.Attribute)
        and (
            (node.attr in CLOCK_METHODS and _last_name(node.value) in CLOCK_OWNERS)
            or (isinstance(node.value, ast.Name) and node.value.id in IMPURE_MODULES)
        )
    ]


def _functions(file: File) -> Iterator[Function]:
    return (node for node in file.nodes if isinstance(node, Function))


def _length(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def _depth(body: list[ast.stmt]) -> int:
    return max((_statement_depth(statement) for statement in body), default=0)


def _statement_depth(statement: ast.stmt) -> int:
    if not isinstance(statement, NESTING):
        return 0
    if isinstance(statement, ast.If) and len(statement.orelse) == 1:
        [other] = statement.orelse
        if isinstance(other, ast.If):
            return max(1 + _depth(statement.body), _statement_depth(other))
    return 1 + max(_depth(block) for block in _blocks(statement))


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, [])
    for holder in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
        yield holder.body


def _last_name(node: ast.expr) -> str:
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def _is_zero(arguments: list[ast.expr]) -> bool:
    match arguments:
        case [ast.Constant(value=0)]:
            return True
    return False
