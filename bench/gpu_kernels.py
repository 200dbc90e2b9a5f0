"""Generate the GPU version of every kernel of Shoal on any machine; bench/gpu_build.py compiles them.

Nothing is launched and no array is allocated. Worlds are created on torch's meta device. All other kernels are found at
their launches: the package's source is searched for calls of `Plan.add_kernel`, `wp.launch` and `bind`, which
also state the block size. So a new or moved kernel needs no change here, unless a
function creates it: then FACTORIES lists the arguments.
"""

import ast
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import warp as wp

import shoal
from shoal.core import kernels
from shoal.core.kernels import Call
from shoal.core.launch import init_warp

try:
    from shoal.core.registry import WORLDS
    from shoal.core.world_loading import world_class
except ImportError:  # revisions without these modules
    from shoal.worlds import WORLDS, world_class

PACKAGE = Path(shoal.__file__).parent

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    # The number of agents determines whether an env is a thread, some lanes of a warp or a block.
    "tag-grid": {
        "2-agents": dict(num_taggers=1),
        "40-agents": dict(num_taggers=39),
        "1000-agents": dict(num_taggers=999),
    },
    "tag-continuous": {"6-agents": dict(num_taggers=2, num_runners=4)},
    "pointnav": {
        "blind": dict(image="none"),
        "3-agents": dict(num_agents=3),
        "40-agents": dict(num_agents=40),
    },
    "explore": {"3-agents": dict(num_agents=3)},
    "flee": {"3-agents": dict(num_agents=3)},
}
"""World -> name -> settings that are compiled in addition to the defaults."""

DEPTH, HALF, BYTES = {"depth": torch.float32}, torch.float16, torch.uint8
LABELS = {"semantic": torch.int32, "instance": torch.int32}
RENDER_VARIANTS: dict[str, tuple[int, dict[str, torch.dtype], dict[str, bool]]] = {
    # name: pixels per side, outputs, other options
    "nav-depth": (64, {"depth": HALF}, {}),
    "nav-depth-masked": (64, {"depth": HALF}, dict(masked=True)),
    "nav-depth-movers": (64, {"depth": HALF}, dict(movers=True)),
    "nav-depth-movers-masked": (64, {"depth": HALF}, dict(movers=True, masked=True)),
    "nav-rgb": (64, {"rgb": HALF}, {}),
    "nav-rgbd": (64, {"depth": HALF, "rgb": HALF}, {}),
    "nav-rgbd-masked": (64, {"depth": HALF, "rgb": HALF}, dict(masked=True)),
    "depth": (64, DEPTH, {}),
    "depth-128": (128, DEPTH, {}),
    "depth-1": (1, DEPTH, {}),
    "depth-movers": (64, DEPTH, dict(movers=True)),
    "rgb-depth": (64, {**DEPTH, "rgb": BYTES}, {}),
    "rgb-depth-dark": (64, {**DEPTH, "rgb": BYTES}, dict(light=False)),
    "all": (64, {**DEPTH, "rgb": BYTES, **LABELS, "normal": torch.float32}, {}),
    "all-movers": (64, {**DEPTH, "rgb": BYTES, **LABELS, "normal": torch.float32}, dict(movers=True)),
    "all-bytes-movers": (
        64,
        dict.fromkeys(("depth", "rgb", "semantic", "instance", "normal"), BYTES),
        dict(movers=True, masked=True),
    ),
}
"""Kinds of images that worlds, benchmarks and tools render."""


@dataclass(frozen=True)
class Unit:
    """The unit of compilation: one Warp module and the block size of its launches."""

    name: str
    module: Any
    block: int
    kernels: tuple[tuple[str, str], ...]
    """Key of each kernel in the module, and its name in the table."""

    @property
    def hash(self) -> str:
        """Hash of the source of the kernels and of all functions that they call; cheap to compute."""
        return self.module.get_module_hash(self.block).hex()[:16]

    def source(self, arch: int = 90) -> str:
        """The generated CUDA source."""
        options = self.module.resolve_options(wp.config, block_dim=self.block) | {"output_arch": arch}
        return self.module._run_codegen(options, False)[0]


def all_units(lenient: bool = False) -> dict[str, Unit]:
    """All Warp kernels, by name. With `lenient`, worlds that cannot be created are skipped with a message."""
    init_warp()
    units = {unit.name: unit for unit in [*launched_units(), *world_units(lenient)]}
    return dict(sorted(units.items()))


# --- worlds --------------------------------------------------------------------------------------------------------


def world_units(lenient: bool = False) -> Iterator[Unit]:
    """The kernels of every bundled world."""
    for world in WORLDS:
        for variant, settings in {"": {}, **VARIANTS.get(world, {})}.items():
            name = "/".join(filter(None, ("worlds", world, variant)))
            try:
                cls = world_class(world)
                with torch.device("meta"):
                    made = cls(16, "meta", cls.Config(**settings))
                programs = _programs(made)
            except Exception as error:
                if not lenient:
                    raise
                print(f"{name} is skipped: {error}", file=sys.stderr)
                continue
            for stage, program in programs.items():
                yield _single(f"{name}/{stage}", program.kernel, program.block)


def _programs(world: Any) -> dict[str, Any]:
    if hasattr(world, "gpu_programs"):
        return world.gpu_programs()
    # Revisions without that method.
    found = {}
    stages = {"step": world._stages(False), "hold": world._stages(True), "restart": world._restart_stages()}
    for name, listed in stages.items():
        runs = [list(run) for is_call, run in groupby(listed, lambda stage: isinstance(stage, Call)) if is_call]
        for i, calls in enumerate(runs, 1):
            found[f"{name}.{i}"] = kernels.build(world.name.replace("-", "_"), calls, False)
    return found


# --- kernels found at their launches ---------------------------------------------------------------------------------


def launched_units() -> list[Unit]:
    """The kernels that are not part of a world."""
    blocks, single = {}, {}
    for module, tree in _launching_modules():
        for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
            _find_launches(module, function, blocks, single)
    units = list(single.values())
    groups: dict[tuple[str, int], tuple[Any, list[str]]] = {}
    for kernel, block in blocks.items():
        if kernel.module.name.startswith("shoal"):
            module, keys = groups.setdefault((kernel.module.name, block), (kernel.module, []))
            keys.append(kernel.key)
        else:  # in a separate module
            units.append(_single(f"{_last(kernel.func.__module__)}/{kernel.key}", kernel, block))
    for (module_name, block), (module, keys) in groups.items():
        short = _last(module_name)
        units.append(Unit(f"{short}@{block}", module, block, tuple((key, f"{short}/{key}") for key in sorted(keys))))
    return units


def unlaunched() -> list[str]:
    """Kernels of the package whose launch was not found; should be empty."""
    found = {kernel for unit in launched_units() for kernel, _ in unit.kernels}
    return sorted(
        f"{module.__name__}.{name}"
        for module, _ in _launching_modules(("@wp.kernel", *LAUNCHES))
        for name, value in vars(module).items()
        if isinstance(value, wp.Kernel) and value.key not in found
    )


LAUNCHES = ("add_kernel(", "wp.launch(", "bind(")


def _launching_modules(words: tuple[str, ...] = LAUNCHES) -> Iterator[tuple[ModuleType, ast.Module]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text()
        if any(word in text for word in words):
            parts = file.relative_to(PACKAGE).with_suffix("").parts
            yield importlib.import_module(".".join(("shoal", *parts))), ast.parse(text)


def _find_launches(module: ModuleType, function: ast.FunctionDef, blocks: dict, single: dict[str, Unit]) -> None:
    """Add the kernels that a function launches: those of modules to `blocks`, all others to `single`."""
    scope = _Scope(module, function)
    for call in [node for node in ast.walk(function) if isinstance(node, ast.Call)]:
        launch = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        block = scope.keyword(call, "block_dim" if launch == "launch" else "block")
        if launch in ("add_kernel", "launch") and len(call.args) > 1:
            if block is None:
                continue
            kernel = scope.value(call.args[0])
            if isinstance(kernel, wp.Kernel):
                blocks[kernel] = block
            elif isinstance(call.args[0], ast.Call):
                single.update(_made(scope.value(call.args[0].func), block))
            elif kernel is None:  # a parameter: any kernel of this module that has no launch by name
                for own in vars(module).values():
                    if isinstance(own, wp.Kernel) and own.module.name == module.__name__:
                        blocks.setdefault(own, block)
        elif launch == "bind" and call.args and isinstance(call.args[0], ast.Constant):
            for bound in scope.functions():
                per_agent = int("agent" in bound.input_types)
                program = kernels.build(call.args[0].value, [Call(bound, agents=per_agent)], False)
                name = f"bind/{bound.key}"
                single[name] = _single(name, program.kernel, program.block)


class _Scope:
    """Values of names inside one function of a module."""

    def __init__(self, module: ModuleType, function: ast.FunctionDef):
        self.module, self.function = module, function
        assignments = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
        self.local = {target.id: a.value for a in assignments for target in a.targets if isinstance(target, ast.Name)}

    def value(self, node: Any, steps: int = 8) -> Any:
        """A constant or an object of the module; of a conditional the first value, a GPU's; None for anything else."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.IfExp):
            return self.value(node.body)
        if isinstance(node, ast.Name) and steps:
            local = self.local.get(node.id)
            return vars(self.module).get(node.id) if local is None else self.value(local, steps - 1)
        return None

    def keyword(self, call: ast.Call, name: str) -> Any:
        """The value of an argument, also from a dict: `**sizes`."""
        for keyword in call.keywords:
            if keyword.arg == name:
                return self.value(keyword.value)
            inner = self.local.get(keyword.value.id) if isinstance(keyword.value, ast.Name) else None
            if keyword.arg is None and isinstance(inner, ast.Call):
                return self.keyword(inner, name)
        return None

    def functions(self) -> list[Any]:
        """The Warp functions that the function names."""
        names = {node.id for node in ast.walk(self.function) if isinstance(node, ast.Name)}
        found = [vars(self.module).get(name) for name in sorted(names)]
        return [
            value for value in found if isinstance(value, wp.Function) and next(iter(value.input_types), "") == "env"
        ]


def _made(factory: Any, block: int) -> dict[str, Unit]:
    """The kernels that a function creates."""
    name = factory.__name__
    if name not in FACTORIES:
        raise LookupError(f"{name}() creates kernels: add its arguments to FACTORIES in bench/gpu_kernels.py.")
    arguments = FACTORIES[name](importlib.import_module(factory.__module__))
    names = {variant: f"{name.removesuffix('_kernel')}/{variant}" for variant in arguments}
    return {names[variant]: _single(names[variant], factory(*given), block) for variant, given in arguments.items()}


def _words(module: ModuleType) -> dict[str, tuple[Any, ...]]:
    return {warp_type.__name__: (warp_type,) for _, warp_type in module.WORDS.values()}


def _render_variants(module: ModuleType) -> dict[str, tuple[Any, ...]]:
    usual = dict(light=True, movers=False, masked=False)
    return {
        name: (module.KernelVariant(side, side, tuple(sorted(outputs.items())), **(usual | options)),)
        for name, (side, outputs, options) in RENDER_VARIANTS.items()
    }


FACTORIES = {"gather_kernel": _words, "store_kernel": _words, "render_kernel": _render_variants}
"""Function that creates a kernel -> its arguments, by name, from its module."""


def _single(name: str, kernel: Any, block: int) -> Unit:
    return Unit(name, kernel.module, block, ((kernel.key, name),))


def _last(module: str) -> str:
    return module.rpartition(".")[2]


# --- Triton ----------------------------------------------------------------------------------------------------------

POLICIES: dict[str, dict[str, Any]] = {
    "cartpole-64": dict(inputs=4, hidden=(64, 64), activation="tanh", choices=2, shared_encoder=False),
    "tag-grid-32": dict(inputs=6, hidden=(32, 32), activation="relu", choices=5, shared_encoder=True),
    "tag-grid-32-many": dict(inputs=6, hidden=(32, 32), activation="relu", choices=5, shared_encoder=True, rows=2**20),
    # Triton compiles this one for a minute for sm_80 and sm_120.
    "tag-continuous-256": dict(
        inputs=71, hidden=(256, 256), activation="relu", choices=(21, 21), shared_encoder=True, archs=(90,)
    ),
    "masked-normalized": dict(
        inputs=20, hidden=(128, 64), activation="elu", choices=9, shared_encoder=True, masked=True, normalize=True
    ),
    "silu": dict(inputs=40, hidden=(64, 64), activation="silu", choices=(3, 4), shared_encoder=False, normalize=True),
}
"""Policies that act in one kernel: sizes; rows of a launch, if many; architectures, if not all."""


def act_source(name: str) -> tuple[Any, dict[str, int]]:
    """Triton's source of a policy's kernel, and its options. Needs Triton."""
    from triton.compiler import ASTSource

    from shoal.core.spaces import Box, Discrete, MultiDiscrete
    from shoal.core.world import Group
    from shoal.policy import ActorCritic, mlp_encoder
    from shoal.policy.fused import FusedActor, act_kernel

    p = dict(masked=False, normalize=False, rows=4096) | POLICIES[name]
    space = MultiDiscrete(p["choices"]) if isinstance(p["choices"], tuple) else Discrete(p["choices"])
    with torch.device("meta"):
        group = Group("agent", Box(p["inputs"]), space, masked=p["masked"])
        encoder = mlp_encoder(p["hidden"], p["activation"])
        actor = FusedActor(ActorCritic(group, encoder, p["shared_encoder"], p["normalize"], 0.0))
    if hasattr(actor, "options"):
        constants = actor.options(p["rows"], p["masked"])
    else:  # revisions without that method
        many = actor.narrow and p["rows"] >= 2**17
        constants = dict(HAS_MASK=p["masked"], ROWS=256 if many else 64, **actor.sizes)
        constants["num_warps"] = 4 if actor.narrow and not many else 8
    options = {"num_warps": constants.pop("num_warps")}
    pointers = {"parts": "*i32", "action": "*i32", "allowed": "*u8" if p["masked"] else "*fp32"}
    signature, given = {}, {}
    for i, argument in enumerate(act_kernel.arg_names):
        if argument in constants:
            signature[argument], given[(i,)] = "constexpr", constants[argument]
        else:
            signature[argument] = "i32" if argument == "rows" else pointers.get(argument, "*fp32")
    # As in a launch: torch aligns memory to 16 bytes.
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind != "constexpr"}
    return ASTSource(act_kernel, signature, given, aligned), options
