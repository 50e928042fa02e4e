"""The commands of upr-cat, and what they read and print."""
