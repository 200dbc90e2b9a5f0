"""Render 64 rotating cameras in two houses, with a moving ball beside each: one call per step renders all images."""

import math
import time

import torch
from PIL import Image

from shoal.render import SPHERE, Movers, Renderer, find_viewpoints, heading
from shoal.scene import SceneMemory, prepare

device = "cuda" if torch.cuda.is_available() else "cpu"
houses = SceneMemory.holding([prepare("house:7", device=device), prepare("house:8", device=device)], device)

views = 64
row = torch.arange(views, device=device) % 2  # which house each camera is in
poses = torch.empty(views, 7, device=device)
for house in range(2):
    poses[row == house] = find_viewpoints(houses, house, views // 2)

balls = Movers.make(views, 1, device)  # one per camera, invisible to the other cameras
balls.kind.fill_(SPHERE)
balls.size.fill_(0.15)
balls.color[:] = torch.tensor([0.9, 0.2, 0.1])

renderer = Renderer(houses, views, (64, 64), ["depth", "rgb"], movers=balls)
images = renderer.render(poses, row)  # compiles; later calls write the same tensors

steps = 36
start = time.perf_counter()
for step in range(steps):
    angle = 2 * math.pi * step / steps
    poses[:, 3:] = heading(torch.full((views,), angle, device=device))
    balls.position[:, 0] = poses[:, :3] + torch.tensor([math.cos(angle), math.sin(angle), -0.5], device=device)
    images = renderer.render(poses)
mean_depth = images["depth"].mean().item()  # waits for the device
print(
    f"{views * steps / (time.perf_counter() - start):,.0f} images per second on {device}; mean depth {mean_depth:.2f} m"
)

sheet = images["rgb"].reshape(8, 8, 64, 64, 3).permute(0, 2, 1, 3, 4).reshape(512, 512, 3)
Image.fromarray(sheet.cpu().numpy()).save("look_around.png")
print("look_around.png")
