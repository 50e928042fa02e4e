"""The commands of upr-admin, one file each."""
