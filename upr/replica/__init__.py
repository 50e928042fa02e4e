"""Replicas: a server that follows another one, and keeps what that one has."""
