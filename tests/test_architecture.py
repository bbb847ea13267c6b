"""The structure of the source tree: layers, folder sizes, names and imports."""

import ast
import itertools
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "farhand"
MAX_MODULES = 22

# Imports of our own modules inside a function: importing module, imported module, reason.
LATE_IMPORTS = {
    ("farhand.cli.agent.chat", "farhand.cli.agent.chat_terminal"): "prompt_toolkit and rich, for a terminal only",
    ("farhand.cli.copy.upload", "farhand.gateway.transfers.workspace_endpoint"): "loads much of the gateway",
    ("farhand.cli.main", "farhand.cli.output"): "the command line starts without it",
    ("farhand.cli.remote.attach", "farhand.cli.remote.terminal"): "`farhand run` starts without asyncio",
    ("farhand.cli.run.node", "farhand"): "the command line starts without it",
    ("farhand.cli.run.node", "farhand.app.sandbox"): "needed only with a sandbox",
    ("farhand.node.program", "farhand.node.previews"): "memory of an idle node",
    ("farhand.node.transfers.manager", "farhand.node.transfers.endpoint"): "memory of an idle node",
    ("farhand.node.transfers.manager", "farhand.node.transfers.receiver"): "memory of an idle node",
    ("farhand.tools.node_files", "farhand.tools.preview"): "memory of an idle node",
    ("farhand.tools.node_shell", "farhand.tools.preview"): "memory of an idle node",
    ("farhand.tools.undo", "farhand.machine.files.undo"): "memory of an idle node",
    ("farhand.tools.undo", "farhand.tools.preview"): "memory of an idle node",
    ("farhand.tools.trial", "farhand.tools.preview"): "memory of an idle node",
}
# Modules outside of store/sqlite that import apsw: the memory index is a database of its own.
APSW_USERS = {"farhand.memory.index"}
# Modules whose logger is not named after them.
NAMED_LOGGERS = {"farhand.app.gateway", "farhand.cli.run.local_node"}


def modules() -> Iterator[tuple[str, Path, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
        yield name, path, ast.parse(path.read_text())


def contracts() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    return found


def test_every_layer_contract_is_exhaustive() -> None:
    layered = [contract for contract in contracts() if contract["type"] == "layers"]
    assert [contract["name"] for contract in layered if not contract.get("exhaustive")] == []
    covered = {container for contract in layered for container in contract["containers"]}
    with_packages = {
        ".".join(path.parent.parent.relative_to(SOURCE.parent).parts)
        for path in SOURCE.rglob("__init__.py")
        if path.parent != SOURCE
    }
    # A package with one sub-package has nothing to order.
    assert with_packages - covered <= {
        "farhand.api.routes",
        "farhand.gateway.calls",
        "farhand.llm",
        "farhand.node",
        "farhand.store.sqlite",
        "farhand.store.tables",
    }


def test_no_folder_has_more_modules_than_a_reader_can_hold() -> None:
    large = {}
    for folder in {path.parent for path in SOURCE.rglob("*.py")}:
        count = sum(path.name != "__init__.py" for path in folder.glob("*.py"))
        if count > MAX_MODULES:
            large[str(folder.relative_to(SOURCE))] = count
    assert large == {}, f"split these folders into sub-packages of at most {MAX_MODULES} modules"


def test_every_package_has_a_docstring() -> None:
    missing = [
        name for name, path, tree in modules() if path.name == "__init__.py" and not (ast.get_docstring(tree) or "")
    ]
    assert missing == []


def test_a_public_class_name_has_one_definition() -> None:
    defined: dict[str, list[str]] = defaultdict(list)
    for name, _, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined[node.name].append(name)
    assert {name: places for name, places in defined.items() if len(places) > 1} == {}


def test_our_own_modules_are_imported_at_the_top() -> None:
    late = set()
    for name, _, tree in modules():
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("farhand"):
                        late.add((name, node.module or ""))
    assert late - LATE_IMPORTS.keys() == set()


def test_attributes_are_documented_by_comments() -> None:
    found = {}
    for name, _, tree in modules():
        count = 0
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                for before, after in itertools.pairwise(body):
                    assigned = isinstance(before, ast.Assign | ast.AnnAssign)
                    text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                    count += assigned and text and isinstance(after.value.value, str)
        if count:
            found[name] = count
    assert found == {}, "write a comment above the attribute, or a section of the class docstring"


def test_loggers_are_named_after_their_module() -> None:
    odd = {
        name
        for name, path, _ in modules()
        if re.search(r"^log(ger)? = logging\.getLogger\((?!__name__\))", path.read_text(), re.MULTILINE)
    }
    assert odd - NAMED_LOGGERS == set()


def test_only_the_sqlite_store_imports_apsw() -> None:
    users = set()
    for name, _, tree in modules():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(each.partition(".")[0] == "apsw" for each in names) and ".store.sqlite" not in name:
                users.add(name)
    assert users == APSW_USERS
