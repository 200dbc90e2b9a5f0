"""GPU kernels on a machine without a GPU: all are found, what has changed compiles, tables are compared."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import gpu_build
import gpu_check
import gpu_kernels
import nav
import workloads


@pytest.fixture(scope="module")
def units():
    return gpu_kernels.all_units()


def test_changed_kernels_compile_for_a_gpu():
    """Costs seconds if bench/gpu_hashes.json is up to date."""
    assert gpu_build.build_changed(say=lambda text: print(text, file=sys.stderr)) == []


def test_compiling_and_its_failures():
    rows, failures = gpu_build.build([("bind/permuted", 90), ("no such module", 90)], 1, None)
    assert rows == []
    assert failures == ["no such module for sm_90: 'no such module'"]


@pytest.mark.skipif(gpu_build.find_tools() is None, reason="needs Triton: make gpu-build installs it")
def test_table_of_compiled_kernels():
    tasks = [("bind/permuted", 90), ("triton/tag-grid-32", 90)]
    rows, failures = gpu_build.build(tasks, 1, gpu_build.find_tools())
    assert failures == []
    assert [row["kernel"] for row in rows] == ["bind/permuted", "triton/tag-grid-32"]
    for row in rows:
        assert 16 <= row["registers"] <= 255
        assert row["instructions"] > 50
        assert row["stack"] == row["spills"] == 0
    assert rows[1]["shared"] > 0


def test_every_kernel_of_the_package_has_a_launch(units):
    assert gpu_kernels.unlaunched() == []
    names = [kernel for unit in units.values() for _, kernel in unit.kernels]
    assert len(names) == len(set(names)) > 120
    assert all(isinstance(unit.block, int) and unit.block % 32 == 0 for unit in units.values())


def test_every_bind_is_found(units):
    """Counted in another way: by the words in the source."""
    text = "".join(file.read_text() for file in gpu_kernels.PACKAGE.rglob("*.py") if file.name != "launch.py")
    calls = re.findall(r"(?<![.\w])bind\(\s*\"\w+\"", text)
    assert sum(name.startswith("bind/") for name in units) >= len(calls) >= 8


def test_block_sizes_are_those_of_the_launches(units):
    from shoal.nav.geodesic import THREADS
    from shoal.render.kernel import BLOCK

    blocks = {kernel: unit.block for unit in units.values() for _, kernel in unit.kernels}
    assert blocks["geodesic/solve_fields"] == THREADS
    assert blocks["geodesic/quantize_fields"] == blocks["ground/find_floors"] == blocks["queries/query_walk"] == 128
    assert blocks["render/depth"] == BLOCK
    assert blocks["worlds/tag-grid/1000-agents/step.1"] == 128
    assert blocks["worlds/tag-grid/40-agents/step.1"] == 64


def test_hashes_see_code_and_nothing_else(units, tmp_path):
    unit = units["worlds/cartpole/step.1"]
    source = unit.source()
    assert gpu_build.normalized(source) == gpu_build.normalized(source + "\n// a comment\n")
    assert gpu_build.normalized(source) != gpu_build.normalized(source.replace("wp::add", "wp::sub"))
    one, two = ({name: units[name]} for name in ("worlds/cartpole/step.1", "worlds/cartpole/hold.1"))
    gpu_build.write_hashes(one | two, file := tmp_path / "hashes.json")
    assert gpu_build.changed(one | two, file) == []
    table = json.loads(file.read_text())
    table["units"]["worlds/cartpole/step.1"][0] = "other Python, same CUDA"
    table["units"]["worlds/cartpole/hold.1"] = ["other Python", "other CUDA"]
    file.write_text(json.dumps(table))
    assert gpu_build.changed(one | two, file) == ["worlds/cartpole/hold.1"]
    file.write_text(json.dumps(table | {"warp": "1.0"}))
    assert len(gpu_build.changed(one | two, file)) == 2


def row(kernel, arch=90, code="c", **numbers):
    return dict(kernel=kernel, arch=arch, code=code, **{name: 0 for name in gpu_build.NUMBERS} | numbers)


def test_tables_are_equal_but_for_names():
    base = [row("a", code="x"), row("b", code="y"), row("same")]
    assert gpu_build.compare(base, base) == (True, [])
    equal, lines = gpu_build.compare(base, [row("c", code="x"), row("b", code="z"), row("same")])
    assert equal
    assert lines == ["a sm_90: is now c", "b sm_90: same numbers, other instructions"]
    renamed = gpu_build.compare([row("a", code="x", registers=8)], [row("c", code="z", registers=8)])
    assert renamed == (True, ["a sm_90: is now c, same numbers"])


@pytest.mark.parametrize(
    ("here", "line"),
    [
        ([row("a", code="x", registers=8, stack=16)], "a sm_90: registers 0 -> 8, stack 0 -> 16"),
        ([row("a", code="x"), row("b")], "b sm_90: only here"),
        ([row("a", arch=80, code="x")], "a sm_90: only at the base"),
        ([row("b", code="other", registers=8)], "a sm_90: only at the base"),
    ],
)
def test_differences_are_named(here, line):
    equal, lines = gpu_build.compare([row("a", code="x")], here)
    assert not equal
    assert line in lines


NVDISASM = """
	.section	.text.step_01234567_cuda_kernel_forward,"ax",@progbits
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_12) ;
        /*0020*/                   STL.64 [R1+0x10], R2 ;
        /*0030*/               @P1 LDL R3, [R4+0x8] ;
.L_x_12:
        /*0040*/                   EXIT ;
        /*0050*/                   NOP;
"""

CUOBJDUMP = """
 Function step_01234567_cuda_kernel_forward:
  REG:38 STACK:24 SHARED:1536 LOCAL:0 CONSTANT[0]:920 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_reading_what_the_tools_print():
    (counts,) = gpu_build.read_instructions(NVDISASM).values()
    code = counts.pop("code")
    assert counts == dict(local_loads=1, local_stores=1, spills=1, instructions=5)
    (other,) = gpu_build.read_instructions(NVDISASM.replace(".L_x_12", ".L_x_7")).values()
    assert other["code"] == code
    (resources,) = gpu_build.read_resources(CUOBJDUMP).values()
    assert resources == dict(registers=38, stack=24, shared=1536)


def test_gpu_check_has_all_rows_once():
    for program, rows in (("workloads", workloads.ROWS), ("nav", nav.ROWS)):
        parts = [name for of, names in gpu_check.PARTS.values() if of == program for name in names]
        assert sorted(parts) == sorted(rows)
    assert gpu_check.H200.keys() <= workloads.ROWS.keys() | nav.ROWS.keys()


def test_gpu_check_without_a_gpu_is_one_sentence(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = [sys.executable, gpu_check.__file__, "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert re.fullmatch(r"gpu-check: .*GPU.*\.\n", done.stderr)
