"""3-D scenes: loading, checking, procedural houses, search trees, and the pool that shares scenes among envs."""

from shoal.scene.load import load_scene
from shoal.scene.memory import SceneMemory
from shoal.scene.pack import PackedScene, pack_scene
from shoal.scene.pool import ScenePool
from shoal.scene.scene import Material, Scene, check_scene
from shoal.scene.sources import expand, open_scene, prepare

__all__ = [
    "Material",
    "PackedScene",
    "Scene",
    "SceneMemory",
    "ScenePool",
    "check_scene",
    "expand",
    "load_scene",
    "open_scene",
    "pack_scene",
    "prepare",
]
