"""Cameras of agents: render what each agent sees straight into the image part of its observation."""

import math
from dataclasses import replace

import torch

from shoal.core.launch import Plan
from shoal.core.store import Store
from shoal.nav.config import NavConfig, image_shapes
from shoal.render.movers import Movers
from shoal.render.renderer import Renderer
from shoal.scene.memory import SceneMemory

BODY_COLORS = ((0.90, 0.35, 0.15), (0.15, 0.45, 0.85), (0.20, 0.65, 0.30), (0.80, 0.70, 0.10))
"""RGB colors of agents as others see them, assigned in turn."""


class AgentCameras:
    """One camera per agent; `stages.update_cameras` writes the poses and bodies to the store."""

    def __init__(self, store: Store, config: NavConfig, scenes: SceneMemory):
        self._store, self._config = store, config
        agents = config.num_agents
        views, movers = store.num_envs * agents, None
        self._wanted = torch.zeros_like(store.present)
        """bool [env, agent]: mask of the views to render."""
        if agents > 1:
            movers = Movers.make(store.num_envs, agents, store.device)
            movers = replace(movers, kind=store.body_kind, position=store.body_place)
            straight = max(0.0, config.agent_height / 2 - config.agent_radius)
            movers.size[:] = torch.tensor([config.agent_radius, config.agent_radius, straight])
            movers.color[:] = torch.tensor([BODY_COLORS[k % len(BODY_COLORS)] for k in range(agents)])
        self._renderer = Renderer(
            scenes,
            views,
            (config.image_size, config.image_size),
            {name: torch.float16 for name, _ in image_shapes(config)},
            hfov=config.hfov,
            max_depth=config.max_depth,
            movers=movers,
            own_images=False,
            scene=store.row.view(views),
            position=store.eye_place.view(views, 3),
            rotation=store.eye_turn.view(views, 4),
        )
        self._renderer.env = torch.arange(views, device=store.device) // agents
        if movers is not None:
            self._renderer.hidden = torch.arange(views, device=store.device) % agents

    def render(self, observation: torch.Tensor, when: str, plans: dict[int, Plan]) -> None:
        """Render into the image part of an observation [env, agent, ...].

        Args:
            observation: where to write.
            when: name of a flag [env] in the store; only these envs are rendered (empty: all).
            plans: cache of launch plans by the observation's address.
        """
        agents, key = self._config.num_agents, observation.data_ptr()
        only = self._store[when] if when else None
        if only is not None and agents > 1:
            self._wanted.copy_(only.unsqueeze(1).expand(-1, agents))
            only = self._wanted.view(-1)
        if key not in plans:
            images, first = {}, 0
            for name, shape in image_shapes(self._config):
                last = first + math.prod(shape)
                images[name] = observation.flatten(0, 1)[:, first:last].unflatten(1, shape)
                first = last
            plans[key] = self._renderer.plan_into(images, only)
        plans[key]()
