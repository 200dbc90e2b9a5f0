"""Navigation: walkable ground, geodesic distance, episodes, and the task PointNav."""
