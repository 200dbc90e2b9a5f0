"""Compile every GPU kernel of Shoal on any machine, and tabulate registers, memory and instructions.

    python bench/gpu_build.py                     all kernels for sm_80, sm_90 and sm_120; writes build/gpu.jsonl
    python bench/gpu_build.py --base REVISION     also at a revision (or its folder), and compare
    python bench/gpu_build.py --changed           only kernels that differ from bench/gpu_hashes.json, one architecture
    python bench/gpu_build.py --only 'render/*' --archs 90
    python bench/gpu_build.py --update            also write bench/gpu_hashes.json
    python bench/gpu_build.py --list              list the kernels

This needs no GPU and no driver: Warp's and Triton's compilers generate machine code for any architecture. Triton has
the tools that read machine code too (`pip install 'shoal[gpu-build]'`); `--changed` does not need it.

The table is sorted and has a row for each kernel and architecture:

    registers      per thread
    stack          bytes per thread: arrays in local memory, and spilled registers
    local_loads, local_stores    instructions that read or write local memory
    spills         those of them at a fixed stack offset, as for spilled registers
    shared         bytes of shared memory per block
    instructions   of the kernel and of functions that were not inlined
    code           SHA-256 of the instructions, shortened

Two tables are equal if all numbers are. A kernel that exists at only one revision is matched with one of the same code,
so a refactoring may change only names. The exit code is 1 if anything differs or fails to compile.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from fnmatch import fnmatch
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HASHES = Path(__file__).with_name("gpu_hashes.json")
TABLE = ROOT / "build" / "gpu.jsonl"
ARCHS = (80, 90, 120)
NUMBERS = ("registers", "stack", "local_loads", "local_stores", "spills", "shared", "instructions")
MOST_CHANGED = 12
"""Maximum number of modules that `--changed` compiles; `make gpu-build` compiles all."""

Row = dict[str, Any]
Task = tuple[str, int]
"""Name of a unit or of a Triton kernel, and an architecture."""

TRITON = "triton/"


# --- one process of the compiler -------------------------------------------------------------------------------------

_worker: dict[str, Any] = {}


def _start_worker(folder: str, lenient: bool) -> None:
    """Generate all kernels. Compiled ones are written to a folder of this process, never to Warp's cache."""
    own = Path(folder) / str(os.getpid())
    own.mkdir()
    os.environ.update(WARP_CACHE_PATH=str(own / "warp"), TRITON_CACHE_DIR=str(own / "triton"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(own)  # for precompiled headers
    import gpu_kernels

    _worker.update(folder=own, kernels=gpu_kernels, units=gpu_kernels.all_units(lenient))


def _compile(task: Task, tools: str | None) -> list[Row]:
    name, arch = task
    if name.startswith(TRITON):
        return _compile_triton(name, arch, tools)
    import warp as wp

    unit = _worker["units"][name]
    unit.module.options["block_dim"] = unit.block
    place = _worker["folder"] / f"{unit.hash}.{arch}"
    (cubin,) = wp.compile_aot_module(unit.module, arch=arch, module_dir=place, use_ptx=False)
    if tools is None:
        return []
    found = {_without_hash(key): row for key, row in read_cubin(Path(cubin), tools).items()}
    same = [other for other in _worker["units"].values() if other.hash == unit.hash]
    return [dict(kernel=kernel, arch=arch, **found[key]) for other in same for key, kernel in other.kernels]


def _without_hash(symbol: str) -> str:
    """The key of a kernel, from its name in machine code."""
    return re.sub(r"_[0-9a-f]{8}_cuda_kernel_forward$", "", symbol)


def _compile_triton(name: str, arch: int, tools: str | None) -> list[Row]:
    import triton
    from triton.backends.compiler import GPUTarget

    source, options = _worker["kernels"].act_source(name.removeprefix(TRITON))
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    cubin = _worker["folder"] / "triton.cubin"
    cubin.write_bytes(made.asm["cubin"])
    (row,) = read_cubin(cubin, str(tools)).values()
    # Triton allocates shared memory at the launch.
    return [dict(kernel=name, arch=arch, **row | dict(shared=made.metadata.shared))]


# --- reading machine code --------------------------------------------------------------------------------------------


def find_tools() -> str | None:
    """The folder of cuobjdump and nvdisasm, which come with Triton."""
    spec = find_spec("triton")
    places = spec.submodule_search_locations if spec else None
    return str(Path(next(iter(places))) / "backends" / "nvidia" / "bin") if places else None


def read_cubin(cubin: Path, tools: str) -> dict[str, Row]:
    """The numbers of each kernel in a cubin file."""

    def run(tool: str, option: str) -> str:
        command = [str(Path(tools) / tool), option, str(cubin)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    resources = read_resources(run("cuobjdump", "-res-usage"))
    return {name: resources[name] | row for name, row in read_instructions(run("nvdisasm", "-c")).items()}


def read_resources(text: str) -> dict[str, Row]:
    """Registers, stack and shared memory, as cuobjdump prints them."""
    pattern = r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)"
    return {
        name: dict(registers=int(registers), stack=int(stack), shared=int(shared))
        for name, registers, stack, shared in re.findall(pattern, text)
    }


def read_instructions(text: str) -> dict[str, Row]:
    """Counts of instructions in each kernel, as nvdisasm prints them."""
    found = {}
    for part in re.split(r"^\s*\.section\s+\.text\.", text, flags=re.MULTILINE)[1:]:
        name = re.split(r'[,"\s]', part, maxsplit=1)[0]
        lines = [" ".join(line.split()) for line in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", part)]
        lines = [line for line in lines if line != "NOP"]
        local = [line for line in lines if re.match(r"(@\S+ )?(LDL|STL)\b", line)]
        code = re.sub(r"\.L_x_\d+", ".L", "\n".join(lines))
        found[name] = dict(
            local_loads=sum("LDL" in line for line in local),
            local_stores=sum("STL" in line for line in local),
            spills=sum(bool(re.search(r"\[R1(\+0x[0-9a-f]+)?\]", line)) for line in local),
            instructions=len(lines),
            code=hashlib.sha256(code.encode()).hexdigest()[:12],
        )
    return found


# --- building --------------------------------------------------------------------------------------------------------


def build(tasks: Iterable[Task], workers: int, tools: str | None, lenient: bool = False) -> tuple[list[Row], list[str]]:
    """Compile in several processes, slowest first; returns the rows of the table, and the failures."""
    tasks = sorted(tasks, key=_slow_first)
    rows, failures, began = [], [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-build-") as folder:
        context = get_context("spawn")
        with ProcessPoolExecutor(workers, context, _start_worker, (folder, lenient)) as pool:
            waiting = {pool.submit(_compile, task, tools): task for task in tasks}
            for count, done in enumerate(as_completed(waiting), 1):
                name, arch = waiting[done]
                try:
                    rows += done.result()
                except Exception as error:
                    failures.append(f"{name} for sm_{arch}: {' '.join(str(error).split()) or repr(error)}")
                _show(f"{count}/{len(tasks)} compiled, {time.monotonic() - began:.0f} s", count, len(tasks))
    return sorted(rows, key=lambda row: (row["kernel"], row["arch"])), sorted(failures)


def _slow_first(task: Task) -> tuple[int, str, int]:
    """Sort key: large modules first, so that all processes end at about the same time."""
    name, arch = task
    slow = (f"{TRITON}tag-continuous", "ground", TRITON, "worlds/pandemic", "worlds/tag-continuous", "render", "worlds")
    return next((i for i, start in enumerate(slow) if name.startswith(start)), len(slow)), name, arch


def _show(text: str, count: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{text}", end="\n" if count == total else "", file=sys.stderr, flush=True)
    elif count % 40 == 0 or count == total:
        print(text, file=sys.stderr, flush=True)


def all_tasks(units: dict[str, Any], policies: dict[str, dict[str, Any]], archs: Iterable[int]) -> list[Task]:
    """All units and policies for every architecture; of units with the same source only one."""
    distinct = {unit.hash: name for name, unit in units.items()}
    tasks = [(name, arch) for name in distinct.values() for arch in archs]
    triton = [(name, arch) for name, given in policies.items() for arch in archs if arch in given.get("archs", archs)]
    return tasks + [(f"{TRITON}{name}", arch) for name, arch in triton]


# --- hashes of sources -----------------------------------------------------------------------------------------------


def normalized(source: str) -> str:
    """SHA-256 of generated CUDA source without comments, line numbers and Warp's own hashes."""
    source = re.sub(r"//.*", "", source)
    source = re.sub(r"_[0-9a-f]{8}(?=_cuda_kernel)", "", source)
    lines = [" ".join(line.split()) for line in source.splitlines()]
    return hashlib.sha256("\n".join(filter(None, lines)).encode()).hexdigest()[:16]


def write_hashes(units: dict[str, Any], file: Path = HASHES) -> None:
    """Write the hashes of each unit's Python source and generated source."""
    import warp as wp

    rows = {name: [unit.hash, normalized(unit.source())] for name, unit in sorted(units.items())}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    file.write_text(f'{{\n "warp": "{wp.__version__}",\n "units": {{\n{lines}\n }}\n}}\n')


def changed(units: dict[str, Any], file: Path = HASHES) -> list[str]:
    """Units whose generated source differs from the table. It is generated only if the Python source differs."""
    import warp as wp

    table = json.loads(file.read_text())
    if table["warp"] != wp.__version__:
        return list(units)
    found = []
    for name, unit in units.items():
        python, cuda = table["units"].get(name, ("", ""))
        if unit.hash != python and normalized(unit.source()) != cuda:
            found.append(name)
    return found


def build_changed(workers: int = 1, say: Callable[[str], None] = print) -> list[str]:
    """Compile some of the changed units for one architecture; returns the failures."""
    import gpu_kernels

    units = gpu_kernels.all_units()
    names = changed(units)
    distinct = {units[name].hash: name for name in names}
    # Spread over the whole list: neighbors are similar.
    some = list(distinct.values())[:: max(1, -(-len(distinct) // MOST_CHANGED))]
    left = f"; make gpu-build compiles the other {len(distinct) - len(some)}" if len(some) < len(distinct) else ""
    say(f"{len(units)} modules, {len(distinct)} changed, compiling {len(some)} for sm_90{left}")
    return build([(name, 90) for name in some], workers, None)[1] if some else []


# --- comparing -------------------------------------------------------------------------------------------------------


def compare(base: list[Row], here: list[Row]) -> tuple[bool, list[str]]:
    """Whether two tables differ only in names, and a line for each difference."""
    old, new = ({(row["kernel"], row["arch"]): row for row in rows} for rows in (base, here))
    lines, equal = [], True
    gone, come = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
    # Names of parameters are part of the code: renamed kernels may be equal in their numbers alone.
    for columns, remark in ((("code",), ""), (NUMBERS, ", same numbers")):
        renamed: dict[tuple, list] = {}
        for key in gone:
            renamed.setdefault((key[1], *(old[key][name] for name in columns)), []).append(key)
        for key in list(come):
            same = renamed.get((key[1], *(new[key][name] for name in columns)))
            if same:
                before = same.pop(0)
                gone.remove(before)
                come.remove(key)
                lines.append(f"{before[0]} sm_{key[1]}: is now {key[0]}{remark}")
    for name, arch in come:
        equal = False
        lines.append(f"{name} sm_{arch}: only here")
    for name, arch in gone:
        equal = False
        lines.append(f"{name} sm_{arch}: only at the base")
    for key in sorted(old.keys() & new.keys()):
        differ = [f"{n} {old[key][n]} -> {new[key][n]}" for n in NUMBERS if old[key][n] != new[key][n]]
        if differ:
            equal = False
            lines.append(f"{key[0]} sm_{key[1]}: {', '.join(differ)}")
        elif old[key]["code"] != new[key]["code"]:
            lines.append(f"{key[0]} sm_{key[1]}: same numbers, other instructions")
    return equal, lines


def build_base(base: str, options: argparse.Namespace, folder: Path) -> list[Row]:
    """The table of another revision, from its version of this program if it has one, else from this one."""
    from ratchet import checkout

    tree = Path(base).resolve()
    if not tree.is_dir():
        tree = folder / "tree"
        checkout(base, tree)
    table = folder / "base.jsonl"
    words = ["--lenient", "--out", str(table), "--workers", str(options.workers), "--archs", *map(str, options.archs)]
    words += ["--only", *options.only] if options.only else []
    paths = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
    program = tree / "bench" / Path(__file__).name
    program = program if program.is_file() else Path(__file__).resolve()
    done = subprocess.run(
        [sys.executable, str(program), *words], cwd=folder, env={**os.environ, "PYTHONPATH": paths}, check=False
    )
    if not table.is_file():
        sys.exit(f"gpu-build: building the base failed (exit code {done.returncode}).")
    return read_table(table)


def read_table(file: Path) -> list[Row]:
    """Read a table from its file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def summary(rows: list[Row]) -> str:
    """Describe the kernels that use the most local memory."""
    heavy = sorted((row for row in rows if row["local_loads"] + row["local_stores"]), key=lambda row: -row["stack"])
    kernels, archs = {row["kernel"] for row in rows}, {row["arch"] for row in rows}
    lines = [f"{len(kernels)} kernels, {len(archs)} architecture(s), {len(rows)} rows; {len(heavy)} use local memory:"]
    for row in heavy[:10]:
        numbers = ", ".join(f"{name} {row[name]}" for name in NUMBERS)
        lines.append(f"  {row['kernel']} sm_{row['arch']}: {numbers}")
    return "\n".join(lines)


def _is_chosen(names: Iterable[str], patterns: list[str]) -> bool:
    return not patterns or any(fnmatch(name, pattern) for name in names for pattern in patterns)


def main() -> int:
    """Build and compare; returns 0 if nothing failed or differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="revision, folder of a revision, or its table (.jsonl)")
    parser.add_argument("--archs", nargs="+", type=int, default=list(ARCHS), metavar="ARCH")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PATTERN", help="names of kernels, or of modules with a block size"
    )
    parser.add_argument("--out", type=Path, default=TABLE, help="file of the table")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--changed", action="store_true", help="compile kernels that differ from bench/gpu_hashes.json")
    parser.add_argument("--update", action="store_true", help="write bench/gpu_hashes.json")
    parser.add_argument("--list", action="store_true", help="list the kernels")
    parser.add_argument("--lenient", action="store_true", help="skip worlds that cannot be created")
    options = parser.parse_args()
    if options.changed:
        failures = build_changed(options.workers)
        print("\n".join(failures))
        return 1 if failures else 0
    import gpu_kernels

    units = gpu_kernels.all_units(options.lenient)
    policies = gpu_kernels.POLICIES
    if options.list:
        print("\n".join(kernel for unit in units.values() for _, kernel in unit.kernels))
        print("\n".join(f"{TRITON}{name}" for name in policies))
        return 0
    tools = find_tools()
    if tools is None:
        sys.exit("gpu-build: Triton, whose tools read compiled kernels, is missing: pip install 'shoal[gpu-build]'.")
    chosen = {n: u for n, u in units.items() if _is_chosen((n, *(kernel for _, kernel in u.kernels)), options.only)}
    policies = {name: given for name, given in policies.items() if _is_chosen((TRITON + name,), options.only)}
    rows, failures = build(all_tasks(chosen, policies, options.archs), options.workers, tools, options.lenient)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for failure in failures:
        print(f"FAILED  {failure}")
    if options.lenient:
        return 1 if failures else 0
    print(summary(rows))
    print(f"The table is in {options.out}.")
    if options.update and not failures:
        write_hashes(units)
        print(f"The hashes are in {HASHES}.")
    good = not failures
    if options.base:
        with tempfile.TemporaryDirectory(prefix="gpu-build-base-") as folder:
            is_table = options.base.endswith(".jsonl")
            base = read_table(Path(options.base)) if is_table else build_base(options.base, options, Path(folder))
        equal, lines = compare(base, rows)
        print("\n".join(lines))
        print("Equal except for names." if equal and lines else "Equal." if equal else "DIFFERENT.")
        good = good and equal
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
