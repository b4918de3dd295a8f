"""The main job on real data: a year of flights through one deployment, checked while it runs."""
