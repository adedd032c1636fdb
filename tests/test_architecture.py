"""The house rules of docs/architecture.md: imports go one way, files stay short, heavy packages are imported late."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "moepress"

# A room may import from its own line and from the lines above it.
ORDER = """
errors
registry
progress
hook
memory exact watch
team
models runtime
fairseq
tasks
data
observe
plan
align
merge
refit
prune
decompose
journal
checkpoint
evaluation
recovery
methods
recipe
fit trial command planning
rebuild
pipeline
budget
report bench
records
api
training
finetuning
estimate
inspection
publishing
comparison
paper
demo
cli
"""
LEVEL = {room: level for level, line in enumerate(ORDER.split("\n")) for room in line.split()}
# What `from moepress import NAME` reaches when NAME is no room: the public functions. The version is for everyone.
LEVEL["moepress"] = LEVEL["api"]
FREE = {"__init__", "__main__"}

MAX_LINES = 400
LATE = {"accelerate", "datasets", "lm_eval", "matplotlib", "peft"}
DISTRIBUTIONS = {"yaml": "pyyaml", "lm_eval": "lm-eval", "triton": "torch"}

FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported anywhere below `tree`, in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def at_import_time(tree: ast.Module) -> ast.Module:
    """The tree without what does not run when the module is imported."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.AST) -> None:
            return None

        visit_AsyncFunctionDef = visit_FunctionDef

        def visit_If(self, node: ast.If) -> ast.AST:
            if "TYPE_CHECKING" in ast.unparse(node.test):
                return ast.Module(body=[self.visit(n) for n in node.orelse], type_ignores=[])
            return self.generic_visit(node)

    return Strip().visit(tree)


def parsed() -> Iterator[tuple[Path, str, ast.Module]]:
    for file in FILES:
        package = ".".join(("moepress", *file.relative_to(PACKAGE).parent.parts))
        yield file, package, ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def place(file: Path, line: int) -> str:
    return f"{file.relative_to(ROOT)}:{line}"


def test_every_room_has_its_place() -> None:
    unknown = {room_of(file) for file in FILES} - set(LEVEL) - FREE
    assert not unknown, f"new rooms: give them a line in docs/architecture.md and in ORDER: {sorted(unknown)}"


def test_imports_go_one_way() -> None:
    wrong = []
    for file, package, tree in parsed():
        room = room_of(file)
        if room in FREE:
            continue
        for line, name in imports(tree, package):
            top, _, rest = name.partition(".")
            if top != "moepress" or rest == "__version__":
                continue
            target = rest.split(".")[0] if rest.split(".")[0] in LEVEL else "moepress"
            if LEVEL[target] > LEVEL[room]:
                wrong.append(f"{place(file, line)}: {room} may not know {target}")
    assert not wrong, "\n".join(wrong)


def test_the_guide_shows_the_same_rooms() -> None:
    table = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), re.MULTILINE)
    shown = [name.strip("`/").removesuffix(".py") for row in table for name in re.findall(r"`[^`]+`", row)]
    unknown = [name for name in shown if name not in LEVEL]
    assert shown and not unknown, f"docs/architecture.md has rooms that ORDER does not know: {unknown}"


def test_files_stay_short() -> None:
    long = {str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines()) for file in FILES}
    long = {name: lines for name, lines in long.items() if lines > MAX_LINES}
    assert not long, f"over {MAX_LINES} lines, split them: {long}"


def test_heavy_packages_are_imported_late() -> None:
    early = [
        f"{place(file, line)}: {name}"
        for file, package, tree in parsed()
        for line, name in imports(at_import_time(tree), package)
        if name.split(".")[0] in LATE
    ]
    assert not early, "import these where they are used, in the function: " + ", ".join(early)


def test_imported_packages_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    always = {distribution(line) for line in project["dependencies"]}
    optional = {distribution(line) for extra in ("hub", "eval", "train") for line in extras[extra]} - always
    missing = []
    for file, package, tree in parsed():
        for line, name in imports(tree, package):
            top = name.split(".")[0]
            own = top == "moepress" or top in sys.stdlib_module_names
            if not own and DISTRIBUTIONS.get(top, top) not in always | optional:
                missing.append(f"{place(file, line)}: {top}")
        for line, name in imports(at_import_time(tree), package):
            top = name.split(".")[0]
            if DISTRIBUTIONS.get(top, top) in optional:
                missing.append(f"{place(file, line)}: {top} at the top, though it is optional")
    assert not missing, "not among the dependencies in pyproject.toml: " + ", ".join(missing)


def distribution(requirement: str) -> str:
    return re.split(r"[\s<>=!~\[;]", requirement, maxsplit=1)[0].lower()
