"""The package without its extras: everything imports, and a missing library is one sentence."""

import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from shoal.core.errors import ShoalError
from shoal.core.extras import EXTRAS, import_extra, needs_extras

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

IMPORT_ALL = """
import importlib, os, pkgutil, sys
import gymnasium, torch._dynamo, warp  # once for all cases

class Blocked:
    def __init__(self, modules):
        self.modules = modules

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def import_all(blocked):
    for name in [name for name in sys.modules if name.partition(".")[0] in blocked]:
        del sys.modules[name]
    sys.meta_path.insert(0, Blocked(blocked))
    import shoal
    names = {module.name for module in pkgutil.walk_packages(shoal.__path__, "shoal.")} - {"shoal.__main__"}
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != "triton":  # comes with torch for GPUs
                raise

for case in sys.argv[1:]:
    child = os.fork()
    if not child:
        import_all(case.split())
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"shoal cannot be imported without {case}")
"""


def closure(requirements: Iterable[str], found: set[str]) -> set[str]:
    """The distributions that requirements install, those of other requirements included."""
    for requirement in map(Requirement, requirements):
        name = canonicalize_name(requirement.name)
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(name)
            closure(distribution(name).requires or (), found)
    return found


def test_every_extra_for_users_is_named_by_a_module():
    assert set(EXTRAS.values()) == PROJECT["optional-dependencies"].keys() - {"bench", "dev", "gpu-build"}


def test_all_of_shoal_imports_without_optional_modules():
    needed = closure(PROJECT["dependencies"], {"shoal"})
    others = [
        module
        for module, owners in packages_distributions().items()
        if needed.isdisjoint(map(canonicalize_name, owners))
    ]
    assert {"pytest", "trimesh"} < set(others)
    command = [sys.executable, "-c", IMPORT_ALL, *EXTRAS, " ".join(others)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_missing_library_is_one_sentence_with_its_extra(monkeypatch):
    for module, extra in EXTRAS.items():
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ShoalError, match=rf"needs {module}, .*pip install 'shoal\[{extra}\]'\.$"):
            import_extra(module)


def test_the_cause_of_an_error_names_the_library():
    mujoco, scipy = (ModuleNotFoundError(name, name=name) for name in ("mujoco", "scipy.special"))
    with pytest.raises(ShoalError, match=r"^X needs mujoco, .*: pip install 'shoal\[mujoco\]'\.$"), needs_extras("X"):
        raise OSError("dependency not installed") from mujoco
    with pytest.raises(ShoalError, match=r"^X needs scipy, .*: install it with pip\.$"), needs_extras("X"):
        raise scipy
    with pytest.raises(ZeroDivisionError), needs_extras("X"):
        raise ZeroDivisionError
