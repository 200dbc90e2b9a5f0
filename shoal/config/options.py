"""Options of the commands other than `shoal train`: one dataclass each, read by tyro.

Nothing heavy is imported here, so that `--help` answers at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from shoal.config.counts import Count
from shoal.core.errors import ShoalError
from shoal.core.settings import MAX_THREADS, Bounds, NonNegative, check_settings

T = TypeVar("T")

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
RunFolderName = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
SceneName = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCENE")]
SceneNames = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SCENE [SCENE ...]")]
Seconds = Annotated[float, Bounds(gt=0, lt=3600)]


def parse_options(kind: type[T], command: str, words: Sequence[str]) -> T:
    """Parse the options of `shoal COMMAND`; the docstring of the class `kind` is the description in its help."""
    return _parse(kind, command, words, return_unknown_args=False)


def parse_known_options(kind: type[T], command: str, words: Sequence[str]) -> tuple[T, list[str]]:
    """The same, and the arguments that are not among them."""
    return _parse(kind, command, words, return_unknown_args=True)


def _parse(kind: Any, command: str, words: Sequence[str], return_unknown_args: bool) -> Any:
    found = tyro.cli(
        kind,
        prog=f"shoal {command}",
        description=kind.__doc__,
        args=list(words),
        return_unknown_args=return_unknown_args,
    )
    check_settings(found[0] if return_unknown_args else found)
    return found


@dataclass(frozen=True)
class TrustOption:
    """Whether code of a run may be executed."""

    trust: Flag = False
    """Execute the run's own code although you have not trained it here."""


@dataclass(frozen=True)
class ResumeOptions(TrustOption):
    """Continue a run from its newest good checkpoint."""

    run: RunFolderName = tyro.MISSING
    """Run folder."""
    total_steps: Annotated[Count, Bounds(ge=1)] | None = None
    """New end of the run, in env steps."""
    processes: Annotated[int, Bounds(ge=1, le=MAX_THREADS)] | None = None
    """Number of data-parallel processes (default: as before)."""
    gpus: Annotated[int, Bounds(ge=1, le=MAX_THREADS)] | None = None
    """Number of GPUs of this machine, one process each."""
    quiet: Flag = False
    """Show no progress on the terminal."""


@dataclass(frozen=True)
class PlayOptions(TrustOption):
    """Options of commands that play episodes with the policies of a run."""

    run: RunFolderName = tyro.MISSING
    """Run folder."""
    checkpoint: str = "best"
    """best, last or a number of env steps."""
    device: str | None = None
    """auto, cpu, cuda or cuda:N (default: auto)."""
    seed: Annotated[int, Bounds(ge=0, le=2**31 - 1)] | None = None
    """Seed of the episodes (default: the run's)."""
    random: tuple[str, ...] = ()
    """Groups that act at random instead."""
    load_policy: tuple[str, ...] = ()
    """Groups played by the policy of another run: GROUP=RUN."""
    set: tuple[str, ...] = ()
    """Other settings of the world: NAME=VALUE, such as eval-scenes=my/folder."""
    stochastic: Flag = False
    """Sample actions (default: as the run's own evaluations)."""
    deterministic: Flag = False
    """Take the most likely actions (default: as the run's own evaluations)."""

    def __post_init__(self):
        if self.stochastic and self.deterministic:
            raise ShoalError("Give --stochastic or --deterministic, not both.")

    @property
    def stochastic_actions(self) -> bool | None:
        """Whether actions are sampled (None: as in the run's own evaluations)."""
        return self.stochastic if self.stochastic or self.deterministic else None


@dataclass(frozen=True)
class EvalOptions(PlayOptions):
    """Play whole episodes with a run's policy, in envs and with seeds of their own. Brackets are 95 % intervals."""

    episodes: int = 100
    """Number of episodes."""
    out: str | None = None
    """Write all scores and the figures of every episode to this .json file."""
    maps: int | None = None
    """Draw top-down maps of the first N episodes (navigation)."""
    maps_dir: str | None = None
    """Folder for the maps (default: maps/ in the run folder)."""


@dataclass(frozen=True)
class RecordOptions(PlayOptions):
    """Write a video of a run's policy (.mp4 or .gif) or one picture of many envs (.png)."""

    out: str | None = None
    """File: .mp4, .gif or .png (default: a video in videos/ of the run folder)."""
    envs: int | None = None
    """Envs side by side (default: 4; 16 for .png)."""
    steps: int | None = None
    """Steps to record (default: 10 s; for .png, the 100 before it)."""
    fps: int | None = None
    """Frames per second (default: 50; 20 in 2-D worlds, 10 in navigation)."""


@dataclass(frozen=True)
class PlotOptions:
    """Draw the learning curves of one or more runs."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")] = tyro.MISSING
    """Run folders."""
    out: str | None = None
    """File (default: curve.png in the first run folder)."""


@dataclass(frozen=True)
class SceneFileOptions:
    """How scene files are read."""

    up: Literal["auto", "y", "z"] = "auto"
    """Upward axis of the file."""
    scale: float = 1.0
    """Meters per unit of the file (0.01: centimeters)."""
    strict: Flag = False
    """Refuse files whose textures are missing."""


@dataclass(frozen=True)
class SceneInfoOptions(SceneFileOptions):
    """Print a scene's size, triangles, materials, textures, labels and memory."""

    scene: SceneName = tyro.MISSING
    """house:SEED, cabin:SEED, house:SEED@DETAIL, or a .glb, .gltf, .obj or .ply file."""


@dataclass(frozen=True)
class SceneRenderOptions(SceneInfoOptions):
    """Write one picture of many views of a scene, in color and in depth."""

    views: int = 16
    """Number of views."""
    out: str = "sheet.png"
    """File: .png or .jpg."""
    size: str = "192x144"
    """Pixels of each view."""
    hfov: float = 90.0
    """Horizontal field of view [degrees]."""
    seed: int = 0
    """Seed of the views."""
    light: bool = True
    """Shade by a simple light."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""


@dataclass(frozen=True)
class SceneEpisodesOptions(SceneFileOptions):
    """Generate PointNav episodes by Habitat's rules and write FOLDER/SPLIT/content/SCENE.json.gz."""

    scenes: SceneNames = tyro.MISSING
    """house:SEED, cabin:SEED, house:0-99, a .glb, .gltf, .obj or .ply file, or a folder of files."""
    count: int = 100
    """Episodes per scene."""
    split: str = "val"
    """train, val or another name."""
    out: str = "episodes"
    """Folder to write to."""
    seed: int = 0
    """Seed of the episodes."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""


@dataclass(frozen=True)
class BenchOptions:
    """Measure env steps per second. All other flags are those of `shoal train`."""

    envs: tuple[Count, ...] = ()
    """Numbers of envs (default: from 256 to as many as pay off on this device)."""
    seconds: Seconds = 2.0
    """Seconds per measurement."""
    out: Path | None = None
    """Write the results here as JSON lines, and a picture beside them."""


@dataclass(frozen=True)
class BenchRenderOptions:
    """Measure images per second."""

    scene: tuple[str, ...] = ("house:7@2",)
    """Scenes, assigned to the views in turn."""
    views: tuple[Count, ...] = ()
    """Numbers of views (default: as many as pay off on this device)."""
    size: str = "64x64"
    """Pixels of a view."""
    outputs: tuple[str, ...] = ("depth",)
    """Renderer outputs, such as depth rgb; a wrong name lists all."""
    movers: NonNegative = 0
    """Moving objects per env."""
    seconds: Seconds = 1.0
    """Seconds per measurement."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    out: Path | None = None
    """Write the results here as JSON lines."""


@dataclass(frozen=True)
class CheckOptions:
    """How long and where a world is checked."""

    steps: Annotated[Count, Bounds(ge=1)] = 200
    """Steps with random actions."""
    envs: Annotated[Count, Bounds(ge=2)] = 64
    """Envs of the batch that others are compared with."""
    seed: Annotated[int, Bounds(ge=0, le=2**31 - 2)] = 1
    """Seed of the world and of the actions."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N; on a GPU the world is also compared with the CPU."""
    debug: bool = True
    """Look for indices out of range, in Warp's debug mode, which takes some seconds."""

    def __post_init__(self):
        check_settings(self)


@dataclass(frozen=True)
class ListOptions:
    """List the bundled worlds and the kinds of environments that can be wrapped."""
