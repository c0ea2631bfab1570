"""Actors, the public async API, models."""
