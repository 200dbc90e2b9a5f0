"""Host worlds: environments on CPU cores, stepped by a vector runner, as a World."""

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch

from shoal.core.errors import ShoalError
from shoal.core.extras import needs_extras
from shoal.core.launch import wait_for_stream
from shoal.core.store import full_device
from shoal.core.user_code import UserCode
from shoal.core.world import EpisodeStatistics, Group, GroupOutputs, LastEpisode, Outputs, World
from shoal.host.config import HostConfig, Schedule
from shoal.host.device_bridge import RewardTransform
from shoal.host.envs import HostGroup, close_envs, env_class, host_groups_of
from shoal.host.make_runner import RunnerSpec
from shoal.host.native import NativeLibrary, NativeRunner
from shoal.host.runners import SerialRunner
from shoal.host.sources import Source
from shoal.host.spaces import action_space, observation_space
from shoal.host.vector_env import HostVectorEnv, env_seeds


class HostWorld(World):
    """Envs that live on the host. `host_world` makes the subclass of an environment.

    | | |
    |---|---|
    | observation | the env's; Discrete parts as one-hot vectors, a Dict or Tuple as one flat vector with named parts |
    | action | the env's; a Box whose bounds differ is scaled from -1 to 1 |
    | reward, end | the env's; time limits of Gymnasium's registry are truncations |

    The state of an env cannot be saved: a resumed run starts new episodes.
    """

    Config: ClassVar[type[HostConfig]] = HostConfig
    settings: ClassVar[dict[str, dict[str, Any]]] = {}
    kind: ClassVar[str] = ""
    env_name: ClassVar[str] = ""
    writes_alive: ClassVar[bool] = True
    """Whether groups have `alive` flags: for agents that leave, envs that are lost, and reset-only steps."""
    handles_settings = ("time_limit", "action_repeat", "frame_stack", "obs_dtype")
    resumable = on_device = False
    unsharded_state = ("resumes",)

    def __init__(
        self,
        num_envs: int,
        device: str | torch.device = "cpu",
        config: HostConfig | None = None,
        time_limit: int | None = None,
        action_repeat: int = 1,
        frame_stack: int = 1,
        obs_dtype: str = "float32",
    ):
        self.num_envs = num_envs
        self.device = full_device(device)
        self.config = config or self.Config()
        self.repeat = action_repeat
        self.limit = self._limit(time_limit)
        self.host_groups = self.host_groups_of(self.config)
        self.groups = tuple(_on_device(g, frame_stack, obs_dtype) for g in self.groups_of(self.config))
        self.outputs = self._own_outputs = _allocate(self.groups, num_envs, self.device)
        self._vector_env: HostVectorEnv | None = None
        self._seed = self._first_env = self._resumes = 0

    # --- what the envs are ------------------------------------------------------------------------------------------

    @classmethod
    def source(cls, config: HostConfig) -> Source:
        """Where the envs come from."""
        return Source(cls.kind, cls.env_name, config.env_kwargs, config.render)

    @classmethod
    def host_groups_of(cls, config: HostConfig) -> list[HostGroup]:
        """The groups of agents, found by making one env."""
        return _probe(cls.source(config))

    @classmethod
    def groups_of(cls, config: HostConfig) -> tuple[Group, ...]:
        """The groups as policies see them."""
        return tuple(
            Group(
                group.name,
                observation_space(group.observation),
                action_space(group.action),
                agents=len(group.agents),
                can_leave=cls.writes_alive,
            )
            for group in cls.host_groups_of(config)
        )

    @classmethod
    def for_evaluation(cls, config: HostConfig) -> HostConfig:
        """Settings for evaluation: whole episodes from their first step."""
        return replace(config, desync_steps=0, env_schedule="lockstep")

    @classmethod
    def for_recording(cls, config: HostConfig) -> HostConfig:
        """Settings for recordings: envs with a render mode, in this process."""
        return replace(cls.for_evaluation(config), vec_backend="serial", render=True)

    @property
    def time_limit(self) -> int | None:
        """`max_episode_steps` of Gymnasium's registry. None for envs that may truncate at any time."""
        return None if self.kind != "gym" or self.config.env_truncates else self.limit

    def _limit(self, time_limit: int | None) -> int | None:
        """The smaller of `time_limit` and the registry's limit, in steps of this world."""
        registered = self.source(self.config).max_steps
        limits = [time_limit, None if registered is None else -(-registered // self.repeat)]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def bytes_per_env(self) -> int:
        found = self.outputs.tensors({(g.name, f.name): f"{g.name}.{f.name}" for g in self.groups for f in _FIELDS})
        return sum(t.nbytes for t in found.values()) // self.num_envs

    def native_library(self) -> NativeLibrary | None:
        """What makes native batches of this environment (None: it has none)."""
        return None

    def reward_transform(self) -> RewardTransform | None:
        """Changes rewards in place for learners; statistics use the original ones."""
        return None

    # --- start and end ----------------------------------------------------------------------------------------------

    @property
    def vector_env(self) -> HostVectorEnv:
        """The envs, made at the first use: reading the groups of a world starts no process."""
        if self._vector_env is None:
            self._vector_env = HostVectorEnv(
                self._runner_spec(), self.host_groups, self.device, self.reward_transform()
            )
        return self._vector_env

    def started(self) -> HostVectorEnv:
        """The envs, checked to be neither unreset nor closed."""
        if self._vector_env is None:
            raise ShoalError(f"{self.name}: step() before reset(); call reset(seed) first.")
        if self._vector_env.closed:
            raise ShoalError(f"{self.name}: step() after close().")
        return self._vector_env

    def _runner_spec(self) -> RunnerSpec:
        return RunnerSpec(
            source=self.source(self.config),
            config=self.config,
            native=self.native_library(),
            num_envs=self.num_envs,
            on_gpu=self.device.type == "cuda",
            limit=self.limit,
            repeat=self.repeat,
        )

    def set_schedule(self, schedule: Schedule) -> None:
        """Set the schedule that was chosen. In lockstep one native batch is faster than two, so they are made again."""
        self.config = replace(self.config, env_schedule=schedule)
        runner = None if self._vector_env is None else self._vector_env.runner
        if isinstance(runner, NativeRunner) and len(runner.env_slices) != self._runner_spec().slices_per_worker:
            self.close()
            self._vector_env = None

    def reset(self, seed: int = 0, first_env: int = 0, desync_steps: int | None = None) -> Outputs:
        """Start all envs; `desync_steps` overrides the setting."""
        envs = self.vector_env
        self._seed, self._first_env = seed, first_env
        envs.reset(env_seeds(seed + 7919 * self._resumes, first_env, self.num_envs))
        steps = self.config.desync_steps if desync_steps is None else desync_steps
        if steps:
            envs.desync(seed, first_env, steps)
        envs.forget_ends()
        self.outputs = self._own_outputs
        envs.bridge.write_rollout(slice(0, self.num_envs), self.outputs)
        return self.outputs

    def restart(self, mask: torch.Tensor) -> None:
        envs = self.started()
        flags = self.outputs.terminated.clone(), self.outputs.truncated.clone()
        rewards = {name: group.reward.clone() for name, group in self.outputs.groups.items()}
        envs.restart(mask.cpu().numpy())  # sync: never called inside a rollout
        envs.bridge.write_rollout(slice(0, self.num_envs), self.outputs)
        # A restart writes observations alone; end flags and rewards stay those of the last step.
        self.outputs.terminated.copy_(flags[0])
        self.outputs.truncated.copy_(flags[1])
        for name, reward in rewards.items():
            self.outputs.groups[name].reward.copy_(reward)

    def close(self) -> None:
        if self._vector_env is not None:
            self._vector_env.close()

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(
        self,
        actions: torch.Tensor | Mapping[str, torch.Tensor],
        into: Outputs | None = None,
        hold: torch.Tensor | None = None,
    ) -> Outputs:
        envs = self.started()
        actions = self.by_group(actions)
        self.check_actions(actions, values=False)
        if hold is not None:
            envs.hold(hold.cpu().numpy())
        all_slices, all_rows = range(len(envs.env_slices)), slice(0, self.num_envs)
        envs.bridge.put_actions(actions, all_rows)
        self.wait_for_actions()
        envs.send(all_slices)
        self.outputs = into or self.outputs
        envs.recv(all_slices, len(all_slices))
        if hold is not None:
            envs.release()
        envs.bridge.write_rollout(all_rows, self.outputs)
        envs.write_final(all_rows, self.outputs)
        return self.outputs

    def wait_for_actions(self) -> None:
        """Wait until actions have arrived from the GPU; asleep if other envs are stepping, which need the core."""
        if self.device.type != "cuda":
            return
        if self.config.env_schedule == "lockstep":
            torch.cuda.current_stream(self.device).synchronize()  # sync: the host steps with these actions
        else:
            wait_for_stream(self.device)  # sync: as above

    # --- statistics and state ---------------------------------------------------------------------------------------

    def statistics(self) -> EpisodeStatistics:
        return self.vector_env.episodes.statistics()

    def last_episode(self) -> LastEpisode:
        return self.vector_env.episodes.last_episode(self.device)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Episode totals alone: the state of an env cannot be saved."""
        totals = self.statistics()
        state = dict(resumes=torch.tensor([self._resumes]), episodes=totals.episodes, length_sum=totals.length_sum)
        state.update({f"return_sum.{name}": total for name, total in totals.return_sum.items()})
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load episode totals, and start new episodes from seeds that were not used before."""
        self._resumes = int(state["resumes"]) + 1
        self.reset(self._seed, self._first_env)
        for name, tensor in self.state_dict().items():
            if name != "resumes":
                tensor.copy_(state[name])

    def picture(self, canvas, env: int) -> None:
        runner = None if self._vector_env is None else self._vector_env.runner
        if not isinstance(runner, SerialRunner):
            raise ShoalError(f"{self.name}: only envs in this process can be rendered (--vec-backend serial).")
        source, rendered = f"{self.kind}:{self.env_name}", runner.envs.envs[env]
        try:
            with needs_extras(f"A picture of {source}"):
                image = rendered.render()
        except NotImplementedError:
            raise ShoalError(f"{source} gives no picture: it has no render().") from None
        if image is None:
            raise ShoalError(f"{source} gives no picture: its render() returned nothing.")
        with UserCode(f"{source} gives no picture", env_class(rendered).render):
            canvas.paste(np.asarray(image))


_FIELDS = fields(GroupOutputs)


def _allocate(groups: tuple[Group, ...], num_envs: int, device: torch.device) -> Outputs:
    outputs = {}
    for g in groups:
        observation = torch.zeros(num_envs, g.agents, *g.observation.shape, dtype=g.observation.dtype, device=device)
        alive = torch.ones(num_envs, g.agents, dtype=torch.bool, device=device) if g.can_leave else None
        outputs[g.name] = GroupOutputs(
            observation=observation,
            reward=torch.zeros(num_envs, g.agents, device=device),
            final_observation=torch.zeros_like(observation),
            alive=alive,
            final_alive=None if alive is None else torch.ones_like(alive),
        )
    flags = [torch.zeros(num_envs, dtype=torch.bool, device=device) for _ in range(2)]
    return Outputs(*flags, groups=outputs)


def _on_device(group: Group, frame_stack: int, obs_dtype: str) -> Group:
    """A group with stacked frames, and float observations in `obs_dtype`."""
    space = group.observation
    if space.dtype == torch.float32:
        space = replace(space, dtype=getattr(torch, obs_dtype))
    return replace(group, observation=space, stack=group.stack * frame_stack)


@cache
def _probe(source: Source) -> list[HostGroup]:
    env = source.make()
    try:
        with UserCode(f"The spaces of {source} cannot be used", env_class(env)):
            host_groups = host_groups_of(env)
            for group in host_groups:
                observation_space(group.observation)
                action_space(group.action)
            return host_groups
    finally:
        close_envs([env])
