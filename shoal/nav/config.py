"""Settings of navigation tasks, and what follows from them: images, scenes and episode files."""

from dataclasses import dataclass
from typing import Annotated, Literal

from shoal.core.errors import ShoalError, require
from shoal.core.settings import Bounds, NonNegative, NonNegativeFloat, Positive, check_settings
from shoal.nav.ground import check_cell_size
from shoal.scene.house import BUILDINGS
from shoal.scene.sources import expand

IMAGE_CHANNELS: dict[str, dict[str, int]] = {
    "depth": {"depth": 1},
    "rgb": {"rgb": 3},
    "rgbd": {"depth": 1, "rgb": 3},
    "none": {},
}
"""Value of `image` -> channels of each rendered image, in the order of the observation."""


Measure = Annotated[float, Bounds(gt=0, lt=1000)]
"""A length [m], an angle [degrees] or a scale."""


@dataclass(frozen=True)
class NavConfig:
    """Settings that all navigation tasks have."""

    scenes: str = "house:train"
    """Training scenes: house:train, cabin:0-99, a mesh file or a folder of them; separate several with commas."""
    eval_scenes: str = ""
    """Scenes for evaluations and recordings (empty: unseen ones for procedural scenes, else the training scenes)."""
    num_eval_scenes: Positive = 200
    """Number of scenes in an evaluation."""
    episode_files: str = ""
    """Training episodes in Habitat's PointNav format: a .json.gz file or the folder of a split (empty: sampled)."""
    eval_episode_files: str = ""
    """Episodes for evaluations and recordings, in the same format (empty: sampled)."""
    detail: NonNegativeFloat = 1.0
    """Level of detail of procedural scenes."""
    up: Literal["auto", "y", "z"] = "auto"
    """Upward axis of mesh files."""
    scale: Measure = 1.0
    """Meters per unit of mesh files."""
    strict: bool = False
    """Refuse mesh files with missing textures (default: warn)."""
    scenes_in_memory: Positive = 16
    """Scenes on the device at a time."""
    scene_swap_interval: NonNegative = 8
    """Minimum number of rollouts between scene swaps (0: never swap)."""
    goals_per_scene: Positive = 64
    """Goals per scene in memory; each has a precomputed distance field."""
    memory_limit: NonNegativeFloat = 0.0
    """Device memory for scenes, in gigabytes (0: sized by the first scenes)."""
    num_agents: Positive = 1
    """Agents per env; they see and block one another."""
    image: Literal["depth", "rgb", "rgbd", "none"] = "depth"
    """Images that the agent observes; none: a blind agent."""
    image_size: Positive = 64
    """Width and height of images, in pixels."""
    max_steps: Positive = 500
    """Steps after which an episode is truncated."""
    desync_episodes: bool = False
    """Shorten the first training episode of each env by a different amount, so that time limits do not coincide."""
    forward_step_size: Measure = 0.25
    """Length of a forward step, in meters."""
    turn_angle: Measure = 10.0
    """Angle of a turn, in degrees."""
    allow_sliding: bool = True
    """Slide along obstacles (default) instead of stopping at them."""
    camera_height: Measure = 1.25
    """Height of the camera above the floor, in meters."""
    hfov: Annotated[float, Bounds(ge=1, le=170)] = 90.0
    """Horizontal field of view, in degrees."""
    max_depth: Measure = 10.0
    """Largest depth value, in meters; larger depths are clipped."""
    agent_radius: Measure = 0.1
    """Minimum distance between the agent's center and obstacles, in meters."""
    agent_height: Measure = 1.5
    """Free height that the agent needs above the floor, in meters."""
    max_step_height: NonNegativeFloat = 0.2
    """Highest step that the agent climbs, and largest rise of a slope per grid cell, in meters."""
    cell_size: Annotated[float, Bounds(ge=0.01, le=1)] = 0.1
    """Side of a cell of the walkable-ground grid, in meters."""
    evaluating: bool = False
    """Use the scenes and episodes of evaluations."""

    def __post_init__(self):
        check_settings(self)
        check_cell_size(self.cell_size, self.agent_radius)
        if self.num_agents > 1:
            longest = 4 * self.agent_radius
            rule = f"at most {longest:g} (4 x --agent-radius) with several agents, or they step over one another"
            require("forward-step-size", self.forward_step_size, self.forward_step_size <= longest, rule)
        tall = self.agent_height > self.max_step_height + 0.1
        require("agent-height", self.agent_height, tall, "at least 0.1 m more than --max-step-height")


def image_shapes(config: NavConfig) -> tuple[tuple[str, tuple[int, int, int]], ...]:
    """Name and shape (height, width, channels) of each image in an observation, in order."""
    size = config.image_size
    return tuple((name, (size, size, channels)) for name, channels in IMAGE_CHANNELS[config.image].items())


def active_episode_files(config: NavConfig) -> str:
    """Path of the episode files in use; empty if episodes are sampled."""
    return config.eval_episode_files if config.evaluating else config.episode_files


def num_scenes_in_memory(config: NavConfig, num_envs: int) -> int:
    """Number of scenes on the device; an evaluation loads all of its scenes, up to one per env."""
    return min(config.num_eval_scenes, num_envs) if config.evaluating else config.scenes_in_memory


def scene_sources(config: NavConfig) -> list[str]:
    """Names of the single scenes in use, with the level of detail of procedural ones."""
    sources = [s.strip() for s in config.scenes.split(",")]
    if not config.evaluating:
        return _expand(sources, config.detail)
    if config.eval_scenes:
        return _expand([s.strip() for s in config.eval_scenes.split(",")], config.detail)
    candidates = _expand(list(dict.fromkeys(unseen_scenes(source) for source in sources)), config.detail)
    trained = set(filter(is_procedural, _expand(sources, config.detail)))
    if not (unseen := [scene for scene in candidates if scene not in trained]):
        raise ShoalError(f"--scenes {config.scenes} leaves no scene for evaluations; name some with --eval-scenes.")
    return unseen


def is_procedural(source: str) -> bool:
    """Whether a source names procedural scenes, not files."""
    return source.partition(":")[0] in BUILDINGS


def unseen_scenes(source: str) -> str:
    """The test scenes of the same procedural kind; a source of files is returned unchanged."""
    if not is_procedural(source):
        return source
    building, _, rest = source.partition(":")
    _, at, detail = rest.partition("@")
    return f"{building}:test{at}{detail}"


def _expand(sources: list[str], detail: float) -> list[str]:
    if detail != 1.0:
        sources = [f"{s}@{detail:g}" if is_procedural(s) and "@" not in s else s for s in sources]
    return expand(sources)
