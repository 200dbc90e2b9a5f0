"""Navigation: walkable ground, geodesic distance, episodes, and the tasks PointNav, Flee and Explore."""
