"""Planted faults and clean twins: how often a verdict of `bisect` is right."""
