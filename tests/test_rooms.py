"""Imports between rooms go in one direction, and the page about the architecture agrees with the code."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "dynaquant"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
MOST_LINES = 400


def module_name(path: Path) -> str:
    """``store.run`` for src/dynaquant/store/run.py, ``store`` for its ``__init__.py``, ``""`` for the package."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py")}
NATIVE = "_native"


def imports_of(path: Path) -> set[str]:
    """The modules of the package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if inside(name) in {*MODULES, NATIVE} else str(node.module) for name in names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found.update(inside(name) for name in names if name == "dynaquant" or name.startswith("dynaquant."))
    return found


def inside(name: str) -> str:
    return name.removeprefix("dynaquant").removeprefix(".")


def room_of(module: str) -> str:
    """The innermost room of the page that a module lies in; a module without one is a room itself."""
    parts = module.split(".")
    outer = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((room for room in outer if room in FLOORS), parts[0] or "__init__")


def floors() -> dict[str, int]:
    """The rooms of the page's table, each with its row; higher rows may import from lower ones."""
    table = PAGE.partition("\n| room |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`([\w/]+)`", line.split("|")[1]) for line in table.splitlines()[2:]]
    return {room: number for number, rooms in enumerate(rows) for room in rooms}


FLOORS = floors()
IMPORTS = {module: imports_of(path) for module, path in MODULES.items()}


def test_every_room_is_on_the_page():
    outer = {room.partition("/")[0] for room in FLOORS if "/" in room}  # packages of rooms
    assert FLOORS.keys() == {room_of(module) for module in MODULES if module not in outer} | {NATIVE}


def test_rooms_import_from_rooms_below_only():
    wrong = [
        f"{module} imports {other}"
        for module, others in IMPORTS.items()
        for other in others
        if room_of(other) != room_of(module) and FLOORS[room_of(other)] <= FLOORS[room_of(module)]
    ]
    assert not wrong


def test_modules_do_not_import_in_circles():
    TopologicalSorter({module: others - {NATIVE} for module, others in IMPORTS.items()}).prepare()


def test_no_module_is_longer_than_a_reader_can_hold():
    too_long = {name: n for name, path in MODULES.items() if (n := len(path.read_text().splitlines())) > MOST_LINES}
    assert not too_long


def test_every_room_lists_its_files():
    for room in {"/".join(module.split(".")[:-1]) for module in MODULES if "." in module}:
        docstring = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())) or ""
        files = {path.stem for path in (PACKAGE / room).glob("*.py")} - {"__init__", "__main__"}
        missing = sorted(name for name in files if not re.search(rf"\b{name}\b", docstring))
        assert not missing, f"{room}/__init__.py does not list {missing}"


def test_the_walk_names_functions_that_are_there():
    links = re.findall(r"\[`([\w.]+)`\]\(\.\./src/dynaquant/([\w/]+\.py)\)", PAGE)
    assert len(links) >= 10
    for name, file in links:
        tree = ast.parse((PACKAGE / file).read_text())
        for part in name.split("."):
            found = [
                node
                for node in ast.iter_child_nodes(tree)
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part
            ]
            assert found, f"{file} has no {name}"
            tree = found[0]
