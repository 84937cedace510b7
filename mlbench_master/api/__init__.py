"""Serve the REST API."""
