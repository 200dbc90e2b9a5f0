"""Contact sheets: many views of a scene as one picture, color above depth."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from shoal.core.errors import ShoalError, new_file, writing
from shoal.render.renderer import Renderer
from shoal.render.viewpoints import find_viewpoints
from shoal.scene.memory import SceneMemory
from shoal.scene.pack import PackedScene

GAP = 6
TITLE = 22


def draw_sheet(
    scene: PackedScene,
    views: int = 16,
    size: tuple[int, int] = (192, 144),
    *,
    light: bool = True,
    hfov: float = 90.0,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Image.Image:
    """Render a contact sheet of `views` views, at least four per row, each as color above depth."""
    memory = SceneMemory.holding([scene], device)
    far = max(100.0, 10.0 * float((scene.bounds[1] - scene.bounds[0]).max()))
    renderer = Renderer(memory, views, size, ["rgb", "depth"], hfov=hfov, far=far, light=light)
    images = renderer.render(find_viewpoints(memory, 0, views, seed))
    rgb = images["rgb"].cpu().numpy()
    depth = images["depth"][..., 0].cpu().numpy()
    shades = [colorize_depth(one, renderer.far) for one in depth]
    columns = min(views, max(4, round(views**0.5)))
    rows = -(-views // columns)
    width, height = size
    sheet = Image.new("RGB", (columns * (width + GAP) + GAP, rows * (2 * height + GAP + 2) + GAP + TITLE), "white")
    title = f"{scene.name}: {scene.triangles:,} triangles, {scene.nbytes / 1e6:.1f} MB on the device"
    ImageDraw.Draw(sheet).text((GAP, GAP), title, fill="black")
    for k in range(views):
        x = GAP + k % columns * (width + GAP)
        y = TITLE + GAP + k // columns * (2 * height + GAP + 2)
        sheet.paste(Image.fromarray(rgb[k]), (x, y))
        sheet.paste(Image.fromarray(shades[k]), (x, y + height + 2))
    return sheet


def colorize_depth(depth: np.ndarray, far: float) -> np.ndarray:
    """Depth [height, width] as uint8 RGB: near is light, far is dark, no hit is black."""
    from matplotlib import colormaps

    hit = depth < far
    limit = float(np.percentile(depth[hit], 99)) if hit.any() else 1.0
    colors = colormaps["magma"](1.0 - 0.9 * np.clip(depth / limit, 0, 1))[..., :3]
    return (colors * hit[..., None] * 255).astype(np.uint8)


def parse_size(text: str) -> tuple[int, int]:
    """Parse width and height from `192x144`, or one number for both."""
    width, x, height = text.lower().partition("x")
    try:
        return int(width), int(height if x else width)
    except ValueError:
        raise ShoalError(f"A size must be WIDTHxHEIGHT, such as 192x144, got {text!r}.") from None


def check_path(path: str | Path) -> Path:
    """The path, checked for a suffix of an image file."""
    return new_file(path, (".png", ".jpg", ".jpeg"), "A sheet")


def save_sheet(sheet: Image.Image, path: str | Path) -> Path:
    """Write a sheet as .png or .jpg."""
    path = check_path(path)
    with writing(path):
        sheet.save(path)
    return path
