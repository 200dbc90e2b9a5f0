"""Python processes that Shoal starts: they import nothing from the current folder, which may be a stranger's."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import shoal
from shoal.core.children import python_command

PACKAGE = Path(shoal.__file__).parent


def programs():
    """Modules of Shoal that other modules start as programs."""
    found = set()
    for source in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "python_command":
                found.add(ast.literal_eval(node.args[0]))
    return sorted(found)


def test_processes_are_started_in_one_way():
    users = [source.name for source in PACKAGE.rglob("*.py") if "sys.executable" in source.read_text()]
    assert users == ["children.py"]
    assert programs() == [
        "shoal.host.worker",
        "shoal.runs.process_main",
        "shoal.scene.worker",
        "shoal.tools.check_debug",
    ]


def test_nothing_is_imported_from_the_current_folder(tmp_path):
    for name in ("json", "torch", "numpy", "warp", "gymnasium", "shoal", "runpy", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("open('executed', 'w')\nraise SystemExit('executed')\n")
    subprocess.run(python_command("shoal.host.worker"), cwd=tmp_path, capture_output=True)
    assert not (tmp_path / "executed").exists()


def test_modules_come_from_where_this_process_has_them(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text("import json, sys\nprint(json.dumps([__name__, sys.path, sys.argv[1:]]))\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as in an interpreter that is typed into
    answer = subprocess.run(python_command("program", "a", "b c"), cwd="/", capture_output=True, check=True).stdout
    assert json.loads(answer) == ["__main__", [os.path.abspath(folder) for folder in sys.path], ["a", "b c"]]
