"""The commands: upr-server, upr-admin, upr-cat."""
